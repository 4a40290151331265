"""What a picture of the drawn shapes shows, by a rule: no network, nothing that was trained.

The colour is the one whose line from the background comes closest to all pixels. Along it, the picture becomes a mask,
and the shape is that of the nearest mask among all places and sizes that the data set draws.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..data.shapes import BACKGROUND, COLOURS, JITTER, PLACES, RADIUS, SHAPES, shape_mask
from ..errors import InvalidSamplesError


def shapes_in(images: Tensor) -> list[tuple[str, str, str]]:
    """(colour, shape, place) of each picture, uint8 (B, 3, H, W)."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise InvalidSamplesError(f"pictures must be uint8 (B, 3, H, W), got {images.dtype} {tuple(images.shape)}")
    colours, masks = _colours(images)
    templates, names = _templates(images.shape[2], images.shape[3])
    nearest = torch.cdist(masks.flatten(1), templates).argmin(dim=1)
    return [(list(COLOURS)[c], *names[t]) for c, t in zip(colours.tolist(), nearest.tolist(), strict=True)]


def shows_colour_and_shape(images: Tensor, captions: Sequence[str]) -> Tensor:
    """Whether each picture has the colour and the shape of its caption: bool (B,)."""
    hits = []
    for (colour, shape, _), caption in zip(shapes_in(images), captions, strict=True):
        words = re.findall(r"\w+", caption.lower())
        hits.append(colour in words and shape in words)
    return torch.tensor(hits)


def _colours(images: Tensor) -> tuple[Tensor, Tensor]:
    """The colour of each picture, and its mask with that colour."""
    background = torch.tensor(BACKGROUND, dtype=torch.float32)
    directions = torch.tensor(list(COLOURS.values()), dtype=torch.float32) - background
    pixels = (images.float() - background[:, None, None]).flatten(2)  # (B, 3, P)
    masks = torch.einsum("kc,bcp->bkp", directions / directions.square().sum(1, keepdim=True), pixels).clamp(0, 1)
    errors = (masks[:, :, None] * directions[None, :, :, None] - pixels[:, None]).square().sum(dim=(2, 3))
    best = errors.argmin(dim=1)
    chosen = masks[torch.arange(len(images)), best]
    return best, chosen.unflatten(1, images.shape[2:])


@cache
def _templates(height: int, width: int) -> tuple[Tensor, list[tuple[str, str]]]:
    """Masks of every shape at every place, a little shifted and in several sizes."""
    shifts = torch.linspace(-JITTER, JITTER, 3).tolist()
    radii = [RADIUS[0] + (RADIUS[1] - RADIUS[0]) * share for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    masks, names = [], []
    for shape in SHAPES:
        for place, (row, column) in PLACES.items():
            spots = [(row + down, column + right, radius) for down in shifts for right in shifts for radius in radii]
            rows, columns, sizes = torch.tensor(spots).unbind(1)
            drawn = shape_mask(shape, height, width, rows * height, columns * width, sizes * min(height, width))
            masks.append(drawn.flatten(1))
            names += [(shape, place)] * len(spots)
    return torch.cat(masks), names
