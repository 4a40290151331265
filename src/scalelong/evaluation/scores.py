"""The Fréchet distance between two sets of features, seen as Gaussians (Heusel et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..console import text_table
from ..errors import EvaluationError, InvalidSamplesError, ProtocolMismatchError


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


# Improved precision and recall (Kynkäänniemi et al., 2019): how much of one set lies in the other's neighbourhood.

CHUNK = 1024


def precision_recall(real: Tensor, generated: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """For each generated feature whether it lies among the real ones, and the reverse: bool (n,) and bool (m,).

    Their means are precision and recall. The neighbourhood of a set is the union of balls around its features, each
    reaching to the k-th nearest other one.
    """
    for name, features in (("real", real), ("generated", generated)):
        if len(features) <= k:
            raise EvaluationError(
                f"precision and recall need more than k = {k} images, and there are {len(features)} {name} ones"
            )
    real, generated = real.double(), generated.double()
    return _covered(generated, real, _radii(real, k)), _covered(real, generated, _radii(generated, k))


def _radii(features: Tensor, k: int) -> Tensor:
    """Distances to the k-th nearest other feature. The nearest one of all is the feature itself."""
    found = [torch.cdist(part, features).kthvalue(k + 1, dim=1).values for part in features.split(CHUNK)]
    return torch.cat(found)


def _covered(points: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    return torch.cat([(torch.cdist(part, centres) <= radii).any(dim=1) for part in points.split(CHUNK)])


# How far a score would move with other images: intervals by resampling the generated ones.

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


# Samples are looked at before they are scored: a score of broken images is a number that means nothing.

TOLERANCE = 1e-3


def validate_samples(images: Tensor, shape: tuple[int, int, int], count: int | None = None) -> Tensor:
    """uint8 images (N, C, H, W), from uint8 or from floats in [-1, 1]."""
    if images.dim() != 4 or tuple(images.shape[1:]) != shape:
        raise InvalidSamplesError(f"samples must be (N, {', '.join(map(str, shape))}), got {tuple(images.shape)}")
    if count is not None and len(images) != count:
        raise InvalidSamplesError(f"{count} samples are needed and {len(images)} are there")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InvalidSamplesError(f"samples must be uint8, or floats in [-1, 1], got {images.dtype}")
    finite = torch.isfinite(images).flatten(1).all(dim=1)
    if not bool(finite.all()):
        broken = (~finite).nonzero().flatten().tolist()
        raise InvalidSamplesError(
            f"{len(broken)} of {len(images)} samples are not finite, the first is number {broken[0]}; the model or the "
            f"sampler is broken"
        )
    low, high = float(images.min()), float(images.max())
    if low < -1 - TOLERANCE or high > 1 + TOLERANCE:
        raise InvalidSamplesError(
            f"samples must lie in [-1, 1] and reach from {low:.3g} to {high:.3g}; clip or rescale them"
        )
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


# How a score was made. Scores that were made in different ways are not compared.


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Everything that must be equal for two scores to be comparable. Which model it was is not part of it."""

    features: str
    features_sha256: str
    data: str
    data_sha256: str
    """The data set's fingerprint."""
    reference_images: int
    images: int
    sampler: str | None = None
    """None where it is not known, as for a folder of images from elsewhere."""
    sampler_steps: int | None = None
    guidance: float | None = None
    weights: str | None = None
    """ "ema" or "raw"."""
    conditions: str = "none"
    """How classes or texts were chosen."""
    neighbours: int = 3


@dataclass(frozen=True)
class Scores:
    """The scores of one set of images, with their protocol and with what was scored."""

    protocol: Protocol
    frechet: Score
    precision: Score
    recall: Score
    subject: dict[str, Any]
    """The run and its step, or the folder."""
    agreement: Score | None = None
    """Share of the images that show the class or the text that was asked for."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scores:
        scores = {name: Score(**values[name]) for name in ("frechet", "precision", "recall")}
        asked = values.get("agreement")
        return cls(
            protocol=Protocol(**values["protocol"]),
            subject=values["subject"],
            agreement=Score(**asked) if asked else None,
            **scores,
        )

    def __str__(self) -> str:
        protocol = self.protocol
        how = f"{protocol.images} images against {protocol.reference_images} of {protocol.data}, {protocol.features}"
        asked = f"shows what was asked for {self.agreement}\n" if self.agreement else ""
        return (
            f"Fréchet distance {self.frechet}\nprecision {self.precision}\nrecall {self.recall}\n{asked}"
            f"95 % intervals; {how} features {protocol.features_sha256[:12]}"
        )


# A path may differ where the fingerprint is equal.
_NAMES_ONLY = ("data",)


def require_comparable(scores: Sequence[Scores]) -> None:
    """Raises ProtocolMismatchError, which shows every difference."""
    for other in scores[1:]:
        differences = protocol_differences(scores[0].protocol, other.protocol)
        if differences:
            shown = "\n".join(f"  {name}: {a!r} and {b!r}" for name, (a, b) in differences.items())
            raise ProtocolMismatchError(
                f"{_title(scores[0])} and {_title(other)} were scored in different ways and cannot be compared:\n"
                f"{shown}\nScore both with the same options"
            )


def protocol_differences(a: Protocol, b: Protocol) -> dict[str, tuple[Any, Any]]:
    names = [field.name for field in fields(Protocol) if field.name not in _NAMES_ONLY]
    return {name: (getattr(a, name), getattr(b, name)) for name in names if getattr(a, name) != getattr(b, name)}


def comparison(scores: Sequence[Scores]) -> str:
    """A table, best Fréchet distance first."""
    require_comparable(scores)
    return text_table(comparison_rows(scores), left=True, rule=False)


def comparison_rows(scores: Sequence[Scores]) -> list[dict[str, str]]:
    return [
        {"": _title(entry), "Fréchet distance": str(entry.frechet)}
        | {"precision": str(entry.precision), "recall": str(entry.recall)}
        for entry in sorted(scores, key=lambda entry: entry.frechet.value)
    ]


def _title(scores: Scores) -> str:
    subject = scores.subject
    return f"{subject.get('run') or subject.get('folder')}" + (f" step {subject['step']}" if "step" in subject else "")
