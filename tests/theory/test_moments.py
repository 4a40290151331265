"""Theorem 3.1 and Theorem 3.3 against networks that are drawn, run and measured."""

import pytest
import torch

from scalelong import theory
from scalelong.errors import InvalidConfigError
from scalelong.theory import RandomLinear
from scalelong.theory.equation3 import _gradient_norms

SETTINGS = [(1, 64, 1, 1.0), (3, 128, 3, 1.0), (4, 128, 2, 0.7), (6, 96, 1, 0.5)]  # N, width, layers, κ


@pytest.mark.parametrize("initialisation", ["kaiming", "unit"])
@pytest.mark.parametrize(("count", "width", "layers", "kappa"), SETTINGS)
def test_exact_form_agrees_within_three_percent(count, width, layers, kappa, initialisation) -> None:
    kappas = [kappa**i for i in range(count)]
    table = theory.check_features(kappas, width=width, layers=layers, initialisation=initialisation, seeds=300)
    assert [row["i"] for row in table] == list(range(1, count + 1))
    assert max(abs(row["ratio"] - 1) for row in table) < 0.03, table
    # The measurement is precise enough for the above to mean something.
    assert max(row["standard_error"] for row in table) < 0.015, table


def test_unit_gain_is_the_papers_form() -> None:
    """‖x‖² Σ_{j=i..N} κ_j² + ‖x‖²"""
    assert theory.expected_feature_norms([1.0, 0.5], gain=1.0) == [2.25, 1.25]


def test_network_is_equation_3() -> None:
    """The definition, written out for N = 2."""
    net = theory.Equation3.random([0.9, 0.4], width=5, layers=2)
    a1, a2 = net.encoder
    b1, b2 = net.decoder
    x = torch.randn(3, 5)
    u1 = a1(x)
    u2 = a2(u1)
    h2 = b2(0.4 * u2 + net.middle(u2))
    h1 = b1(0.9 * u1 + h2)
    torch.testing.assert_close(net.features(x), [h1, h2])
    torch.testing.assert_close(net(x), h1)


def test_bad_networks_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="initialisation"):
        theory.Equation3.random([1.0], width=4, initialisation="xavier")
    with pytest.raises(InvalidConfigError, match="at least one"):
        theory.Equation3([], torch.nn.Identity(), [], [])


# Gradients


@pytest.mark.parametrize("initialisation", ["kaiming", "unit"])
@pytest.mark.parametrize(("count", "layers", "kappa"), [(3, 2, 0.7), (2, 3, 1.0)])
def test_expectation_holds_for_independent_residuals(count, layers, kappa, initialisation) -> None:
    kappas = [kappa**i for i in range(count)]
    table = theory.check_gradients(kappas, width=96, layers=layers, initialisation=initialisation, seeds=300)
    assert len(table) == 2 * count * layers
    for ratio, error in ((row["ratio"], row["standard_error"]) for row in table):
        assert abs(ratio - 1) < 4.5 * error < 0.09, table


def test_at_the_true_loss_it_is_an_order_of_magnitude() -> None:
    table = theory.check_gradients([1.0] * 4, width=64, layers=2, seeds=50, true_loss=True)
    assert max(row["ratio"] for row in table) > 3
    assert all(0.3 < row["ratio"] < 300 for row in table)


def test_norms_are_those_of_autograds_gradients() -> None:
    """‖δ‖‖h‖ against the gradient itself, one network and one input at a time."""
    net = theory.Equation3.random([1.0, 0.5], width=6, layers=2, dtype=torch.float64)
    x, target = torch.randn(2, 1, 6, dtype=torch.float64)
    norms = _gradient_norms(net, x, target, true_loss=False)
    output = net(x)
    for kind, blocks in (("a", net.encoder), ("b", net.decoder)):
        for i, block in enumerate(blocks, start=1):
            matrices = [module for module in block.modules() if isinstance(module, RandomLinear)]
            for p, matrix in enumerate(matrices, start=1):
                (gradient,) = torch.autograd.grad(output, matrix.weight, target, retain_graph=True)
                expected = gradient.square().sum() / target.square().sum() / x.square().sum()
                torch.testing.assert_close(norms[kind, i, p], expected)
