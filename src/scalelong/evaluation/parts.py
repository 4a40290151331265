"""Labelled images in three parts: to fit, to choose on, and to test. Class by class, by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import ImageData, load_data, to_float
from ..diffusion.latents import sample_latents
from ..errors import InvalidConfigError, InvalidSamplesError, LabelError
from ..randomness import generator

LEAST_IMAGES, LEAST_IN_PART = 30, 3
"""Images of each class in all, and in each of the parts for fitting, choosing and testing."""
SHARES = (0.6, 0.2, 0.2)
"""Of one data set: to fit, to choose on, to test."""

Data = ImageData | tuple[Tensor, Tensor] | str


@dataclass(frozen=True)
class Labelled:
    name: str
    x0: Tensor
    labels: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """All images, and the rows of each part."""

    name: str
    x0: Tensor
    labels: Tensor
    classes: int
    fit: Tensor
    validation: Tensor
    test: Tensor
    apart: bool
    """Whether choosing and testing use images that were given as held out."""


def split(data: Labelled, held_out: Labelled | None, most: int | None, seed: int) -> Parts:
    """Class by class, so that every part has all of them in their proportions."""
    _require_classes(data, held_out)
    source = generator(seed, "probe split")
    if held_out is None:
        rows = _divided(_limited(data.labels, None if most is None else 2 * most, source), data.labels, SHARES, source)
        parts, x0, labels = [row[:most] for row in rows], data.x0, data.labels
    else:
        fit = _limited(data.labels, most, source)
        rest = _limited(held_out.labels, None if most is None else 2 * most, source)
        halves = _divided(rest, held_out.labels, (0.5, 0.5), source)
        parts = [fit, *(half + len(data.labels) for half in halves)]
        x0, labels = torch.cat([data.x0, held_out.x0]), torch.cat([data.labels, held_out.labels])
    # What no part uses is not run through the network.
    used, order = torch.cat(parts).sort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    fit, validation, test = place.split([len(part) for part in parts])
    found = Parts(
        data.name, x0[used], labels[used], len(data.classes), fit, validation, test, apart=held_out is not None
    )
    for part, rows in {"fit": fit, "choose on": validation, "test": test}.items():
        counts = torch.bincount(found.labels[rows], minlength=found.classes)
        if int(counts.min()) < LEAST_IN_PART:
            rare = int(counts.argmin())
            raise InvalidSamplesError(
                f"class {data.classes[rare]!r} has {int(counts[rare])} images to {part}, and at least {LEAST_IN_PART} "
                f"are needed: give more images of it, or of all (--images, --held-out)"
            )
    return found


def _require_classes(data: Labelled, held_out: Labelled | None) -> None:
    if len(data.classes) < 2:
        raise LabelError(f"{data.name} has {len(data.classes)} classes: there is nothing to tell apart")
    if held_out is not None and held_out.classes != data.classes:
        raise LabelError(
            f"the held-out images have other classes than {data.name}: {', '.join(held_out.classes[:10])} and "
            f"{', '.join(data.classes[:10])}"
        )
    counts = torch.bincount(data.labels, minlength=len(data.classes))
    if held_out is not None:
        counts = counts + torch.bincount(held_out.labels, minlength=len(data.classes))
    if int(counts.min()) < LEAST_IMAGES:
        rare = int(counts.argmin())
        raise InvalidSamplesError(
            f"class {data.classes[rare]!r} of {data.name} has {int(counts[rare])} images, and a probe needs at least "
            f"{LEAST_IMAGES} of each class: give more, or leave that class out"
        )


def _limited(labels: Tensor, most: int | None, source: torch.Generator) -> Tensor:
    """At most so many rows, of all classes in their proportions, in random order."""
    order = torch.randperm(len(labels), generator=source)
    if most is None or len(labels) <= most:
        return order
    # Row by row: the k-th image of a class of n stands at (k + ½) / n.
    places = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        rows = order[labels[order] == label]
        places[rows] = (torch.arange(len(rows)) + 0.5).double() / len(rows)
    return order[places[order].argsort(stable=True)[:most]]


def _divided(rows: Tensor, labels: Tensor, shares: Sequence[float], source: torch.Generator) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in shares]
    for label in labels[rows].unique():
        own = rows[labels[rows] == label]
        bounds = [round(sum(shares[: number + 1]) * len(own)) for number in range(len(shares))]
        for part, piece in zip(parts, own.tensor_split(bounds[:-1]), strict=True):
            part.append(piece)
    joined = [torch.cat(part) for part in parts]
    return [part[torch.randperm(len(part), generator=source)] for part in joined]


def labelled(data: Data) -> Labelled:
    if isinstance(data, str):
        data = load_data(data)
    if isinstance(data, ImageData):
        if data.annotations.labels is None or data.classes is None:
            raise LabelError(
                f"a probe needs labels, and {data.name!r} has none: put the images of each class in a folder of its "
                f"own, or give --data with labels"
            )
        batch = data.fetch(torch.arange(len(data)))
        assert batch.labels is not None
        return Labelled(data.name, _clean(batch.images), batch.labels.long(), data.classes)
    try:
        images, labels = data
    except (TypeError, ValueError) as error:
        raise InvalidConfigError(
            f"data must be a data set, its name, or a pair (images, labels), got {type(data).__name__}"
        ) from error
    if not isinstance(images, Tensor) or images.dim() < 2:
        raise InvalidConfigError("images must be a tensor with one row per image, uint8 or floats in [-1, 1]")
    if not isinstance(labels, Tensor) or labels.shape != images.shape[:1] or labels.is_floating_point():
        raise LabelError(f"labels must be whole numbers, one for each of the {len(images)} images")
    labels = labels.long().cpu()
    if len(labels) and int(labels.min()) < 0:
        raise LabelError(f"labels must be whole numbers from 0, got {int(labels.min())}")
    count = int(labels.max()) + 1 if len(labels) else 0
    x0 = to_float(images.cpu()) if images.dtype == torch.uint8 else images.cpu().float()
    return Labelled("the given images", x0, labels, tuple(map(str, range(count))))


def _clean(images: Tensor) -> Tensor:
    """x_0 as the network would see it without noise: pixels, or the means of latents."""
    return sample_latents(images) if images.is_floating_point() else to_float(images)
