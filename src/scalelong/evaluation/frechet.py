"""The Fréchet distance between two sets of features, seen as Gaussians (Heusel et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import EvaluationError


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and covariance (D, D) of n features, in float64."""

    mean: Tensor
    covariance: Tensor
    n: int

    @classmethod
    def of(cls, features: Tensor, weights: Tensor | None = None) -> Moments:
        """`weights` counts how often each feature is taken (for the bootstrap)."""
        x = features.double()
        if x.dim() != 2 or len(x) < 2:
            raise EvaluationError(f"at least two features of one dimension are needed, got {tuple(x.shape)}")
        w = torch.ones(len(x), dtype=torch.float64) if weights is None else weights.double()
        n = float(w.sum())
        mean = w @ x / n
        centred = (x - mean) * w.sqrt()[:, None]
        return cls(mean, centred.T @ centred / (n - 1), int(n))


class MomentsSum:
    """Moments of features that come in batches: no more than one batch is kept."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = torch.zeros(())
        self.scatter = torch.zeros(())

    def add(self, features: Tensor) -> None:
        """Chan's update, which does not subtract large numbers from each other."""
        x = features.double()
        mean = x.mean(dim=0)
        scatter = (x - mean).T @ (x - mean)
        if self.n == 0:
            self.n, self.mean, self.scatter = len(x), mean, scatter
            return
        total, shift = self.n + len(x), mean - self.mean
        self.scatter = self.scatter + scatter + torch.outer(shift, shift) * (self.n * len(x) / total)
        self.mean = self.mean + shift * (len(x) / total)
        self.n = total

    def moments(self) -> Moments:
        if self.n < 2:
            raise EvaluationError(f"at least two features are needed, got {self.n}")
        return Moments(self.mean, self.scatter / (self.n - 1), self.n)


def frechet_distance(a: Moments, b: Moments) -> float:
    """‖μ_a - μ_b‖² + tr(Σ_a + Σ_b - 2 (Σ_a Σ_b)^½).

    The trace of the root is the sum of the singular values of Σ_a^½ Σ_b^½. That holds for singular covariances too,
    as with fewer features than dimensions, where a root of the product itself is ill-conditioned and complex.
    """
    if a.mean.shape != b.mean.shape:
        raise EvaluationError(f"features of {len(a.mean)} and {len(b.mean)} dimensions cannot be compared")
    for moments in (a, b):
        if not bool(torch.isfinite(moments.mean).all() and torch.isfinite(moments.covariance).all()):
            raise EvaluationError("the features are not all finite, so they have no Fréchet distance")
    root = torch.linalg.svdvals(_square_root(a.covariance) @ _square_root(b.covariance)).sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * root
    return max(float(distance), 0.0)  # rounding alone makes it negative


def _square_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T
