"""What a score is, how it is computed, and when two may be compared.

A score is a function of `Evidence`. Tables, metrics of a run, model cards and scores.jsonl go through SCORES, so a new
one is a function and one entry here:

    def realism(evidence: Evidence) -> Score | None: ...
    SCORES["realism"] = realism
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..config import SCORE_TITLES
from ..console import text_table
from ..errors import EvaluationError, ProtocolMismatchError

# The Fréchet distance between two sets of features, seen as Gaussians (Heusel et al., 2017)


@dataclass(frozen=True)
class Moments:
    """Mean (D,) and covariance (D, D) of n features, in float64."""

    mean: Tensor
    covariance: Tensor
    n: int

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        total = MomentsSum()
        total.add(features)
        return total.moments()

    @cached_property
    def root(self) -> Tensor:
        """Σ^½, computed once: the reference's is needed for every set of images."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


class MomentsSum:
    """Moments of features that come in batches: no more than one batch is kept."""

    def __init__(self) -> None:
        self.n, self.mean, self.scatter = 0, torch.zeros(()), torch.zeros(())

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
            raise EvaluationError(
                "the features are not all finite, so they have no Fréchet distance: check the images, or "
                "choose other `features`"
            )
    root = torch.linalg.svdvals(a.root @ b.root).sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * root
    return max(float(distance), 0.0)  # rounding alone makes it negative


# Does the model copy images of its data? Real images are alike as well, so they set the measure.

COPY_QUANTILE, COPY_CORRELATION = 0.01, 0.9
MOST_FOR_COPIES = 2000
Resemblance = Callable[[Tensor, Tensor], Tensor]
"""From rows of generated and of real images to whether each pair looks the same, bool."""


def near_copies(real: Tensor, generated: Tensor, same: Resemblance | None = None) -> Tensor:
    """For each generated feature whether it is nearer to a real one than 99 % of the real ones are to each other.

    Features of blurred images are near to many. With `same`, the two images must resemble each other as well.
    """
    distances, places = nearest(generated, real)
    near = distances <= copy_distance(real)
    rows = near.nonzero().flatten()
    if same is not None and len(rows):
        near[rows] = same(rows, places[rows])
    return near


def resemble(images: Tensor, originals: Tensor) -> Tensor:
    """Pixels that correlate by at least 0.9 over the image, bool (n,)."""
    a, b = (x.double().flatten(1) - x.double().flatten(1).mean(dim=1, keepdim=True) for x in (images, originals))
    correlation = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-12)
    return correlation >= COPY_CORRELATION


def copy_distance(real: Tensor) -> Tensor:
    """The distance within which 1 % of the real images have another real one."""
    few = real[:: max(1, -(-len(real) // MOST_FOR_COPIES))]
    return torch.quantile(nearest(few, real, skip_equal=True)[0], COPY_QUANTILE)


def nearest(points: Tensor, others: Tensor, skip_equal: bool = False) -> tuple[Tensor, Tensor]:
    """Distance and number of the nearest other point of each. With `skip_equal` the points are among the others."""
    distances, places, others = [], [], others.double()
    for part in points.double().split(CHUNK):
        found = torch.cdist(part, others, compute_mode="use_mm_for_euclid_dist")
        distance, place = found.kthvalue(2, dim=1) if skip_equal else found.min(dim=1)
        distances.append(distance)
        places.append(place)
    return torch.cat(distances), torch.cat(places)


# Improved precision and recall (Kynkäänniemi et al., 2019): how much of one set lies in the other's neighbourhood.

CHUNK = 1024


def precision_recall(
    real: Tensor, generated: Tensor, k: int = 3, radius_quantile: float = 1.0
) -> tuple[Tensor, Tensor]:
    """For each generated feature whether it lies among the real ones, and the reverse: bool (n,) and bool (m,).

    Their means are precision and recall. The neighbourhood of a set is the union of balls around its features, each
    reaching to the k-th nearest other one. An odd image far from all others has a ball so large that noise fits into
    it, so radii can be cut down to a quantile of all radii; 1 is the definition of Kynkäänniemi et al.
    """
    for name, features in (("real", real), ("generated", generated)):
        if len(features) <= k:
            raise EvaluationError(
                f"precision and recall need more than k = {k} images, and there are {len(features)} {name} ones"
            )
    real, generated = real.double(), generated.double()
    among_real, among_generated = (_radii(features, k, radius_quantile) for features in (real, generated))
    return _covered(generated, real, among_real), _covered(real, generated, among_generated)


def _radii(features: Tensor, k: int, quantile: float) -> Tensor:
    """Distances to the k-th nearest other feature. The nearest one of all is the feature itself."""
    found = torch.cat([torch.cdist(part, features).kthvalue(k + 1, dim=1).values for part in features.split(CHUNK)])
    return found if quantile == 1 else found.clamp_max(found.quantile(quantile))


def _covered(points: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    return torch.cat([(torch.cdist(part, centres) <= radii).any(dim=1) for part in points.split(CHUNK)])


# How far a score would move with other images.

Z = 1.96
"""95 % of a normal distribution lie within this many standard deviations."""


@dataclass(frozen=True)
class Score:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def frechet_score(reference: Moments, features: Tensor) -> Score:
    """The distance ± 1.96 standard errors by the infinitesimal jackknife.

    The interval says what other seeds would give at the same number of images, not at infinitely many.
    """
    value = frechet_distance(reference, Moments.of(features))
    error = Z * float(_influence(reference, features.double()).std()) / len(features) ** 0.5
    return Score(value, max(value - error, 0.0), value + error)


def _influence(reference: Moments, x: Tensor) -> Tensor:
    """How much the distance moves with the weight of each image: its derivative, (n,), up to a constant.

    With X the centred features, S the real covariance and X S^½ / √(n-1) = U diag(s) Vᵀ, the trace of the root is Σ s,
    and its derivative needs (n-1) Σ_k U_ik² s_k alone, also where the covariances are singular.
    """
    n, mean = len(x), x.mean(dim=0)
    centred = x - mean
    seen = centred @ reference.root / (n - 1) ** 0.5
    if n <= x.shape[1]:
        left, values, _ = torch.linalg.svd(seen, full_matrices=False)
        root = left.square() @ values
    else:
        squares, vectors = torch.linalg.eigh(seen.T @ seen)
        values = squares.clamp_min(0).sqrt()
        kept = values > 1e-7 * values.max()
        root = (seen @ vectors[:, kept]).square() @ (1 / values[kept])
    return 2 * centred @ (mean - reference.mean) + centred.square().sum(dim=1) - (n - 1) * root


def share_score(hits: Tensor) -> Score:
    """A share with Wilson's interval, which is what a bootstrap of yes and no tends to, and is right at 0 and 1."""
    n, p = len(hits), float(hits.double().mean())
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * (p * (1 - p) / n + Z**2 / (4 * n**2)) ** 0.5
    return Score(p, min(max(centre - half, 0.0), p), max(min(centre + half, 1.0), p))


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
    """k of precision and recall."""
    radius_quantile: float = 1.0
    """To which quantile their radii are cut down; 1, for not at all, in files of earlier versions."""


@dataclass(frozen=True)
class Anchors:
    """What the same features give for real images (the best that can be had) and for what must score badly.

    Without them a score cannot be read: features exist that find uniform noise as precise as photographs.
    """

    images: int
    """Of each kind; 0 where the data has too few images to measure any."""
    values: dict[str, dict[str, float]]
    """By kind (REAL and the names of BAD), then by the name of the score."""

    @property
    def fault(self) -> str:
        """Why precision and recall mean nothing with these features, or "" if they do."""
        if not self.images:
            return "the data has too few images to hold some apart"
        real, noise = self.values[REAL], self.values[NOISE]
        if not {"precision", "recall"} <= real.keys() & noise.keys():
            return "they were not measured"
        for name in ("precision", "recall"):
            if real[name] < LEAST_REAL:
                return f"held-out real images have {name} {real[name]:.2f} (at least {LEAST_REAL} is needed)"
        if noise["precision"] >= MOST_NOISE:
            return f"uniform noise has precision {noise['precision']:.2f} (below {MOST_NOISE} is needed)"
        # Noise is far from everything, itself included: its wide neighbourhoods may hold some real images.
        if noise["recall"] >= real["recall"] / 2:
            return f"uniform noise has recall {noise['recall']:.2f}, real images {real['recall']:.2f}"
        return ""


REAL, NOISE = "real", "noise"
BAD = (NOISE, "blurred", "shuffled")
"""Uniform noise; blurred by a box of a quarter of the side; the sixteen patches of an image in a random order."""
LEAST_REAL, MOST_NOISE = 0.7, 0.1
LEAST_DETAIL, NEAR = 0.7, 1.5
"""Less fine detail than this share is blurry; within this many times the distance of real images is near."""


@dataclass(frozen=True)
class Evidence:
    """What a score may look at: features of generated images, and those of real ones."""

    features: Tensor
    """Of the generated images, float64 (n, D)."""
    moments: Moments
    """Of all real images."""
    real: Tensor
    """Features of as many real images as generated ones, or all that there are."""
    all_real: Tensor
    """Features of all real images that are kept."""
    anchors: Anchors | None = None
    same: Resemblance | None = None

    @cached_property
    def neighbours(self) -> tuple[Tensor, Tensor] | None:
        """Precision and recall by image; None where the anchors say that these features tell nothing by them."""
        if self.anchors is not None and self.anchors.fault:
            return None
        # As many real as generated ones, so that neither side's neighbourhoods are denser.
        return precision_recall(self.real, self.features[: len(self.real)], NEIGHBOURS, RADIUS_QUANTILE)


NEIGHBOURS = 3
RADIUS_QUANTILE = 0.95
"""One odd image may have a neighbourhood into which noise fits."""

SCORES: dict[str, Callable[[Evidence], Score | None]] = {
    "frechet": lambda seen: frechet_score(seen.moments, seen.features),
    "precision": lambda seen: seen.neighbours and share_score(seen.neighbours[0]),
    "recall": lambda seen: seen.neighbours and share_score(seen.neighbours[1]),
    "copies": lambda seen: share_score(near_copies(seen.all_real, seen.features, seen.same)),
}
"""By the names of SCORE_TITLES. The first is always there."""


@dataclass(frozen=True)
class Scores:
    """The scores of one set of images, with their protocol and with what was scored. `scores.frechet` is an entry."""

    protocol: Protocol
    values: dict[str, Score]
    """By the names of SCORES; those that could not be computed are left out."""
    subject: dict[str, Any]
    """The run and its step, or the folder."""
    anchors: Anchors | None = None
    """None in files of versions that did not measure any."""

    @classmethod
    def of(cls, evidence: Evidence, protocol: Protocol, subject: dict[str, Any]) -> Scores:
        computed = {name: score(evidence) for name, score in SCORES.items()}
        values = {name: score for name, score in computed.items() if score is not None}
        return cls(protocol, values, subject, evidence.anchors)

    def __getattr__(self, name: str) -> Any:
        if name in SCORES:
            return self.values.get(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def rows(self) -> list[dict[str, str]]:
        """One row for each score, with the anchors' values next to it."""
        anchors = self.anchors.values if self.anchors is not None else {}
        return [
            {"": SCORE_TITLES[name], "value": str(score)}
            | {kind: f"{values[name]:.3g}" if name in values else "-" for kind, values in anchors.items()}
            for name, score in self.values.items()
        ]

    def remarks(self) -> list[str]:
        """How the scores were made, and what they cannot say."""
        p = self.protocol
        made = f"{p.images} images against {p.reference_images} of {p.data}, {p.features} features"
        lines = [f"95 % intervals; {made} {p.features_sha256[:12]}", *filter(None, [self.verdict()])]
        if "copies" in self.subject:
            lines.append(copies_text(self.subject["copies"]))
        if self.anchors is None:
            return [*lines, "no anchors were measured, so what noise would score here is unknown"]
        if self.anchors.images:
            lines.append(f"anchors: {self.anchors.images} images of each kind, against the rest of the data")
        if self.anchors.fault:
            lines.append(f"no precision and recall by {p.features} features: {self.anchors.fault}")
        return lines

    def verdict(self) -> str:
        """The scores next to their anchors, in words; "" where there are no anchors."""
        if self.anchors is None or not self.anchors.images:
            return ""
        real, values = self.anchors.values[REAL], self.anchors.values
        distance, detail = self.values["frechet"].value, self.subject.get("detail")
        precision, recall = self.values.get("precision"), self.values.get("recall")
        as_bad = [kind for kind in BAD if distance >= values[kind]["frechet"]]
        words = []
        if detail is not None and not LEAST_DETAIL <= detail <= 1 / LEAST_DETAIL:
            words.append(
                f"{'blurry' if detail < 1 else 'noisy'}, with {detail:.2g} times the fine detail of real images"
            )
        if as_bad:
            words.append(f"no nearer to the data than {' or '.join(as_bad)} images are")
        elif distance > NEAR * real["frechet"]:
            times = distance / max(real["frechet"], 1e-12)
            words.append(f"{times:.1f} times as far from the data as real images are")
        if precision is not None and "precision" in real and precision.low > real["precision"]:
            words.append(
                f"too plain: a precision of {precision.value:.2f} is above that of real images, "
                f"{real['precision']:.2f}, as of blurred or averaged ones"
            )
        if recall is not None and "recall" in real and recall.high < real["recall"] / 2:
            words.append(f"of little variety: recall {recall.value:.2f}, real images {real['recall']:.2f}")
        return f"verdict: {'; '.join(words) or 'near the real ones'}"

    def to_dict(self) -> dict[str, Any]:
        scores = {name: asdict(self.values[name]) if name in self.values else None for name in SCORES}
        anchors = None if self.anchors is None else asdict(self.anchors)
        return {"protocol": asdict(self.protocol), **scores, "subject": self.subject, "anchors": anchors}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Scores:
        scores = {name: Score(**values[name]) for name in SCORES if values.get(name) is not None}
        if "frechet" not in scores:
            raise EvaluationError("stored scores lack frechet: they are damaged, remove the line")
        anchors = Anchors(**values["anchors"]) if values.get("anchors") else None
        return cls(Protocol(**values["protocol"]), scores, values["subject"], anchors)

    def __str__(self) -> str:
        # Where the picture is belongs on the screen, and not into the cards of exported models.
        picture = self.subject.get("copies", {}).get("picture")
        shown = [f"samples next to their nearest training images: {picture}"] if picture else []
        return "\n".join([text_table(self.rows(), left=("", "value"), rule=False), *self.remarks(), *shown])


def copies_text(copies: Mapping[str, Any]) -> str:
    """Does it copy its training images? The baseline are images that it was not trained on."""
    text = f"near-copies of training images: {copies['samples']:.1%} of the samples"
    if copies.get("held_out") is not None:
        text += f", {copies['held_out']:.1%} of {copies['held_out_images']} held-out images"
    return text


def require_comparable(scores: Sequence[Scores]) -> None:
    """Raises ProtocolMismatchError, which shows every difference."""
    for other in scores[1:]:
        pairs = {name: (value, getattr(other.protocol, name)) for name, value in asdict(scores[0].protocol).items()}
        pairs.pop("data")  # a path may differ where the fingerprint is equal
        different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if different:
            shown = "\n".join(f"  {name}: {a!r} and {b!r}" for name, (a, b) in different.items())
            raise ProtocolMismatchError(
                f"{_title(scores[0])} and {_title(other)} were scored in different ways and cannot be compared:\n"
                f"{shown}\nScore both with the same options"
            )


def comparison(scores: Sequence[Scores]) -> str:
    """A table, best Fréchet distance first."""
    require_comparable(scores)
    return text_table(comparison_rows(scores), left=True, rule=False)


def comparison_rows(scores: Sequence[Scores]) -> list[dict[str, str]]:
    """One row for each and one for each anchor; a score that only some have is "-" for the others."""
    names = [name for name in SCORES if any(name in entry.values for entry in scores)]
    rows = [
        {"": _title(entry)} | {SCORE_TITLES[name]: str(entry.values.get(name, "-")) for name in names}
        for entry in sorted(scores, key=lambda entry: entry.values["frechet"].value)
    ]
    # Protocols are equal, so the anchors of one are those of all.
    anchors = next((entry.anchors for entry in scores if entry.anchors is not None), None)
    for kind, values in (anchors.values if anchors is not None else {}).items():
        cells = {SCORE_TITLES[name]: f"{values[name]:.4g}" if name in values else "-" for name in names}
        rows.append({"": f"({kind} images)" if kind != NOISE else "(noise)"} | cells)
    return rows


def _title(scores: Scores) -> str:
    subject = scores.subject
    step = f" step {subject['step']}" if "step" in subject else ""
    tuned = f" tuned {subject['scaling']}" if "scaling" in subject else ""
    return f"{subject.get('run') or subject.get('folder')}{step}{tuned}"
