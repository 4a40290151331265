"""The input: how large x_t is (Lemma 3.2, Figure 3 a, b), and the range of κ that follows from it (Section 4.1).

The output of Eq. (3) with unit gain has a squared norm of ‖x_t‖² Σ κ_j², and its target is ε. So with κ_j = κ^(j-1) the
sum should lie between the mean and a high quantile of ‖ε‖²/‖x_t‖². No measurement shows that a κ from this range beats
the default of 0.7 (docs/theory.md): it says what the theory expects, not what to train with.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidConfigError
from ..noise import SCHEDULE, alpha_bars, mix

# s of the uniform distribution on [-1, 1], which the paper assumes.
PAPER_SECOND_MOMENT = 1 / 3
QUANTILE = 0.97
MOST_RATIOS = 8_000_000
SEED_OFFSET = 2_718_281_828


def second_moment(images: Tensor) -> float:
    """s = E[x_0²] per dimension, of images scaled as the network sees them (usually [-1, 1])."""
    return float(_image_moments(images).mean())


def _image_moments(images: Tensor) -> Tensor:
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
    alpha_bar = bars[steps]
    return NoisyBatch(mix(images, noise, alpha_bar.sqrt(), (1 - alpha_bar).sqrt()), steps, noise)


class InputStatistics(NamedTuple):
    """One entry per sampled (image, time)."""

    norm: Tensor
    """‖x_t‖² / m, Figure 3 a."""
    ratio: Tensor
    """‖ε‖² / ‖x_t‖², Figure 3 b."""


def sampled_statistics(images: Tensor, schedule: Any = "ddpm", draws: int = 8, seed: int = 0) -> InputStatistics:
    """Figure 3 a and b as they are defined: `draws` times and noises for every image."""
    batches = [noisy_batch(images, schedule, seed + draw) for draw in range(draws)]
    norm = torch.cat([_image_moments(batch.inputs) for batch in batches])
    noise = torch.cat([_image_moments(batch.noise) for batch in batches])
    return InputStatistics(norm, noise / norm)


def quantile(values: Tensor, share: float = QUANTILE) -> float:
    """torch.quantile without its limit on the number of values."""
    return float(values.kthvalue(max(1, round(share * len(values)))).values)


def input_rows(data: Mapping[str, Tensor], schedule: Any = "ddpm", draws: int = 8) -> list[dict[str, Any]]:
    """Lemma 3.2 and Figure 3 a, b: ‖x_t‖²/m and the mean and 97 % quantile of ‖ε‖²/‖x_t‖²."""
    rows = []
    for name, images in data.items():
        s = second_moment(images)
        sampled = sampled_statistics(images, schedule, draws)
        rows.append(
            {
                "data": name,
                "s": round(s, 3),
                "‖x_t‖²/m": round(float(sampled.norm.mean()), 4),
                "lemma": round(expected_input_norm(1, schedule, s), 4),
                "paper": round(expected_input_norm(1, schedule, PAPER_SECOND_MOMENT), 4),
                "ratio": round(float(sampled.ratio.mean()), 3),
                "q97": round(quantile(sampled.ratio), 3),
            }
        )
    return rows


class KappaRange(NamedTuple):
    """κ from `low`, where Σ κ_j² is the mean of ‖ε‖²/‖x_t‖², to `high`, where it is the 97 % quantile."""

    low: float
    high: float
    skips: int
    mean: float
    quantile: float
    second_moment: float
    """E[x_0²] per dimension."""

    def __str__(self) -> str:
        capped = "; N skips cannot reach the quantile, so κ ends at 1" if self.skips < self.quantile else ""
        return (
            f"κ from {self.low:.3f} to {self.high:.3f} for {self.skips} long skips (Section 4.1): "
            f"E[x_0²] = {self.second_moment:.3f}, ‖ε‖²/‖x_t‖² has the mean {self.mean:.3f} and the 97 % quantile "
            f"{self.quantile:.3f}{capped}"
        )


def kappa_range(skips: int, images: Tensor | None = None, schedule: Any = SCHEDULE) -> KappaRange:
    """The range of Section 4.1 for images as the network sees them; without images, for the paper's uniform data.

    No noise is drawn: ‖ε‖²/‖x_t‖² is 1 / (1 - (1 - s) ᾱ_t) for each image, to a percent or so.
    """
    if skips < 1:
        raise InvalidConfigError(f"`skips` must be at least 1, got {skips}")
    moments = torch.tensor([PAPER_SECOND_MOMENT], dtype=torch.float64) if images is None else _image_moments(images)
    if not bool(torch.isfinite(moments).all()):
        raise InvalidConfigError("`images` has values that are not finite")
    bars, s = alpha_bars(schedule), float(moments.mean())
    if len(moments) * len(bars) > MOST_RATIOS:
        # The ratio is a smooth function of the moment, so quantiles of the moments stand for the images.
        moments = torch.quantile(moments[:MOST_RATIOS], torch.linspace(0, 1, 1001, dtype=torch.float64))
    norms = (1 - (1 - moments[:, None]) * bars).flatten()  # ‖x_t‖²/m of each image and time
    if not bool((norms > 0).all()):
        raise InvalidConfigError(
            "some images are all zero where the schedule has ᾱ_t = 1, so x_t vanishes: remove these images"
        )
    mean, tail = float((1 / norms).mean()), quantile(1 / norms)
    low, high = (round(kappa_for_sum(target, skips), 4) for target in (mean, tail))
    return KappaRange(low, high, skips, mean, tail, s)


def kappa_for_sum(target: float, skips: int) -> float:
    """κ in [0, 1] with Σ_{j=1..N} κ^(2(j-1)) = target, by bisection; 1 where the sum never gets there."""
    low, high = 0.0, 1.0
    if skips <= target:
        return high
    while high - low > 1e-9:
        middle = (low + high) / 2
        total = sum(middle ** (2 * j) for j in range(skips))
        low, high = (low, middle) if total > target else (middle, high)
    return (low + high) / 2
