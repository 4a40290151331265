"""Theorem 3.1 against networks that are drawn, run and measured."""

import itertools

import pytest
import torch

from scalelong import theory
from scalelong.errors import InvalidConfigError
from scalelong.theory.network import RandomLinear

SETTINGS = [
    # N, width, layers, κ
    (1, 64, 1, 1.0),
    (2, 128, 2, 0.9),
    (3, 128, 3, 1.0),
    (4, 128, 2, 0.7),
    (4, 128, 2, 1.0),
    (6, 96, 1, 0.5),
]


@pytest.mark.parametrize("initialisation", ["kaiming", "unit"])
@pytest.mark.parametrize(("count", "width", "layers", "kappa"), SETTINGS)
def test_exact_form_agrees_within_three_percent(count, width, layers, kappa, initialisation) -> None:
    kappas = [kappa**i for i in range(count)]
    table = theory.check_features(kappas, width=width, layers=layers, initialisation=initialisation, seeds=300)
    assert list(table["i"]) == list(range(1, count + 1))
    assert max(abs(ratio - 1) for ratio in table["ratio"]) < 0.03, table
    # The measurement is precise enough for the above to mean something.
    assert max(table["standard_error"]) < 0.015, table


def test_measurement_would_notice_a_wrong_gain() -> None:
    samples = theory.sample_feature_norms([1.0, 1.0], width=64, layers=2, initialisation="kaiming", seeds=100)
    wrong = torch.tensor(theory.expected_feature_norms([1.0, 1.0], gain=1.0))
    assert (samples.mean(0) / wrong > 2).all()


def test_unit_gain_is_the_papers_form_and_kaiming_is_not() -> None:
    kappas = [1.0] * 6
    unit = theory.fit_paper_form(kappas, theory.expected_feature_norms(kappas, gain=1.0))
    assert unit.r_squared == pytest.approx(1.0)
    assert (unit.c1, unit.c2) == pytest.approx((1.0, 1.0))
    kaiming = theory.fit_paper_form(kappas, theory.expected_feature_norms(kappas, gain=2.0))
    assert kaiming.r_squared < 0.85


def test_ensemble_is_many_single_networks() -> None:
    """Each sign-flipped copy equals a network whose matrices have their columns flipped."""
    generator = torch.Generator().manual_seed(3)
    ensemble = theory.Equation3.random(
        [1.0, 0.5], width=8, layers=2, ensemble=(3, 4), generator=generator, dtype=torch.float64
    )
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    together = ensemble.features(x)
    matrices = [module for module in ensemble.modules() if isinstance(module, RandomLinear)]
    for seed, copy in itertools.product(range(3), range(4)):
        single = theory.Equation3.random([1.0, 0.5], width=8, layers=2, dtype=torch.float64)
        singles = [module for module in single.modules() if isinstance(module, RandomLinear)]
        for one, many in zip(singles, matrices, strict=True):
            assert many.signs is not None
            one.weight.data = many.weight.data[seed] * many.signs[seed, copy]
        for h, expected in zip(together, single.features(x[seed, copy : copy + 1]), strict=True):
            torch.testing.assert_close(h[seed, copy], expected[0])


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
    with pytest.raises(InvalidConfigError, match="finite"):
        theory.Equation3.random([float("nan")], width=4)
