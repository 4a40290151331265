"""Convolutions with fewer multiplications, against torch's in double precision."""

import copy

import pytest
import torch
from torch import nn

from scalelong.models import winograd
from scalelong.models.winograd import WinogradConv2d, multiply_less_


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    """Few channels and tiles are taken, too."""
    monkeypatch.setattr(winograd, "LEAST_CHANNELS", 1)
    monkeypatch.setattr(winograd, "LEAST_TILES", 1)
    monkeypatch.setattr(winograd, "TILES_AT_ONCE", 8)


def calls(monkeypatch) -> list[bool]:
    found = []
    real = winograd._products
    monkeypatch.setattr(winograd, "_products", lambda *args: (found.append(True), real(*args))[1])
    return found


def layer(inputs: int = 5, outputs: int = 7, **options) -> nn.Conv2d:
    torch.manual_seed(0)
    made = nn.Conv2d(inputs, outputs, 3, **{"padding": 1, **options}).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    multiply_less_(made)
    return made


def features(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)


def gradients(module: nn.Conv2d, x: torch.Tensor):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    output = module(x)
    wanted = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return output, *torch.autograd.grad((output * torch.sin(output.detach() * 9)).sum(), wanted)


@pytest.mark.parametrize("shape", [(1, 5, 4, 4), (3, 5, 8, 12), (9, 5, 16, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_a_convolution(shape, bias, monkeypatch):
    made, found = layer(bias=bias), calls(monkeypatch)
    exact = copy.deepcopy(made).double()
    pairs = zip(gradients(made, features(*shape)), gradients(exact, features(*shape).double()), strict=True)
    assert len(found) == 2  # forward, and the gradient of the input
    for value, expected in pairs:
        assert value.shape == expected.shape
        assert (value - expected).abs().max() < 2e-5 * expected.abs().max()


def test_rounding_is_small_for_many_channels():
    made, x = layer(256, 128), features(2, 256, 8, 8)
    expected = copy.deepcopy(made).double()(x.double())
    assert (made(x) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_gradients_lie_in_memory_as_the_weights_do():
    made = layer()
    made(features(2, 5, 8, 8)).sum().backward()
    assert made.weight.grad is not None
    assert made.weight.grad.stride() == made.weight.stride()


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"padding": 0}, {"padding": "same"}, {"dilation": 2}, {"padding_mode": "circular"}]
)
def test_other_convolutions_stay_what_they_are(options):
    assert type(layer(**options)) is nn.Conv2d


def test_a_few_channels_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(winograd, "LEAST_CHANNELS", 6)
    assert type(layer()) is nn.Conv2d


@pytest.mark.parametrize("shape", [(2, 5, 6, 8), (2, 5, 8, 9), (5, 8, 8)])
def test_other_sizes_are_left_to_torch(shape):
    made, x = layer(), torch.randn(shape)
    assert torch.equal(made(x), made._conv_forward(x, made.weight, made.bias))
    assert torch.equal(made(x), nn.functional.conv2d(x, made.weight, made.bias, padding=1))


def test_nothing_changes_without_gradients_in_eval_mode_or_for_other_types(monkeypatch):
    made, x, found = layer(), features(2, 5, 8, 8), calls(monkeypatch)
    expected = nn.functional.conv2d(x, made.weight, made.bias, padding=1)
    with torch.no_grad():
        assert torch.equal(made(x), expected)
    assert torch.equal(copy.deepcopy(made).eval()(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype is torch.bfloat16
    assert made.double()(x.double()).dtype is torch.float64
    assert not found


def test_a_change_of_its_edge_is_noticed(monkeypatch):
    made, found = layer(), calls(monkeypatch)
    made.padding_mode = "circular"
    made(features(2, 5, 8, 8))
    assert not found


def test_outputs_may_be_changed_in_place_and_hooks_are_called():
    made, x, seen = layer(), features(2, 5, 8, 8), []
    made.register_forward_hook(lambda module, args, output: seen.append(output))
    expected = gradients(nn.Sequential(made, nn.ReLU()), x)  # pyright: ignore[reportArgumentType]
    found = gradients(nn.Sequential(made, nn.ReLU(inplace=True)), x)  # pyright: ignore[reportArgumentType]
    assert len(seen) == 2
    assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))


def test_gradients_can_be_differentiated_once_more():
    def second(module, x):
        x = x.requires_grad_()
        (first,) = torch.autograd.grad((module(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), [x, module.weight])

    made = layer()
    exact = copy.deepcopy(made).double()
    x = features(2, 5, 4, 4)
    for value, expected in zip(second(made, x), second(exact, x.detach().double()), strict=True):
        assert (value - expected).abs().max() < 1e-4 * expected.abs().max()


def test_frozen_weights_have_no_gradient():
    made = layer()
    made.requires_grad_(False)
    assert isinstance(made, WinogradConv2d)
    _, by_x = gradients(made, features(2, 5, 8, 8))
    assert by_x.isfinite().all()
