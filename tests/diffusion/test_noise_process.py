"""The noise process against diffusers, against the closed form, and against the published averages."""

import math
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

from scalelong.errors import InvalidConfigError
from scalelong.noise import NoiseProcess, alpha_bars, as_epsilon, epsilon_losses, target

SCHEDULES = ("vp", "ddpm", "cosine", "sd")
PREDICTIONS = ("epsilon", "v", "x0")


def batch(count=64):
    generator = torch.Generator().manual_seed(0)
    x0 = torch.rand(count, 3, 4, 4, generator=generator) * 2 - 1
    return x0, torch.randn(count, 3, 4, 4, generator=generator), torch.rand(count, generator=generator)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_variance_is_preserved(schedule):
    process = NoiseProcess(schedule)
    signal, sigma = process.signal_and_noise(process.times(torch.linspace(0, 0.9999, 777)))
    torch.testing.assert_close(signal**2 + sigma**2, torch.ones(777))
    assert (sigma > 0).all()


@pytest.mark.parametrize(("schedule", "name"), [("ddpm", "linear"), ("cosine", "squaredcos_cap_v2")])
def test_discrete_schedules_are_those_of_diffusers(schedule, name):
    theirs = DDPMScheduler(beta_schedule=name)
    x0, noise, uniform = batch()
    process = NoiseProcess(schedule)
    t = process.times(uniform)
    assert t.min() >= 0
    assert t.max() <= 999
    steps: Any = t.long()
    torch.testing.assert_close(process.add_noise(x0, noise, t), theirs.add_noise(x0, noise, steps))
    torch.testing.assert_close(target(process, "v", x0, noise, t), theirs.get_velocity(x0, noise, steps))


def test_vp_is_the_authors_sde():
    """mean = √ᾱ x_0, variance 1 - ᾱ with ᾱ = exp(-∫β), β from 0.1 to 20, the network sees 999 t."""
    process = NoiseProcess("vp")
    for time in (1e-4, 0.1, 0.5, 1.0):
        signal, sigma = process.signal_and_noise(torch.tensor([999.0 * time]))
        alpha_bar = math.exp(-(0.1 * time + 0.5 * 19.9 * time**2))
        assert signal.item() == pytest.approx(math.sqrt(alpha_bar), rel=1e-5)
        assert sigma.item() == pytest.approx(math.sqrt(1 - alpha_bar), rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sampler_steps_agree_with_the_process(schedule):
    """ᾱ that diffusers' samplers use at step k is the process's ᾱ at the network time of step k."""
    process = NoiseProcess(schedule)
    steps = torch.arange(1000)
    signal, _ = process.signal_and_noise(process.network_time(steps))
    theirs = DDPMScheduler(trained_betas=process.betas.float().tolist()).alphas_cumprod
    torch.testing.assert_close(signal**2, theirs, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_perfect_prediction_has_no_loss(schedule, prediction):
    process = NoiseProcess(schedule)
    x0, noise, uniform = batch()
    t = process.times(uniform)
    truth = target(process, prediction, x0, noise, t)
    x_t = process.add_noise(x0, noise, t)
    sigma = process.signal_and_noise(t)[1]
    difference = (as_epsilon(process, prediction, truth, x_t, t) - noise).flatten(1).abs().amax(1)
    assert (difference * sigma).max() < 1e-5
    kept = sigma > 0.1
    assert epsilon_losses(lambda *_: truth, process, prediction, x0, noise, t)[kept].max() < 1e-8


def test_unknown_names_are_refused():
    with pytest.raises(InvalidConfigError, match="known: vp, ddpm, cosine"):
        NoiseProcess("linear")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("ddpm", {"beta_schedule": "linear"}),
        ("cosine", {"beta_schedule": "squaredcos_cap_v2"}),
        ("sd", {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}),
    ],
)
def test_betas_are_those_of_diffusers_bit_for_bit(schedule, options):
    theirs = DDPMScheduler(num_train_timesteps=1000, **options)
    assert torch.equal(NoiseProcess(schedule).betas, theirs.betas)
    torch.testing.assert_close(alpha_bars(schedule), theirs.alphas_cumprod.double(), rtol=1e-3, atol=1e-6)


def test_theory_takes_the_middles_of_the_intervals_of_vp_and_training_their_ends():
    middles, ends = alpha_bars("vp"), NoiseProcess("vp").alphas_bar
    t = torch.tensor([0.0005, 0.4995, 0.9995], dtype=torch.float64)
    torch.testing.assert_close(middles[[0, 499, 999]], torch.exp(-(0.1 * t + 0.5 * 19.9 * t**2)))
    assert bool((middles > ends).all())


@pytest.mark.parametrize(("schedule", "mean"), [("ddpm", 0.2755), ("vp", 0.2760), ("cosine", 0.4956), ("sd", 0.3734)])
def test_means_are_those_of_the_docstring(schedule, mean):
    assert float(alpha_bars(schedule).mean()) == pytest.approx(mean, abs=5e-5)
    assert f"{mean:.4f}" in (alpha_bars.__doc__ or "")
