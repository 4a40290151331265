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
from scalelong.training import hardware as cores_module
from scalelong.training.hardware import CoreParallel, make_cores
from scalelong.training.loop import Question


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


def asked(x, t):
    return Question(x, t, None, torch.ones_like(x), None)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("images", "scaling"), [(1, "cs"), (7, "ls"), (150, "ls")])
def test_the_gradient_is_that_of_the_whole_batch(count, images, scaling):
    plain = network(scaling)
    split = copy.deepcopy(plain)
    x, t = torch.randn(images, 1, 8, 8), torch.rand(images) * 999
    expected = whole(plain, x, t)
    cores = CoreParallel(split, count)
    # Twice: gradients are added to what is there.
    losses = [cores.backward(asked(x, t), 0.5)[0] for _ in range(2)]
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
        CoreParallel(model, count).backward(asked(x, t), 1.0)
        found.append([parameter.grad for parameter in model.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_error_on_another_core_is_raised_and_the_threads_come_back():
    model = network()
    cores, threads = CoreParallel(model, 2), torch.get_num_threads()

    class Failing(Question):
        def errors(self, network, part=slice(None)):
            if network.call is not model:
                raise FloatingPointError("on another core")
            return super().errors(network, part)

    with pytest.raises(FloatingPointError, match="on another core"):
        cores.backward(Failing(*asked(torch.randn(2, 1, 8, 8), torch.rand(2))), 1.0)
    assert torch.get_num_threads() == threads


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
    found, _ = cores.backward(asked(x, t), 1.0)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    assert not torch.equal(found, expected)  # it was rounded
    for a, b in zip(plain.parameters(), split.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (b.grad - a.grad).norm() <= 0.05 * a.grad.norm()


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
