"""Theorem 3.4: a bound is a bound. Random networks, random blocks, random and adversarial perturbations."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from scalelong import UnsupportedModelError, theory

ACTIVATIONS = [nn.ReLU(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.GELU("tanh")]


def linear_block(width: int, layers: int, activation: nn.Module, bias: bool) -> nn.Module:
    modules: list[nn.Module] = [nn.Linear(width, width, bias=bias)]
    for _ in range(layers - 1):
        modules += [activation, nn.Linear(width, width, bias=bias)]
    return nn.Sequential(*modules)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kappas=st.lists(st.floats(0, 2), min_size=1, max_size=5),
    width=st.integers(1, 8),
    layers=st.integers(1, 3),
    activation=st.sampled_from(ACTIVATIONS),
    size=st.floats(0.1, 3),
    seed=st.integers(0, 10**6),
)
def test_bound_holds_for_random_networks(kappas, width, layers, activation, size, seed) -> None:
    torch.manual_seed(seed)

    def block() -> nn.Module:
        made = linear_block(width, layers, activation, bias=True).double()
        for parameter in made.parameters():
            parameter.data.mul_(size)
        return made

    network = theory.Equation3([block() for _ in kappas], block(), [block() for _ in kappas], kappas)
    bound = theory.robustness_bound(network)
    assert bound.recursion <= bound.product * (1 + 1e-12)
    x = torch.randn(16, width, dtype=torch.float64)
    shift = torch.randn_like(x) * 10 ** torch.randint(-3, 2, (16, 1)).double()
    with torch.no_grad():
        moved = (network(x + shift) - network(x)).norm(dim=1)
    assert (moved <= bound.recursion * shift.norm(dim=1) * (1 + 1e-9) + 1e-12).all()
    # The worst direction at a point, which random perturbations never find.
    assert theory.jacobian_norm(network, x[:1]) <= bound.recursion * (1 + 1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_slopes_of_activations(activation) -> None:
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    steepest = float(activation(x).diff().abs().max() / (x[1] - x[0]))
    assert steepest <= theory.lipschitz_bound(activation) <= max(1.0, 1.02 * steepest)


def test_counterexample_to_the_literal_theorem() -> None:
    found = theory.counterexample()
    assert found.stated == pytest.approx(2)
    assert found.actual == pytest.approx(100.01)
    assert found.corrected >= found.actual
    # Not only a formula: there is an input that moves the output by more than the printed theorem allows.
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        moved = float((found.network(2 * x) - found.network(x)).norm())
    assert moved > 49 * found.stated * float(x.norm())


def test_modules_without_a_proof_are_refused() -> None:
    class Twice(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return 2 * super().forward(input)

    class Residual(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return input + super().forward(input)

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, inputs, output: None)
    refused = [
        nn.MultiheadAttention(4, 2),
        nn.Sequential(nn.ReLU(), nn.Softplus()),
        nn.Conv2d(1, 1, 3),
        Twice(2, 2),
        Residual(nn.Linear(2, 2)),
        hooked,
        theory.random_block(4, 1, "unit", count=2),
    ]
    for module in refused:
        with pytest.raises(UnsupportedModelError):
            theory.lipschitz_bound(module)


def test_constants_of_a_scaled_network() -> None:
    """Σ κ_i M^i + M^N L, by hand."""

    def times(factor: float) -> nn.Module:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, factor)
        return layer

    network = theory.Equation3([times(2), times(3)], times(0.25), [nn.Identity()] * 2, [1.0, 0.5])
    bound = theory.robustness_bound(network)
    assert bound.recursion == pytest.approx(2 * (1 + 3 * (0.5 + 0.25)))
    assert bound.product == pytest.approx(1 * 3 + 0.5 * 9 + 9 * 0.25)
