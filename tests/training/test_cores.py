"""Each core takes its own images: the same gradient as when all share every operation."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scalelong.config import HardwareConfig, TrainConfig
from scalelong.errors import InvalidConfigError
from scalelong.models import UViT
from scalelong.runs.processes import make_accelerator
from scalelong.training import cores as cores_module
from scalelong.training.cores import CoreParallel, chunks, images_at_once, make_cores, sharing_copy


class OnCpu:
    device = torch.device("cpu")
    num_processes = 1
    mixed_precision = "no"


def network(scaling: str = "cs") -> UViT:
    torch.manual_seed(0)
    return UViT(image_size=8, patch_size=2, channels=1, dim=32, depth=4, heads=2, scaling=scaling)


def whole(model, x, t):
    loss = (model(x, t) - 1).square().flatten(1).mean(1).mean()
    loss.backward()
    return loss.detach()


def summed(x, t):
    return lambda call, part: (call(x[part], t[part]) - 1).square().flatten(1).mean(1).sum()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("images", [1, 2, 7, 150])
@pytest.mark.parametrize("scaling", ["cs", "ls"])
def test_the_gradient_is_that_of_the_whole_batch(count, images, scaling):
    plain = network(scaling)
    split = copy.deepcopy(plain)
    x, t = torch.randn(images, 1, 8, 8), torch.rand(images) * 999
    expected = whole(plain, x, t)
    cores = CoreParallel(split, count)
    # Twice: gradients are added to what is there.
    losses = [cores.backward(summed(x, t), images, 0.5) for _ in range(2)]
    torch.testing.assert_close(losses, [expected] * 2)
    for a, b in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1024, 100])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_same_bits_every_time(count, rows, monkeypatch):
    monkeypatch.setattr(cores_module, "ROWS", rows)
    x, t = torch.randn(64, 1, 8, 8), torch.rand(64) * 999
    found = []
    for _ in range(4):
        model = network("ls")
        CoreParallel(model, count).backward(summed(x, t), 64, 1.0)
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_parameter_that_only_some_images_use():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.rarely = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.never = nn.Parameter(torch.ones(2))

        def forward(self, x, t):
            return x * self.always + (self.rarely.sum() if x.max() > 5 else 0)

    x, model = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]), Picky()
    for _ in range(2):
        CoreParallel(model, 2).backward(lambda call, part: call(x[part], x[part]).sum(), 4, 1.0)
    torch.testing.assert_close(model.always.grad, 2 * x.mean(0))
    torch.testing.assert_close(model.rarely.grad, torch.full((2,), 2.0))
    assert model.never.grad is None


def test_copies_see_the_weights_as_they_change():
    model = network()
    twin = sharing_copy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    whole(model, torch.randn(2, 1, 8, 8), torch.rand(2))
    optimizer.step()
    assert all(torch.equal(a, b) and a is not b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in twin.parameters())


def test_an_error_on_another_core_is_raised_and_the_threads_come_back():
    model = network()
    cores, threads = CoreParallel(model, 2), torch.get_num_threads()

    def fails(call, part):
        if call.call is not model:
            raise FloatingPointError("on another core")
        return call(torch.randn(1, 1, 8, 8), torch.rand(1)).sum()

    with pytest.raises(FloatingPointError, match="on another core"):
        cores.backward(fails, 2, 1.0)
    assert torch.get_num_threads() == threads


def test_chunks_cover_the_batch_and_are_even():
    for images, at_most, cores in [(64, 16, 2), (7, 3, 2), (1, 16, 2), (3, 1, 2), (65, 16, 4)]:
        parts = chunks(images, at_most, cores)
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(images))
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) <= at_most
        assert max(sizes) - min(sizes) <= 1
        assert len(parts) % cores == 0 or len(parts) == images


def test_a_chunk_of_a_uvit_has_about_a_thousand_tokens():
    small = UViT(image_size=16, patch_size=2, dim=32, depth=2, heads=2)
    assert images_at_once(small, images=64, cores=2) == 16  # 65 tokens each
    assert images_at_once(small, images=8, cores=2) == 4
    wide = UViT(image_size=16, patch_size=2, dim=1024, depth=2, heads=2)
    assert images_at_once(wide, images=64, cores=2) == 8  # more features would not fit a cache
    assert images_at_once(nn.Linear(1, 1), images=8, cores=2) == 4


def test_it_is_the_default_for_uvit_alone():
    assert isinstance(make_cores(TrainConfig(), network(), OnCpu()), CoreParallel)
    assert make_cores(TrainConfig(hardware=HardwareConfig(split_cores=False)), network(), OnCpu()) is None
    assert make_cores(TrainConfig(hardware=HardwareConfig(compile=True)), network(), OnCpu()) is None
    other = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout(0.0))
    assert make_cores(TrainConfig(), other, OnCpu()) is None
    assert isinstance(make_cores(TrainConfig(hardware=HardwareConfig(split_cores=True)), other, OnCpu()), CoreParallel)


@pytest.mark.parametrize("scaling", ["cs", "ls"])
def test_mixed_precision_on_each_core(scaling):
    """accelerate replaces the forward of a model: that of each copy must be its own."""
    accelerator = make_accelerator(TrainConfig(hardware=HardwareConfig(precision="bf16", cpu=True)), "unused")
    plain = network(scaling)
    split = accelerator.prepare_model(copy.deepcopy(plain))
    x, t = torch.randn(7, 1, 8, 8), torch.rand(7) * 999
    expected = whole(plain, x, t)
    cores = CoreParallel(split, 3)
    models: list[Any] = [each.call for each in cores.networks]
    assert [model.forward.__self__ for model in models] == models
    found = cores.backward(summed(x, t), 7, 1.0)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    assert not torch.equal(found, expected)  # it was rounded
    for a, b in zip(plain.parameters(), split.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (b.grad - a.grad).norm() <= 0.05 * a.grad.norm()


def test_which_precisions_are_split():
    def splits(precision: str) -> bool:
        accelerator = OnCpu()
        accelerator.mixed_precision = precision
        return make_cores(TrainConfig(), network(), accelerator) is not None

    assert [splits(each) for each in ("no", "bf16", "fp16")] == [True, True, False]


def test_small_shares_are_not_split_among_cores(monkeypatch):
    """17 tokens of width 32: 128 images for each of two cores are 69,632 entries, 64 images are not enough."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def splits(batch: int, **hardware) -> bool:
        config = TrainConfig(batch_size=batch, hardware=HardwareConfig(**hardware))
        return make_cores(config, network(), OnCpu()) is not None

    assert splits(256)
    assert not splits(128)
    assert not splits(256, accumulation=2)
    assert splits(4, split_cores=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert splits(4)  # in chunks, on one core


@pytest.mark.parametrize("bad", [nn.Dropout(0.1), nn.BatchNorm2d(1)])
def test_networks_that_mix_images_or_draw_numbers_are_refused(bad):
    with pytest.raises(InvalidConfigError, match="batch norm or dropout"):
        make_cores(TrainConfig(hardware=HardwareConfig(split_cores=True)), nn.Sequential(bad), OnCpu())


def test_it_is_refused_where_it_cannot_be():
    with pytest.raises(InvalidConfigError, match="one process on a CPU"):
        make_cores(TrainConfig(hardware=HardwareConfig(split_cores=True, compile=True)), network(), OnCpu())
