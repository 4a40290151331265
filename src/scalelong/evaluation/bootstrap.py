"""How far a score would move with other images: intervals by resampling the generated ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .frechet import Moments, frechet_distance

Z = 1.96
"""95 % of a normal distribution lie within so many standard deviations."""


@dataclass(frozen=True)
class Score:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def frechet_score(reference: Moments, features: Tensor, seed: int = 0) -> Score:
    """The distance ± 1.96 bootstrap standard errors.

    Resampled sets have fewer different images, which raises their distance; so their spread is used and not their
    quantiles. The interval says what other seeds would give at the same number of images, not at infinitely many.
    """
    value = frechet_distance(reference, Moments.of(features))
    generator = torch.Generator().manual_seed(seed)
    replicates = []
    for _ in range(100 if features.shape[1] <= 256 else 20):
        rows = torch.randint(len(features), (len(features),), generator=generator)
        weights = torch.bincount(rows, minlength=len(features))
        replicates.append(frechet_distance(reference, Moments.of(features, weights)))
    error = Z * float(torch.tensor(replicates, dtype=torch.float64).std())
    return Score(value, max(value - error, 0.0), value + error)


def share_score(hits: Tensor) -> Score:
    """A share with Wilson's interval, which is what a bootstrap of yes and no tends to, and is right at 0 and 1."""
    n, p = len(hits), float(hits.double().mean())
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * (p * (1 - p) / n + Z**2 / (4 * n**2)) ** 0.5
    return Score(p, min(max(centre - half, 0.0), p), max(min(centre + half, 1.0), p))
