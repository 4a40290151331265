"""The input of a diffusion network: how large x_t is, and how large the noise is beside it (Lemma 3.2, Figure 3 a, b).

What it tells a user: the target of the network is ε, its input is x_t, so ‖ε‖²/‖x_t‖² is what an Eq. (3) network
must amplify by; Section 4.1 chooses κ from it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidConfigError
from .schedules import alpha_bars

# s of the uniform distribution on [-1, 1], which the paper assumes.
PAPER_SECOND_MOMENT = 1 / 3
SEED_OFFSET = 2_718_281_828


def second_moment(images: Tensor) -> float:
    """s = E[x_0²] per dimension, of images scaled as the network sees them (usually [-1, 1])."""
    return float(image_moments(images).mean())


def image_moments(images: Tensor) -> Tensor:
    """s of each image, in float64."""
    if images.dim() < 2 or images.numel() == 0:
        raise InvalidConfigError(f"images must be a tensor (n, ...) with at least one image, got {tuple(images.shape)}")
    if not images.is_floating_point():
        raise InvalidConfigError(
            f"images must be floating-point, scaled as the network sees them (usually to [-1, 1]), got {images.dtype}"
        )
    return torch.cat([part.double().square().flatten(1).mean(1) for part in images.split(1024)])


def expected_input_norm(dimension: int, schedule: Any = "ddpm", s: float = PAPER_SECOND_MOMENT) -> float:
    """Lemma 3.2 in general form: E‖x_t‖² = m [1 - (1 - s) E_t ᾱ_t], exact for any data and schedule.

    s = 1/3 is the paper's Eq. (5): m (1 - 2 E_t ᾱ_t / 3).
    """
    return dimension * (1 - (1 - s) * float(alpha_bars(schedule).mean()))


class NoisyBatch(NamedTuple):
    inputs: Tensor
    steps: Tensor
    noise: Tensor


def noisy_batch(images: Tensor, schedule: Any = "ddpm", seed: int = 0) -> NoisyBatch:
    """x_t of every image at a random time (Eq. 1), with the time steps 0, 1, ... and the noise ε."""
    # Far from the seeds that people draw data with: times must not follow the images.
    generator = torch.Generator().manual_seed(SEED_OFFSET + seed)
    bars = alpha_bars(schedule).to(images)
    steps = torch.randint(len(bars), (len(images),), generator=generator).to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images)
    alpha_bar = bars[steps].view(-1, *[1] * (images.dim() - 1))
    return NoisyBatch(alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise, steps, noise)


class InputStatistics(NamedTuple):
    """One entry per sampled (image, time)."""

    norm: Tensor
    """‖x_t‖² / m, Figure 3 a."""
    ratio: Tensor
    """‖ε‖² / ‖x_t‖², Figure 3 b."""


def sampled_statistics(images: Tensor, schedule: Any = "ddpm", draws: int = 8, seed: int = 0) -> InputStatistics:
    """Figure 3 a and b as they are defined: `draws` times and noises for every image."""
    batches = [noisy_batch(images, schedule, seed + draw) for draw in range(draws)]
    norm = torch.cat([image_moments(batch.inputs) for batch in batches])
    noise = torch.cat([image_moments(batch.noise) for batch in batches])
    return InputStatistics(norm, noise / norm)


def fast_statistics(images: Tensor, schedule: Any = "ddpm") -> InputStatistics:
    """The same without noise: ‖x_t‖²/m ≈ 1 - (1 - s_image) ᾱ_t and ‖ε‖²/‖x_t‖² ≈ its inverse, for every image and time.

    Both norms concentrate for many dimensions, so this is accurate where m is in the hundreds. Needs only the moments.
    """
    norm = 1 - (1 - image_moments(images)[:, None]) * alpha_bars(schedule)[None, :]
    norm = norm.flatten()
    return InputStatistics(norm, 1 / norm)
