"""Noise levels, the held-out loss by level, and Min-SNR weights, against formulas written apart."""

import pytest
import torch

from scalelong.diffusion import by_level
from scalelong.noise import (
    LEVELS,
    SNR_EDGES,
    NoiseProcess,
    level_names,
    loss_weights,
    mean_square,
    noise_levels,
    target,
)


@pytest.mark.parametrize("schedule", ["vp", "ddpm", "cosine", "sd"])
def test_log_snr_is_that_of_the_schedule_and_falls(schedule):
    process = NoiseProcess(schedule)
    t = process.times(torch.linspace(0.001, 0.999, 50))
    t, _ = t.sort()
    alpha_bar = process.signal_and_noise(t)[0].double() ** 2
    inside = (alpha_bar > 1e-4) & (alpha_bar < 1 - 1e-4)
    expected = torch.log(alpha_bar / (1 - alpha_bar))
    found = process.log_snr(t).double()
    assert torch.allclose(found[inside], expected[inside], atol=2e-3)
    assert bool((found.diff() <= 0).all())
    assert bool(found.isfinite().all())


def test_levels_are_the_bins_of_log_snr():
    process = NoiseProcess("vp")
    t = torch.linspace(0.5, 999, 400)
    levels = noise_levels(process, t)
    for value, level in zip(process.log_snr(t).tolist(), levels.tolist(), strict=True):
        assert level == sum(value > edge for edge in SNR_EDGES)
    assert set(levels.tolist()) == set(range(LEVELS))
    assert level_names()[0] == "-inf..-6"
    assert level_names()[-1] == "6..inf"
    assert len(level_names()) == LEVELS


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_is_the_clipped_error_in_x0_whatever_is_predicted(prediction, gamma):
    """An error in x_0 is put into what the network would have to answer for it; the weighted loss must be
    min(SNR, γ) · |error|²."""
    process = NoiseProcess("vp")
    source = torch.Generator().manual_seed(0)
    x0, noise, error = (torch.randn(64, 1, 4, 4, generator=source) for _ in range(3))
    t = process.times(torch.linspace(0.02, 0.98, 64))
    signal, sigma = (value.view(-1, 1, 1, 1) for value in process.signal_and_noise(t))
    x_t, wrong = signal * x0 + sigma * noise, x0 + 0.1 * error
    implied = (x_t - signal * wrong) / sigma
    answers = {"x0": wrong, "epsilon": implied, "v": signal * implied - sigma * wrong}
    found = mean_square(target(process, prediction, x0, noise, t) - answers[prediction])
    weighted = found * loss_weights(process, prediction, "min-snr", t, gamma)
    snr = (signal / sigma).double().flatten() ** 2
    expected = snr.clamp(max=gamma) * (0.1 * error).double().square().flatten(1).mean(1)
    assert torch.allclose(weighted.double(), expected, rtol=2e-3)


@pytest.mark.parametrize("schedule", ["vp", "ddpm", "cosine", "sd"])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_weights_are_finite_at_the_ends_of_every_schedule(schedule, prediction):
    process = NoiseProcess(schedule)
    t = process.times(torch.tensor([0.0, 1 - 2**-20]))
    weights = loss_weights(process, prediction, "min-snr", t)
    assert bool(weights.isfinite().all())
    assert bool((weights >= 0).all())
    zeros = torch.zeros(2, 1, 2, 2)
    assert target(process, prediction, zeros, zeros, t).shape == zeros.shape


def test_the_mean_of_each_level():
    found = by_level(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 7]))
    assert found == {"-inf..-6": 2.0, "6..inf": 5.0}
