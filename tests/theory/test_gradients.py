"""Theorem 3.3 against gradients that autograd computes."""

import pytest
import torch

from scalelong import theory
from scalelong.theory.moments import _gradient_norms
from scalelong.theory.network import RandomLinear


@pytest.mark.parametrize("initialisation", ["kaiming", "unit"])
@pytest.mark.parametrize(("count", "layers", "kappa"), [(1, 1, 1.0), (3, 2, 0.7), (4, 1, 1.0), (2, 3, 0.9)])
def test_expectation_holds_for_independent_residuals(count, layers, kappa, initialisation) -> None:
    kappas = [kappa**i for i in range(count)]
    table = theory.check_gradients(kappas, width=96, layers=layers, initialisation=initialisation, seeds=300)
    assert len(table) == 2 * count * layers
    for ratio, error in zip(table["ratio"], table["standard_error"], strict=True):
        assert abs(ratio - 1) < 4.5 * error < 0.09, table


def test_at_the_true_loss_it_is_an_order_of_magnitude() -> None:
    table = theory.check_gradients([1.0] * 4, width=64, layers=2, seeds=50, true_loss=True)
    assert max(table["ratio"]) > 3
    assert all(0.3 < ratio < 300 for ratio in table["ratio"])


def test_norms_are_those_of_autograds_gradients() -> None:
    """‖δ‖‖h‖ against the gradient itself, one network and one input at a time."""
    net = theory.Equation3.random([1.0, 0.5], width=6, layers=2, ensemble=(1, 1), dtype=torch.float64)
    x, target = torch.randn(2, 1, 1, 6, dtype=torch.float64)
    norms = _gradient_norms(net, x, target, true_loss=False)
    output = net(x)
    for kind, blocks in (("a", net.encoder), ("b", net.decoder)):
        for i, block in enumerate(blocks, start=1):
            matrices = [module for module in block.modules() if isinstance(module, RandomLinear)]
            for p, matrix in enumerate(matrices, start=1):
                (gradient,) = torch.autograd.grad(output, matrix.weight, target, retain_graph=True)
                expected = gradient.square().sum() / target.square().sum() / x.square().sum()
                torch.testing.assert_close(norms[kind, i, p], expected[None])
