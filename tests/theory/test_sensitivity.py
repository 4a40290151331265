"""Jacobian norms and noise gains against autograd, sensitivities to skips against differences of whole models."""

import pytest
import torch
from torch import nn

from scalelong import theory
from scalelong.attaching import coefficients, is_scaled, scale_skips_
from scalelong.models import UViT
from scalelong.scaling import ConstantScaling, CustomScaling


def small_uvit(**options) -> UViT:
    return UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=6, heads=2, **options)


def test_jacobian_norm_is_the_largest_singular_value() -> None:
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    x = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(net, x).view(4, 6)  # pyright: ignore
    exact = float(torch.linalg.matrix_norm(jacobian, 2))
    assert theory.jacobian_norm(net, x, steps=500) == pytest.approx(exact, rel=1e-6)


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


# Sensitivities to skips


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([3, 300, 600, 900])


@pytest.mark.filterwarnings("ignore::scalelong.errors.UnscaledWeightsWarning")
@pytest.mark.parametrize("kappa", [1.0, 0.6])
def test_sensitivities_are_differences_of_models(inputs, kappa) -> None:
    model = small_uvit().double()
    measured = theory.skip_sensitivities(model, *inputs, scaling=ConstantScaling(kappa))
    base, step = ConstantScaling(kappa).curve(3), 1e-5
    for j in range(3):
        outputs = []
        for sign in (-1, 1):
            kappas = [value + sign * step * (i == j) for i, value in enumerate(base)]
            twin = small_uvit(scaling=CustomScaling(tuple(kappas))).double()
            twin.load_state_dict(model.state_dict())
            with torch.no_grad():
                outputs.append(twin(*inputs))
        derivative = (outputs[1] - outputs[0]) / (2 * step)
        assert measured[j] == pytest.approx(float(derivative.square().sum()) / 4, rel=1e-5)


class Identity(torch.autograd.Function):
    """An operation of somebody's own, without forward-mode differentiation."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0]


def test_models_without_forward_mode_in_single_precision(inputs) -> None:
    class Custom(UViT):
        def forward(self, *arguments, **keywords):
            return Identity.apply(super().forward(*arguments, **keywords))

    torch.manual_seed(0)
    plain = small_uvit()
    torch.manual_seed(0)
    custom = Custom(image_size=8, patch_size=4, channels=1, dim=16, depth=6, heads=2)
    single = (inputs[0].float(), inputs[1])
    expected = theory.skip_sensitivities(plain, *single)
    measured = theory.skip_sensitivities(custom, *single)
    assert measured[0] == pytest.approx(expected[0], rel=0.02)
    assert measured[1] == pytest.approx(expected[1], rel=0.1)


def test_model_is_left_as_it_was(inputs) -> None:
    model = scale_skips_(small_uvit().double().train(), "ls")
    keys, state = list(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        before = model(*inputs)
    theory.skip_sensitivities(model, *inputs)
    assert list(model.state_dict()) == keys
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        assert torch.equal(before, model(*inputs))
    assert is_scaled(model)
    assert len(coefficients(model)) == 3


# Its GroupNorms cancel most of a constant scaling, and attaching says so.
