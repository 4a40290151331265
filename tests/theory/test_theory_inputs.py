"""Lemma 3.2, the ratio distributions and the schedules."""

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

from scalelong import theory
from scalelong.errors import InvalidConfigError

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


@pytest.mark.parametrize("name", IMAGES)
def test_fast_formula_follows_the_sampled_ratios(name) -> None:
    images = IMAGES[name]()
    sampled = theory.sampled_statistics(images, draws=20).ratio
    fast = theory.fast_statistics(images).ratio
    assert float(fast.mean()) == pytest.approx(float(sampled.mean()), rel=0.02)
    quantile = float(sampled.quantile(0.97))
    assert float(fast[: 16_000_000 // 2].quantile(0.97)) == pytest.approx(quantile, rel=0.06)


@pytest.mark.parametrize(
    ("name", "mean", "arguments"),
    [
        ("ddpm", 0.2755, {"beta_schedule": "linear"}),
        ("cosine", 0.4956, {"beta_schedule": "squaredcos_cap_v2"}),
    ],
)
def test_schedules_are_those_of_diffusers(name, mean, arguments) -> None:
    scheduler = DDPMScheduler(**arguments)
    torch.testing.assert_close(theory.alpha_bars(name), scheduler.alphas_cumprod.double(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(theory.alpha_bars(scheduler), scheduler.alphas_cumprod.double())
    assert float(theory.alpha_bars(name).mean()) == pytest.approx(mean, abs=5e-5)


def test_vp_schedule_is_the_solution_of_its_sde() -> None:
    """d log ᾱ = -β(t) dt, β from 0.1 to 20, integrated numerically."""
    t = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    log = -torch.cumulative_trapezoid(0.1 + 19.9 * t, t)
    bars = theory.alpha_bars("vp")
    torch.testing.assert_close(bars[499], log[99_899].exp(), rtol=1e-4, atol=0)
    assert float(bars.mean()) == pytest.approx(0.2760, abs=5e-5)


@pytest.mark.parametrize("schedule", ["linear", [1.5], [], object(), [float("nan")]])
def test_bad_schedules_are_refused(schedule) -> None:
    with pytest.raises(InvalidConfigError, match=r"ᾱ_t|schedule"):
        theory.alpha_bars(schedule)


def test_bytes_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="floating-point"):
        theory.second_moment(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
