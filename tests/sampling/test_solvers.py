"""Samplers against what is known: Gaussian data, whose score has a closed form."""

import math

import pytest
import torch

from scalelong.diffusion import sample
from scalelong.diffusion.sampling import scheduler
from scalelong.noise import BETA_MAX, BETA_MIN, NoiseProcess

MEAN, SPREAD = 0.3, 0.4
COUNT = 3000


def exact_epsilon(x: torch.Tensor, signal: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """For x_0 ~ N(m, s²): x_t ~ N(√ᾱ m, ᾱ s² + σ²), and ε = -σ ∇ log p = σ (x - √ᾱ m) / (ᾱ s² + σ²)."""
    return sigma * (x - signal * MEAN) / (signal**2 * SPREAD**2 + sigma**2)


def from_sampler(process: NoiseProcess, sampler: str, steps: int) -> torch.Tensor:
    def predict(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return exact_epsilon(x, *(value.view(-1, 1, 1, 1) for value in process.signal_and_noise(t)))

    # Many independent "pixels" under one seed: the data are Gaussian pixel by pixel.
    shape = (1, 1, COUNT)
    return sample(predict, process, "epsilon", shape, [0], sampler=sampler, steps=steps, clip=False).flatten()


def euler_maruyama(steps: int, seed: int = 1) -> torch.Tensor:
    """dx = [-½βx - β∇log p] dt + √β dw, backwards from t = 1; the last step to t = 0 adds no noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(COUNT, generator=generator).double()
    times = torch.cat([torch.zeros(1), torch.linspace(1e-3, 1, steps)]).double()
    for before, now in zip(times[:-1].flip(0), times[1:].flip(0), strict=True):
        beta = BETA_MIN + now * (BETA_MAX - BETA_MIN)
        integral = BETA_MIN * now + 0.5 * (BETA_MAX - BETA_MIN) * now**2
        signal, sigma = torch.exp(-0.5 * integral), torch.sqrt(-torch.expm1(-integral))
        score = -exact_epsilon(x, signal, sigma) / sigma
        dt = now - before
        x = x + (0.5 * beta * x + beta * score) * dt
        if before > 0:
            x = x + torch.sqrt(beta * dt) * torch.randn(COUNT, generator=generator).double()
    return x


def same_distribution(a: torch.Tensor, b: torch.Tensor) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test."""
    from scipy.stats import ks_2samp

    return float(ks_2samp(a.numpy(), b.numpy()).pvalue)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("sampler", ["sde", "ddpm"])
def test_agrees_in_distribution_with_the_authors_euler_maruyama(sampler: str) -> None:
    ours, theirs = from_sampler(NoiseProcess("vp"), sampler, 1000), euler_maruyama(1000)
    assert same_distribution(ours, theirs) > 0.01
    error = SPREAD / math.sqrt(COUNT)
    for found in (ours, theirs):
        assert abs(float(found.mean()) - MEAN) < 4 * error
        assert abs(float(found.std()) - SPREAD) < 4 * error
    # The test can tell distributions apart that differ a little.
    assert same_distribution(ours * 1.15, theirs) < 0.01
    assert same_distribution(ours + 0.06, theirs) < 0.01


@pytest.mark.parametrize(
    ("schedule", "prediction"), [("vp", "epsilon"), ("cosine", "v"), ("flow", "flow"), ("edm", "edm")]
)
def test_plain_clipping_is_what_dynamic_thresholding_comes_to(schedule, prediction):
    """Bit for bit that of diffusers, whose bound is 1, without sorting the pixels."""
    made = scheduler(NoiseProcess(schedule), prediction, "dpm++")
    theirs = type(made).from_config(made.config)
    assert theirs.config["thresholding"]
    x = 3 * torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made._threshold_sample(x), theirs._threshold_sample(x))
    unclipped = scheduler(NoiseProcess(schedule), prediction, "dpm++", clip=False)
    assert not unclipped.config["thresholding"]
