"""Lemma 3.2 and Section 4.1's range of κ."""

import pytest
import torch

from scalelong import theory
from scalelong.errors import InvalidConfigError


@pytest.mark.parametrize(
    ("count", "for_mean", "for_tail"),
    [(3, 0.431, 1), (4, 0.426, 1), (6, 0.425, 0.963), (8, 0.425, 0.927), (12, 0.425, 0.904), (20, 0.425, 0.896)],
)
def test_kappa_for_the_papers_targets(count, for_mean, for_tail) -> None:
    assert theory.kappa_for_sum(1.22, count) == pytest.approx(for_mean, abs=5e-4)
    assert theory.kappa_for_sum(5, count) == pytest.approx(for_tail, abs=5e-4)


def test_the_ratio_is_that_of_sampling() -> None:
    images = torch.rand(300, 1, 1, 1).sqrt() * (torch.rand(300, 1, 24, 24) * 2 - 1)
    ratios = theory.sampled_statistics(images, "vp", draws=30).ratio
    found = theory.kappa_range(8, images, "vp")
    assert found.mean == pytest.approx(float(ratios.mean()), rel=0.02)
    assert found.quantile == pytest.approx(float(ratios.quantile(0.97)), rel=0.06)
    many = theory.kappa_range(8, images.repeat(30, 1, 1, 1), "vp")
    assert many[:2] == pytest.approx(found[:2], rel=5e-3)


def test_uniform_data_is_the_default_and_brighter_data_wants_a_smaller_kappa() -> None:
    assumed, measured = theory.kappa_range(8), theory.kappa_range(8, torch.rand(500, 3, 16, 16) * 2 - 1)
    assert measured[:2] == pytest.approx(assumed[:2], abs=0.01)
    dim, bright = (theory.kappa_range(8, torch.full((10, 1, 4, 4), value)) for value in (0.3, 0.95))
    assert bright.high < dim.high
    # The 97 % quantile for the paper's data and DDPM's schedule.
    assert theory.kappa_range(3, schedule="ddpm").quantile == pytest.approx(2.928, abs=1e-3)
    assert "κ from" in str(assumed)
    assert "ends at 1" in str(theory.kappa_range(2))


@pytest.mark.parametrize(
    ("skips", "images", "message"),
    [
        (0, None, "at least 1"),
        (3, torch.full((2, 1, 2, 2), float("nan")), "not finite"),
        (3, torch.zeros(2, 1, 2, 2, dtype=torch.uint8), "floating-point"),
    ],
)
def test_refusals(skips, images, message) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        theory.kappa_range(skips, images)


# Lemma 3.2

IMAGES = {
    "uniform": lambda: torch.rand(400, 1, 16, 16) * 2 - 1,
    "nearly binary": lambda: torch.randn(400, 1, 16, 16).sign() * 0.9,
    "dark": lambda: torch.full((400, 3, 12, 12), -0.2) + 0.01 * torch.randn(400, 3, 12, 12),
    "of unequal contrast": lambda: torch.rand(400, 1, 1, 1) * torch.randn(400, 1, 16, 16).clamp(-1, 1),
}


@pytest.mark.parametrize("schedule", ["ddpm", "vp", "cosine"])
@pytest.mark.parametrize("name", IMAGES)
def test_lemma_holds_for_any_data_and_schedule(name, schedule) -> None:
    images = IMAGES[name]()
    measured = theory.sampled_statistics(images, schedule, draws=16).norm
    expected = theory.expected_input_norm(1, schedule, theory.second_moment(images))
    assert float(measured.mean()) == pytest.approx(expected, rel=0.015)


def test_paper_is_the_special_case_of_uniform_data() -> None:
    # Eq. (5): (1 - 2 E ᾱ / 3) m
    mean = float(theory.alpha_bars("ddpm").mean())
    assert theory.expected_input_norm(100) == pytest.approx(100 * (1 - 2 * mean / 3))
