"""Measured derivatives against autograd's full Jacobians."""

import pytest
import torch
from torch import nn

from scalelong import theory
from scalelong.models import UViT
from scalelong.theory.sensitivity import difference_derivative, directional_derivative, forward_derivative


def small_uvit(depth: int = 4) -> UViT:
    return UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=depth, heads=2)


def test_jacobian_norm_is_the_largest_singular_value() -> None:
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    x = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(net, x).view(4, 6)  # pyright: ignore
    exact = float(torch.linalg.matrix_norm(jacobian, 2))
    assert theory.jacobian_norm(net, x, steps=500) == pytest.approx(exact, rel=1e-6)


def test_jacobian_norm_of_attention() -> None:
    model = small_uvit()
    x, t = torch.randn(1, 1, 8, 8), torch.tensor([10])
    jacobian = torch.autograd.functional.jacobian(lambda image: model(image, t), x).view(64, 64)  # pyright: ignore
    exact = float(torch.linalg.matrix_norm(jacobian, 2))
    assert theory.jacobian_norm(model, x, t, steps=500) == pytest.approx(exact, rel=1e-3)


def test_linear_network_amplifies_noise_by_its_frobenius_norm() -> None:
    layer = nn.Linear(20, 20, bias=False)
    x = torch.randn(500, 20)
    gain = theory.noise_gain(layer, x, sigma=0.3, draws=20)
    assert gain == pytest.approx(float(layer.weight.detach().norm()) / 20**0.5, rel=0.03)


def test_measuring_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    theory.jacobian_norm(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    theory.noise_gain(model, torch.zeros(3, 4), sigma=0.1)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model] == [True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.saved_tensors[0].cos()


def test_differences_step_in_where_forward_mode_ends() -> None:
    x, v = torch.randn(2, 30, dtype=torch.float64)
    with pytest.raises(NotImplementedError):
        forward_derivative(NoForwardMode.apply, x, v)
    torch.testing.assert_close(directional_derivative(NoForwardMode.apply, x, v), x.cos() * v, rtol=1e-8, atol=1e-9)


def test_both_derivatives_agree() -> None:
    model, x, v = small_uvit().double(), *torch.randn(2, 3, 1, 8, 8, dtype=torch.float64)
    t = torch.tensor([1, 500, 999])
    exact = forward_derivative(lambda image: model(image, t), x, v)
    torch.testing.assert_close(exact, difference_derivative(lambda image: model(image, t), x, v), rtol=1e-6, atol=1e-9)
