"""From noise to x_0: classifier-free guidance, and the samplers of diffusers.

How images are made is one object, `SampleSettings`, which travels whole from the flags of a command to the protocol of
a score. Each image has its own seed, so it does not depend on the others of its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..config import FLOWS, STEPS, Prediction, require_prediction, require_sampler
from ..errors import InvalidConfigError, MissingDependencyError
from ..noise import (
    SIGMA_DATA,
    SIGMA_MAX,
    SIGMA_MIN,
    NoiseProcess,
    Predict,
)

# Guidance (Ho & Salimans, 2022)

Conditional = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A network that takes x_t, the times and the condition."""


PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types that a network may multiply in."""


def in_precision(network: Conditional, precision: str, device: torch.device) -> Conditional:
    """The network under autocast; what it gives is float32 again."""
    if precision == "no":
        return network

    def call(x: Tensor, t: Tensor, condition: Tensor | None) -> Tensor:
        with torch.autocast(device.type, PRECISIONS[precision]):
            return network(x, t, condition).float()

    return call


def guided(network: Conditional, condition: Tensor | None, null: Tensor | None, scale: float) -> Predict:
    """F(x, ∅) + w (F(x, c) - F(x, ∅)). With w = 1 the condition alone is used, with w = 0 it is ignored.

    The U-ViT authors count from there: their scale s is w = 1 + s.
    """
    if condition is None or scale == 1:
        return lambda x, t: network(x, t, condition)
    if null is None:
        raise InvalidConfigError(
            f"guidance {scale:g} needs a model that also knows the null condition; this one was trained with "
            f"condition_dropout 0, so only guidance 1 is possible"
        )
    nulls = null.to(condition.device).expand_as(condition)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        both = network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([condition, nulls]))
        conditional, unconditional = both.chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return predict


# Samplers

_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddpm": ("DDPMScheduler", {}),
    "ddim": ("DDIMScheduler", {"timestep_spacing": "trailing"}),
    # Steps evenly spaced in log-SNR: at 25 steps its error is a tenth of that of evenly spaced times.
    "dpm++": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "use_lu_lambdas": True}),
    "euler": ("EulerDiscreteScheduler", {"timestep_spacing": "linspace"}),
    "heun": ("HeunDiscreteScheduler", {"timestep_spacing": "linspace"}),
    # The authors' Euler-Maruyama: with all 1000 steps this adds the noise of the reverse SDE, β, and does not clip.
    "sde": ("DDPMScheduler", {"variance_type": "fixed_large", "clip_sample": False}),
}
"""From our names to diffusers' classes and their options."""

_FLOW_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "dpm++": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "use_flow_sigmas": True, "prediction_type": "flow_prediction"},
    ),
}
"""The same for rectified flows."""

_EDM = {"sigma_min": SIGMA_MIN, "sigma_max": SIGMA_MAX, "sigma_data": SIGMA_DATA}
_EDM_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "euler": ("EDMEulerScheduler", _EDM),
    "dpm++": ("EDMDPMSolverMultistepScheduler", _EDM),
}
"""The same for EDM, on its own levels of noise (ρ = 7)."""

STOCHASTIC = ("ddpm", "sde")
"""Samplers that draw noise on the way."""

# DPM-Solver clips by "dynamic thresholding", which with its largest value of 1 is plain clipping.
_CLIPPING = {"ddpm": "clip_sample", "ddim": "clip_sample", "dpm++": "thresholding"}
_DIFFUSERS_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}
assert {*_DIFFUSERS_PREDICTIONS, "flow", "edm"} == set(get_args(Prediction))


def diffusers() -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise MissingDependencyError("diffusers", "train", "noise schedules and sampling") from error
    return diffusers


def _schedulers_of(schedule: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return _FLOW_SCHEDULERS if schedule in FLOWS else _EDM_SCHEDULERS if schedule == "edm" else _SCHEDULERS


def scheduler(process: NoiseProcess, prediction: Prediction, sampler: str, *, clip: bool = True) -> Any:
    """A scheduler of diffusers for this noise process. `clip` keeps its estimates of x_0 in [-1, 1], where it can."""
    require_prediction(prediction, process.schedule)
    require_sampler(sampler, 1, process.schedule)
    kind, options = _schedulers_of(process.schedule)[sampler]
    if not process.is_diffusion:
        # Euler's and Heun's schedulers of these have no clipping.
        clipping = {"thresholding": clip} if sampler == "dpm++" else {}
        return _clipping_plainly(getattr(diffusers(), kind)(num_train_timesteps=STEPS, **options, **clipping))
    clipping = {_CLIPPING[sampler]: clip} if sampler in _CLIPPING else {}
    return _clipping_plainly(
        getattr(diffusers(), kind)(
            num_train_timesteps=STEPS,
            trained_betas=process.betas.float().tolist(),
            prediction_type=_DIFFUSERS_PREDICTIONS[prediction],
            **options,
            **clipping,
        )
    )


def _clipping_plainly(made: Any) -> Any:
    """Dynamic thresholding sorts the pixels of every image at every step for a bound that lies between 1 and
    `sample_max_value`. Where both are 1 the same comes out of a clamp, bit for bit."""
    if made.config.get("thresholding") and made.config.get("sample_max_value") == 1.0:
        made._threshold_sample = lambda sample: sample.clamp(-1, 1)
    return made


@torch.no_grad()
def sample(
    predict: Predict,
    process: NoiseProcess,
    prediction: Prediction,
    shape: Sequence[int],
    seeds: Sequence[int],
    *,
    sampler: str = "dpm++",
    steps: int = 50,
    device: torch.device | str = "cpu",
    clip: bool = True,
) -> Tensor:
    """One image of shape (C, H, W) for each seed: (len(seeds), C, H, W). Global random numbers are not touched.

    `clip` keeps images, and what the solver takes for them on the way, in [-1, 1]; latents have no such bounds.
    """
    require_sampler(sampler, steps, process.schedule)
    solver = scheduler(process, prediction, sampler, clip=clip)
    solver.set_timesteps(steps)
    if hasattr(solver, "set_begin_index"):
        solver.set_begin_index(0)  # whole timesteps may repeat where the noise changes fast, so do not search by them
    # On the CPU, so that a seed means the same image on every device.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    x = torch.stack([torch.randn(tuple(shape), generator=generator) for generator in generators]).to(device)
    # A flow begins with noise of unit size, and its schedulers neither scale it nor what the network sees.
    x = x * getattr(solver, "init_noise_sigma", 1.0)
    scaled = getattr(solver, "scale_model_input", lambda value, _: value)
    options = {"generator": generators} if sampler in STOCHASTIC else {}
    for step in solver.timesteps:
        times = process.network_time(step).expand(len(seeds)).to(device)
        output = predict(scaled(x, step), times)
        x = solver.step(output, step, x, **options).prev_sample
    return x.clamp(-1, 1) if clip else x


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """How images are made, all but their seeds and prompts."""

    sampler: str = "dpm++"
    steps: int = 50
    guidance: float = 1.0
    """Classifier-free guidance: 1 uses the condition as it is, more exaggerates it."""
    precision: str = "no"
    """Of the network's products: "bf16", "fp16", or "no" for float32. The sampler itself is always in float32."""

    def __post_init__(self) -> None:
        require_sampler(self.sampler, self.steps)
        if self.precision not in PRECISIONS:
            raise InvalidConfigError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not 0 <= self.guidance <= 1000:
            raise InvalidConfigError(f"guidance must be a number from 0 to 1000, got {self.guidance}")
