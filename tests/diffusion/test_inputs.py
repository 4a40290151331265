"""One maker of inputs: what it draws is a function of seed, purpose, step and position, and nothing else."""

from typing import Any

import pytest
import torch

from scalelong.data import Batch, MemoryData, to_float
from scalelong.diffusion import ClassCondition, Conditions, InputMaker, Unconditional, held_out_loss
from scalelong.models import Denoiser, UViT
from scalelong.noise import NoiseProcess, epsilon_losses
from scalelong.randomness import generator, noise, uniform

SEED, STEP, BATCH = 3, 17, 40


def data(count: int = 300) -> MemoryData:
    pixels = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return MemoryData("random", pixels)


def maker(schedule: Any = "vp", conditions: Conditions | None = None, **options: Any) -> InputMaker:
    return InputMaker(NoiseProcess(schedule), conditions or Unconditional(), (1, 8, 8), seed=SEED, **options)


@pytest.mark.parametrize("schedule", ["vp", "ddpm"])
def test_a_step_is_what_the_seed_says(schedule):
    """Purposes and order of the draws decide published numbers, so they are written out here once more."""
    images = data().fetch(torch.arange(BATCH))
    x0, eps, t, condition = maker(schedule, batch_size=BATCH, flip=True).for_step(STEP, range(BATCH), images)
    flipped = uniform(SEED, "flip", STEP, BATCH) < 0.5
    assert torch.equal(x0, to_float(images.images, flipped))
    assert torch.equal(eps, noise(SEED, STEP, range(BATCH), (1, 8, 8), "cpu"))
    assert torch.equal(t, NoiseProcess(schedule).times(uniform(SEED, "time", STEP, BATCH)))
    assert condition is None


def test_parts_of_a_batch_are_those_of_the_whole():
    images = data().fetch(torch.arange(BATCH))
    make = maker(batch_size=BATCH, flip=True)
    whole = make.for_step(STEP, range(BATCH), images)
    part = make.for_step(STEP, range(10, 30), data().fetch(torch.arange(10, 30)))
    for name in ("x0", "noise", "t"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[10:30])
    assert part.condition is whole.condition is None


def test_dropped_conditions_are_the_null_label():
    labels = torch.arange(BATCH) % 2
    batch = Batch(torch.zeros(BATCH, 1, 8, 8, dtype=torch.uint8), labels=labels, captions=None)
    make = maker(conditions=ClassCondition(("a", "b"), guided=True), batch_size=BATCH, condition_dropout=0.5)
    condition = make.for_step(STEP, range(BATCH), batch).condition
    dropped = uniform(SEED, "condition", STEP, BATCH) < 0.5
    assert condition is not None
    assert torch.equal(condition, torch.where(dropped, torch.tensor(2), labels))


@pytest.mark.parametrize("schedule", ["vp", "sd"])
def test_the_held_out_loss_is_what_it_always_was(schedule):
    torch.manual_seed(0)
    network = Denoiser(UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=2, heads=2))
    images, process, found = data(), NoiseProcess(schedule), []
    times = process.times((torch.randperm(300, generator=generator(SEED, "held-out times")) + 0.5) / 300)
    source = generator(SEED, "held-out noise")
    with torch.no_grad():
        for start in (0, 128, 256):  # chunks of 128
            rows = torch.arange(start, min(start + 128, 300))
            x0 = to_float(images.fetch(rows).images)
            eps = torch.randn(x0.shape, generator=source)
            found.append(epsilon_losses(network.given(None), process, "v", x0, eps, times[rows]))
    assert held_out_loss(network, maker(schedule), "v", images) == float(torch.cat(found).double().mean())


def test_the_probe_is_fixed_and_covers_the_schedule():
    images, process = data(), NoiseProcess("vp")
    x, t, condition = maker().probe(images, 16)
    x0 = to_float(images.fetch(torch.arange(16)).images)
    assert torch.equal(t, process.times((torch.arange(16) + 0.5) / 16))
    assert torch.equal(x, process.add_noise(x0, torch.randn(x0.shape, generator=generator(SEED, "probe")), t))
    assert condition is None
    assert torch.equal(maker().clean(images, 16), x0)
    assert maker().probe(data(5), 16).x.shape == (5, 1, 8, 8)
