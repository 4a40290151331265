"""ᾱ_t of the usual noise processes x_t = √ᾱ_t x_0 + √(1-ᾱ_t) ε (Eq. 1): one value per training time, equally likely.

What it tells a user: E_t ᾱ_t is all that the input norm (Lemma 3.2) needs to know about a schedule.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidConfigError

STEPS = 1000


def ddpm() -> Tensor:
    """DDPM: β linear from 1e-4 to 0.02 in 1000 steps. E ᾱ = 0.2755."""
    betas = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)
    return torch.cumprod(1 - betas, 0)


def vp() -> Tensor:
    """The VP-SDE with continuous t in [0, 1] and β from 0.1 to 20, at the middle of 1000 intervals. E ᾱ = 0.2760."""
    t = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    return torch.exp(-0.5 * t**2 * (20 - 0.1) - 0.1 * t)


def cosine() -> Tensor:
    """Improved DDPM's cosine schedule with its β capped at 0.999. E ᾱ = 0.4961."""
    t = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    curve = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
    return torch.cumprod((curve[1:] / curve[:-1]).clamp(min=1e-3), 0)


SCHEDULES = {"ddpm": ddpm, "vp": vp, "cosine": cosine}


def alpha_bars(schedule: Any = "ddpm") -> Tensor:
    """ᾱ_t in float64 from a name, a tensor or sequence of ᾱ_t, or a diffusers scheduler (its `alphas_cumprod`)."""
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise InvalidConfigError(f"unknown noise schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
        return SCHEDULES[schedule]()
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
