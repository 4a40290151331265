"""w_j = E‖∂out/∂κ_j‖² against differences of whole models and against theory."""

import pytest
import torch

from scalelong import theory
from scalelong.models import UViT
from scalelong.scaling import ConstantScaling, CustomScaling
from scalelong.skips import coefficients, is_scaled, scale_skips_


def small_uvit(**options) -> UViT:
    return UViT(image_size=8, patch_size=4, channels=1, dim=16, depth=6, heads=2, **options)


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
    assert theory.count_skips(model, inputs) == 3
    assert list(model.state_dict()) == keys
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        assert torch.equal(before, model(*inputs))
    assert is_scaled(model)
    assert len(coefficients(model)) == 3


def test_unscaled_model_stays_unscaled(inputs) -> None:
    model = small_uvit().double()
    theory.skip_sensitivities(model, *inputs)
    assert not is_scaled(model)
