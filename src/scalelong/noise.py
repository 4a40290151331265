"""The noise process: x_t = √ᾱ_t x_0 + √(1-ᾱ_t) ε (Eq. 1), and what a network is asked to predict.

One home for theory, training and sampling: the schedules, x_t, the times, ε / v / x_0, and the losses. torch is all
that it needs. Times are in the units of the network, 0 to 999. Under "vp" (the authors' VP-SDE) they are continuous,
under "ddpm", "cosine" and "sd" (Stable Diffusion's, for latents) whole. Two more processes have other signal and noise:

    flow    x_t = (1-s) x_0 + s ε, s = t/999: rectified flow, whose network predicts the velocity ε - x_0. s is uniform,
            or logit-normal under "flow-logit" (Esser et al., 2024)
    edm     x_0 + σ ε with a log-normal σ (Karras et al., 2022), as the network sees it: times c_in = 1/√(σ² + σ_data²)

    process = NoiseProcess("vp")
    t = process.times(even_fractions(len(x0)))
    x_t = process.add_noise(x0, noise, t)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .config import (
    FLOWS as FLOWS,
    SCHEDULE as SCHEDULE,
    SCHEDULES as SCHEDULES,
    STEPS as STEPS,
    Prediction as Prediction,
    Schedule as Schedule,
    Weighting as Weighting,
    require_prediction as require_prediction,
    require_schedule as require_schedule,
)
from .errors import InvalidConfigError

BETA_MIN, BETA_MAX = 0.1, 20.0
"""β(0) and β(1) of the VP-SDE."""

SIGMA_MIN, SIGMA_MAX, SIGMA_DATA = 0.002, 80.0, 0.5
"""Of EDM: the least and the most noise, and the deviation of images in [-1, 1] (Karras et al., 2022, Table 1)."""
LOG_SIGMA_MEAN, LOG_SIGMA_STD = -1.2, 1.2
"""Of log σ in EDM's training."""


# Schedules: β_t and ᾱ_t


def discrete_betas(schedule: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """β_t of a discrete schedule, t = 0 ... 999. In float32 they are those of diffusers, bit for bit."""
    if schedule == "ddpm":
        # DDPM (Ho et al., 2020): linear.
        return torch.linspace(1e-4, 0.02, STEPS, dtype=dtype)
    if schedule == "sd":
        # Stable Diffusion (Rombach et al., 2022): linear in √β.
        return torch.linspace(0.00085**0.5, 0.012**0.5, STEPS, dtype=dtype) ** 2
    if schedule == "cosine":
        # Improved DDPM (Nichol & Dhariwal, 2021): β_t = min(1 - ᾱ(t+1)/ᾱ(t), 0.999). With Python's own cosine, because
        # torch's differs from it in the last bit.
        curve = [math.cos((step / STEPS + 0.008) / 1.008 * math.pi / 2) ** 2 for step in range(STEPS + 1)]
        return torch.tensor([min(1 - curve[step + 1] / curve[step], 0.999) for step in range(STEPS)], dtype=dtype)
    raise InvalidConfigError(f"the schedule {schedule!r} has no discrete β_t; discrete are ddpm, cosine and sd")


def alpha_bars(schedule: Any = "ddpm") -> Tensor:
    """ᾱ_t in float64, one value per training time, all equally likely. E_t ᾱ_t is what Lemma 3.2 needs of a schedule.

    `schedule` is a name, a tensor or sequence of ᾱ_t, or a scheduler of diffusers (its `alphas_cumprod`). E_t ᾱ_t is
    0.2755 for "ddpm", 0.2760 for "vp" (at the middle of 1000 intervals of its continuous time), 0.4956 for "cosine" and
    0.3734 for "sd". Of "flow" and "edm" they are those of the process that preserves the variance and has the same
    ratio of signal to noise: their x_t is a multiple of its x_t.
    """
    if isinstance(schedule, str):
        require_schedule(schedule)
        if schedule == "vp":
            return torch.exp(-_beta_integral((torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS))
        if schedule in FLOWS or schedule == "edm":
            process = NoiseProcess(schedule)  # pyright: ignore[reportArgumentType]
            signal, sigma = process.signal_and_noise(process.times(even_fractions(STEPS)))
            return (signal.double() ** 2) / (signal.double() ** 2 + sigma.double() ** 2)
        return torch.cumprod(1 - discrete_betas(schedule, torch.float64), 0)
    schedule = getattr(schedule, "alphas_cumprod", schedule)
    try:
        values = torch.as_tensor(schedule, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidConfigError(
            f"a noise schedule is a name ({', '.join(SCHEDULES)}), the values ᾱ_t, or a scheduler with alphas_cumprod; "
            f"got {type(schedule).__name__}"
        ) from error
    if len(values) == 0 or not bool(((values >= 0) & (values <= 1)).all()):
        raise InvalidConfigError("every ᾱ_t must lie in [0, 1], and there must be at least one")
    return values


@cache
def widest_float(device: str) -> torch.dtype:
    """float64; float32 on a kind of device that has no such numbers (Apple's GPUs)."""
    try:
        return torch.zeros((), dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def in_float64(t: Tensor) -> Tensor:
    """Times in float64 where their device has it. To compute on the CPU instead would wait at every step."""
    return t.to(widest_float(t.device.type))


def _beta_integral(t: Tensor) -> Tensor:
    """∫_0^t β(s) ds with β(s) = β_min + s (β_max - β_min)."""
    return BETA_MIN * t + 0.5 * (BETA_MAX - BETA_MIN) * t**2


# x_t


def mix(x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """Eq. (1): signal · x_0 + sigma · ε, with one signal and one sigma (B,) per image."""
    return _per_image(signal, x0) * x0 + _per_image(sigma, x0) * noise


def even_fractions(count: int, generator: torch.Generator | None = None) -> Tensor:
    """`count` numbers spread evenly over [0, 1): times of a few images that cover the whole schedule.

    With a generator they come in random order, so that they have nothing to do with the order of the images.
    """
    ranks = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
    return (ranks + 0.5) / count


def _per_image(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class NoiseProcess:
    """A schedule as training and sampling use it: network times, x_t, and the betas of diffusers' samplers."""

    schedule: Schedule = "vp"

    def __post_init__(self) -> None:
        require_schedule(self.schedule)

    def times(self, uniform: Tensor) -> Tensor:
        """Network times from numbers that are uniform on [0, 1)."""
        if self.schedule == "vp":
            # t is uniform on (0, 1], so that there is always some noise; the network sees 999 t.
            return 999.0 * (1.0 - uniform)
        if self.schedule == "flow":
            return 999.0 * (1.0 - uniform)
        if self.schedule == "flow-logit":
            return (999.0 * torch.sigmoid(_normal(1.0 - uniform))).float()
        if self.schedule == "edm":
            log_sigma = LOG_SIGMA_MEAN + LOG_SIGMA_STD * _normal(1.0 - uniform)
            return _edm_time(log_sigma.clamp(math.log(SIGMA_MIN), math.log(SIGMA_MAX))).float()
        return (uniform * STEPS).floor().clamp_(max=STEPS - 1)

    def signal_and_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """√ᾱ_t and √(1-ᾱ_t) at network times, in float32; of "flow" and "edm" what stands in their place."""
        time = in_float64(t)
        if self.schedule in FLOWS:
            share = time / 999.0
            signal, sigma = 1.0 - share, share
        elif self.schedule == "edm":
            level = self.edm_sigma(time)
            signal = torch.rsqrt(level**2 + SIGMA_DATA**2)
            sigma = level * signal
        elif self.schedule == "vp":
            integral = _beta_integral(time / 999.0)
            # expm1 keeps all digits of 1 - ᾱ where there is almost no noise.
            signal, sigma = torch.exp(-0.5 * integral), torch.sqrt(-torch.expm1(-integral))
        else:
            tables = self.alphas_bar.sqrt(), (1.0 - self.alphas_bar).sqrt()  # in float64, which the device may not have
            signal, sigma = (table.float().to(t.device)[t.long()] for table in tables)
        return signal.float().to(t.device), sigma.float().to(t.device)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t at network times."""
        return mix(x0, noise, *self.signal_and_noise(t))

    def edm_sigma(self, t: Tensor) -> Tensor:
        """σ of EDM at network times: log σ goes evenly from SIGMA_MIN at 0 to SIGMA_MAX at 999."""
        low, high = math.log(SIGMA_MIN), math.log(SIGMA_MAX)
        return torch.exp(low + (high - low) * in_float64(t) / 999.0)

    @property
    def is_diffusion(self) -> bool:
        """Whether it has β_t and ᾱ_t. A flow and EDM have not."""
        return self.schedule not in (*FLOWS, "edm")

    @property
    def time_map(self) -> tuple[float, float]:
        """(a, b): the network's time is a k + b at the time k of diffusers' scheduler."""
        if self.schedule == "vp":
            return 999.0 / STEPS, 999.0 / STEPS
        if self.schedule in FLOWS:
            return 999.0 / STEPS, 0.0
        if self.schedule == "edm":  # whose schedulers count in log(σ)/4
            low, high = math.log(SIGMA_MIN), math.log(SIGMA_MAX)
            return 4 * 999.0 / (high - low), -999.0 * low / (high - low)
        return 1.0, 0.0

    def log_snr(self, t: Tensor) -> Tensor:
        """log(ᾱ_t / (1-ᾱ_t)) at network times: how much of x_t is image. It falls with t."""
        signal, sigma = self.signal_and_noise(t)
        tiny = torch.finfo(signal.dtype).tiny
        return 2 * (signal.clamp_min(tiny).log() - sigma.clamp_min(tiny).log())

    @cached_property
    def alphas_bar(self) -> Tensor:
        """ᾱ at the 1000 steps of the samplers, in float64.

        Of the float32 betas that diffusers' samplers take, so that training and sampling share every bit; `alpha_bars`
        has the exact values that theory asks for.
        """
        if not self.is_diffusion:
            raise InvalidConfigError(f"the schedule {self.schedule!r} has no β_t; vp, ddpm, cosine and sd have them")
        if self.schedule == "vp":
            # Step k of the divided VP-SDE ends at t = (k+1)/1000.
            return torch.exp(-_beta_integral(torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS))
        return torch.cumprod(1.0 - self.betas.double(), dim=0)

    @cached_property
    def betas(self) -> Tensor:
        """β of the 1000 steps, as diffusers' schedulers take them (`trained_betas`)."""
        if self.schedule == "vp":
            alphas_bar = self.alphas_bar
            return 1.0 - alphas_bar / torch.cat([torch.ones(1, dtype=torch.float64), alphas_bar[:-1]])
        if not self.is_diffusion:
            return self.alphas_bar  # which raises
        return discrete_betas(self.schedule)

    def network_time(self, step: Tensor) -> Tensor:
        """The network's time at a step of a sampler, 0 to 999, not necessarily whole."""
        if self.schedule == "vp":
            return (step.float() + 1.0) * (999.0 / STEPS)
        scale, shift = self.time_map
        return step.float() if self.is_diffusion else (scale * step.float() + shift).clamp(0.0, 999.0)


def _normal(uniform: Tensor) -> Tensor:
    """Normal numbers from uniform ones in (0, 1], the largest of which stand for those that are left out."""
    return torch.special.ndtri(in_float64(uniform).clamp(1e-7, 1 - 1e-7))


def _edm_time(log_sigma: Tensor) -> Tensor:
    low, high = math.log(SIGMA_MIN), math.log(SIGMA_MAX)
    return 999.0 * (log_sigma - low) / (high - low)


# Noise levels: a loss says little without them, because it differs a hundredfold between the ends of a schedule

SNR_EDGES = (-6.0, -4.0, -2.0, 0.0, 2.0, 4.0, 6.0)
"""Log-SNR between two levels: level 0 is nearly all noise, the last one nearly all image."""
LEVELS = len(SNR_EDGES) + 1


def noise_levels(process: "NoiseProcess", t: Tensor) -> Tensor:
    """The noise level of each image, 0 to LEVELS - 1, by its log-SNR."""
    low, step = SNR_EDGES[0], SNR_EDGES[1] - SNR_EDGES[0]
    edges = low + step * torch.arange(len(SNR_EDGES), device=t.device)  # made there: a copy would wait at every step
    return torch.bucketize(process.log_snr(t), edges)


def level_names() -> tuple[str, ...]:
    """The bounds of each level, for tables and metrics: "-inf..-6", "-6..-4", ..., "6..inf"."""
    bounds = ["-inf", *(f"{edge:g}" for edge in SNR_EDGES), "inf"]
    return tuple(f"{low}..{high}" for low, high in pairwise(bounds))


# What the network is asked to predict, and the loss

Predict = Callable[[Tensor, Tensor], Tensor]
"""A network with its conditions already given: from x_t and the network's times to a tensor like x_t."""


def target(process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """ε, x_0, v = √ᾱ ε - √(1-ᾱ) x_0, the velocity ε - x_0 of a flow, or what EDM's network is left with.

    EDM's denoiser is D(x) = c_skip x + c_out F(c_in x), and its loss, weighted by 1/c_out², is the mean square of
    F - (x_0 - c_skip x) / c_out = F - (σ x_0 / σ_data - σ_data ε) / √(σ² + σ_data²).
    """
    signal, sigma = process.signal_and_noise(t)
    return _target(prediction, x0, noise, signal, sigma)


def _target(prediction: Prediction, x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    if prediction == "epsilon":
        return noise
    if prediction == "x0":
        return x0
    if prediction == "flow":
        return noise - x0
    signal, sigma = (_per_image(value, x0) for value in (signal, sigma))
    if prediction == "edm":
        return (sigma / SIGMA_DATA) * x0 - (SIGMA_DATA * signal) * noise
    return signal * noise - sigma * x0


def as_epsilon(process: NoiseProcess, prediction: Prediction, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """The ε that an output of the network stands for."""
    if prediction == "epsilon":
        return output
    signal, sigma = (_per_image(value, x_t) for value in process.signal_and_noise(t))
    if prediction == "x0":
        return (x_t - signal * output) / sigma
    if prediction == "flow":
        return signal * output + x_t
    if prediction == "edm":
        return sigma * x_t - (SIGMA_DATA * signal) * output
    return signal * output + sigma * x_t


def noisy_and_target(
    process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """x_t, and what the network is to predict of it. Signal and noise of the times are computed once."""
    signal, sigma = process.signal_and_noise(t)
    return mix(x0, noise, signal, sigma), _target(prediction, x0, noise, signal, sigma)


def loss_weights(
    process: NoiseProcess, prediction: Prediction, weighting: Weighting, t: Tensor, gamma: float = 5.0
) -> Tensor:
    """By what the loss of each image is multiplied: (B,).

    Min-SNR-γ (Hang et al., 2023, Section 3.4) weighs the error in x_0 by min(SNR, γ). The error in ε is SNR times that
    in x_0, and the error in v is SNR + 1 times, so that for a network that predicts

        x_0:  w = min(SNR, γ)        ε:  w = min(SNR, γ) / SNR        v:  w = min(SNR, γ) / (SNR + 1)
    """
    if weighting == "none":
        return torch.ones_like(t, dtype=torch.float32)
    log_snr = in_float64(process.log_snr(t))
    clipped = log_snr.clamp(max=math.log(gamma))
    # In logarithms: at the ends of a schedule the SNR and its inverse exceed what float32 holds.
    over = {"x0": torch.zeros_like(log_snr), "epsilon": log_snr, "v": torch.nn.functional.softplus(log_snr)}
    return (clipped - over[prediction]).exp().float().to(t.device)


def epsilon_losses(
    predict: Predict, process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor
) -> Tensor:
    """The error in ε of each image, (B,), whatever the network predicts: comparable between networks."""
    x_t = process.add_noise(x0, noise, t)
    return mean_square(noise - as_epsilon(process, prediction, predict(x_t, t), x_t, t))


def mean_square(difference: Tensor) -> Tensor:
    return difference.float().square().flatten(1).mean(dim=1)


def flat_losses(wanted: Tensor) -> Tensor:
    """What the best answer costs that is the same at every position of an image: a collapse ends there.

    That of ε is 1, as for an answer of zero; v and a flow hold the image, whose brightness such an answer still has.
    """
    return mean_square(wanted - wanted.mean(dim=tuple(range(2, wanted.dim())), keepdim=True))
