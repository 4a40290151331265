"""Sampling with a predictor that is known to be perfect: data N(0, s²) in every pixel."""

import random

import pytest
import torch

from scalelong.config import SAMPLERS
from scalelong.diffusion import sample
from scalelong.errors import InvalidConfigError
from scalelong.noise import NoiseProcess, as_epsilon

SPREAD = 0.2


def perfect(process, prediction):
    """E[ε | x_t] = σ x_t / (α² s² + σ²), and what follows for v and x_0."""

    def predict(x, t):
        signal, sigma = (value.view(-1, 1, 1, 1) for value in process.signal_and_noise(t))
        total = signal**2 * SPREAD**2 + sigma**2
        epsilon, x0 = sigma * x / total, signal * SPREAD**2 * x / total
        return {"epsilon": epsilon, "x0": x0, "v": signal * epsilon - sigma * x0}[prediction]

    return predict


@pytest.mark.parametrize("schedule", ["vp", "ddpm", "cosine"])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize(("sampler", "steps"), [("ddim", 500), ("dpm++", 25), ("ddpm", 1000)])
def test_a_perfect_predictor_gives_the_data_distribution(schedule, prediction, sampler, steps):
    process = NoiseProcess(schedule)
    predict = perfect(process, prediction)
    images = sample(predict, process, prediction, (1, 16, 16), range(16), sampler=sampler, steps=steps)
    assert images.std().item() == pytest.approx(SPREAD, rel=0.03)
    assert abs(images.mean().item()) < 0.02


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_depends_on_its_seed_alone(sampler):
    process = NoiseProcess("vp")
    predict = perfect(process, "epsilon")
    together = sample(predict, process, "epsilon", (1, 4, 4), [1, 2, 3], sampler=sampler, steps=5)
    alone = sample(predict, process, "epsilon", (1, 4, 4), [2], sampler=sampler, steps=5)
    torch.testing.assert_close(together[1:2], alone)
    assert not torch.allclose(together[0], together[1])


def test_global_random_numbers_are_not_touched():
    process = NoiseProcess("vp")
    before, python_before = torch.get_rng_state(), random.getstate()
    sample(perfect(process, "epsilon"), process, "epsilon", (1, 4, 4), [1], sampler="ddpm", steps=3)
    assert torch.equal(before, torch.get_rng_state())
    assert python_before == random.getstate()


def test_conversions_agree_on_the_perfect_predictor():
    process = NoiseProcess("cosine")
    x, t = torch.randn(8, 1, 4, 4), process.times(torch.linspace(0.1, 0.9, 8))
    expected = perfect(process, "epsilon")(x, t)
    for prediction in ("v", "x0"):
        torch.testing.assert_close(as_epsilon(process, prediction, perfect(process, prediction)(x, t), x, t), expected)


def test_unknown_sampler_is_refused():
    with pytest.raises(InvalidConfigError, match="known: ddpm, ddim"):
        sample(lambda x, t: x, NoiseProcess(), "epsilon", (1, 4, 4), [0], sampler="magic")
