"""The noise process: x_t = √ᾱ_t x_0 + √(1-ᾱ_t) ε, and which times a network is trained on.

Times are in the units of the network, 0 to 999. Under "vp" they are continuous (the authors' VP-SDE), under "ddpm",
"cosine" and "sd" (Stable Diffusion's, for latents) whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .errors import InvalidConfigError
from .optional import needs

Schedule = Literal["vp", "ddpm", "cosine", "sd"]

STEPS = 1000
"""T of the discrete schedules, and the number of steps into which samplers divide the continuous one."""

BETA_MIN, BETA_MAX = 0.1, 20.0
"""β(0) and β(1) of the VP-SDE."""

_DIFFUSERS_OPTIONS: dict[str, dict[str, Any]] = {
    "ddpm": {"beta_schedule": "linear"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "sd": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
}


@dataclass(frozen=True)
class NoiseProcess:
    schedule: Schedule = "vp"

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            known = ", ".join(get_args(Schedule))
            raise InvalidConfigError(f"unknown noise schedule {self.schedule!r}; known: {known}")

    def times(self, uniform: Tensor) -> Tensor:
        """Network times from numbers that are uniform on [0, 1)."""
        if self.schedule == "vp":
            # t is uniform on (0, 1], so that there is always some noise; the network sees 999 t.
            return 999.0 * (1.0 - uniform)
        return (uniform * STEPS).floor().clamp_(max=STEPS - 1)

    def signal_and_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """√ᾱ_t and √(1-ᾱ_t) at network times, in float32."""
        if self.schedule == "vp":
            integral = _beta_integral(t.double() / 999.0)
            return torch.exp(-0.5 * integral).float(), torch.sqrt(-torch.expm1(-integral)).float()
        alpha_bar = self.alphas_bar.to(t.device)[t.long()]
        return alpha_bar.sqrt().float(), (1.0 - alpha_bar).sqrt().float()

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        signal, sigma = (value.view(-1, 1, 1, 1) for value in self.signal_and_noise(t))
        return signal * x0 + sigma * noise

    @cached_property
    def alphas_bar(self) -> Tensor:
        """ᾱ at the 1000 steps of the samplers, in float64."""
        if self.schedule == "vp":
            return torch.exp(-_beta_integral(self._continuous_times))
        return torch.cumprod(1.0 - self.betas.double(), dim=0)

    @cached_property
    def betas(self) -> Tensor:
        """β of the 1000 steps, as diffusers' schedulers take them (`trained_betas`)."""
        if self.schedule == "vp":
            alphas_bar = self.alphas_bar
            return 1.0 - alphas_bar / torch.cat([torch.ones(1, dtype=torch.float64), alphas_bar[:-1]])
        return diffusers().DDPMScheduler(num_train_timesteps=STEPS, **_DIFFUSERS_OPTIONS[self.schedule]).betas

    def network_time(self, step: Tensor) -> Tensor:
        """The network's time at a step of a sampler, 0 to 999, not necessarily whole."""
        # Step k of the divided VP-SDE ends at t = (k+1)/1000.
        return (step.float() + 1.0) * (999.0 / STEPS) if self.schedule == "vp" else step.float()

    @property
    def _continuous_times(self) -> Tensor:
        return torch.arange(1, STEPS + 1, dtype=torch.float64) / STEPS


def _beta_integral(t: Tensor) -> Tensor:
    """∫_0^t β(s) ds with β(s) = β_min + s (β_max - β_min)."""
    return BETA_MIN * t + 0.5 * (BETA_MAX - BETA_MIN) * t**2


def diffusers() -> Any:
    return needs("diffusers", "train", "noise schedules and sampling")


# What the network is asked to predict, and the loss.

Prediction = Literal["epsilon", "v", "x0"]

Predict = Callable[[Tensor, Tensor], Tensor]
"""A network with its conditions already given: from x_t and the network's times to a tensor like x_t."""


def require_prediction(prediction: str) -> None:
    if prediction not in get_args(Prediction):
        known = ", ".join(get_args(Prediction))
        raise InvalidConfigError(f"unknown prediction {prediction!r}; known: {known}")


def target(process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """ε, x_0, or v = √ᾱ ε - √(1-ᾱ) x_0."""
    if prediction == "epsilon":
        return noise
    if prediction == "x0":
        return x0
    signal, sigma = _columns(process, t)
    return signal * noise - sigma * x0


def as_epsilon(process: NoiseProcess, prediction: Prediction, output: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
    """The ε that an output of the network stands for."""
    if prediction == "epsilon":
        return output
    signal, sigma = _columns(process, t)
    if prediction == "x0":
        return (x_t - signal * output) / sigma
    return signal * output + sigma * x_t


def losses(
    predict: Predict, process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor
) -> Tensor:
    """The mean squared error of each image: (B,)."""
    output = predict(process.add_noise(x0, noise, t), t)
    return mean_square(target(process, prediction, x0, noise, t) - output)


def epsilon_losses(
    predict: Predict, process: NoiseProcess, prediction: Prediction, x0: Tensor, noise: Tensor, t: Tensor
) -> Tensor:
    """The error in ε of each image, (B,), whatever the network predicts: comparable between networks."""
    x_t = process.add_noise(x0, noise, t)
    return mean_square(noise - as_epsilon(process, prediction, predict(x_t, t), x_t, t))


def mean_square(difference: Tensor) -> Tensor:
    return difference.float().square().flatten(1).mean(dim=1)


def _columns(process: NoiseProcess, t: Tensor) -> tuple[Tensor, Tensor]:
    signal, sigma = process.signal_and_noise(t)
    return signal.view(-1, 1, 1, 1), sigma.view(-1, 1, 1, 1)
