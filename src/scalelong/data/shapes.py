"""Drawn shapes with captions: "a red circle at the top left". Image i is a pure function of i and a seed.

The distance to the outline is known in closed form, so a mask is one formula for a whole batch, with smooth edges; a
judge can use the same masks, colours and places to tell what a picture shows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..errors import InvalidConfigError, InvalidSamplesError, UnknownSplitError
from .arrays import convert_channels
from .dataset import Annotations, BrokenImages, ImageData, MemoryData, Options
from .files import canonical

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 170, 50),
    "blue": (40, 70, 230),
    "yellow": (240, 200, 20),
    "purple": (150, 40, 190),
    "black": (20, 20, 20),
}
BACKGROUND = (255, 255, 255)

# (row, column) of the middle, as shares of the height and of the width.
PLACES: dict[str, tuple[float, float]] = {
    "top left": (0.27, 0.27),
    "top": (0.27, 0.5),
    "top right": (0.27, 0.73),
    "left": (0.5, 0.27),
    "centre": (0.5, 0.5),
    "right": (0.5, 0.73),
    "bottom left": (0.73, 0.27),
    "bottom": (0.73, 0.5),
    "bottom right": (0.73, 0.73),
}
RADIUS = (0.18, 0.24)  # smallest and largest, as shares of the shorter side
JITTER = 0.03  # how far a middle may lie from its place
COUNT = 10_000
SEEDS = {"train": 0, "test": 1, "validation": 2}


def _circle(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 1


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.85


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    # Three half planes: below the two slanted sides, above the base.
    return torch.maximum(0.866 * x.abs() - 0.5 * y - 0.5, y - 0.6) - 0.1


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x.abs() - 1, y.abs() - 0.32), torch.maximum(x.abs() - 0.32, y.abs() - 1))


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.8).abs() - 0.22


# Distance to the outline, negative inside, for a shape of radius 1; y grows downwards.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "ring": _ring,
}
CLASSES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def caption(colour: str, shape: str, place: str) -> str:
    return f"a {colour} {shape} at the {place}"


def shape_mask(
    shape: str, height: int, width: int, row: Tensor | float, column: Tensor | float, radius: Tensor | float
) -> Tensor:
    """How much of each pixel the shape covers, (B, height, width) in [0, 1]; places and radius in pixels."""
    rows, columns, radii = (
        torch.as_tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (row, column, radius)
    )
    y = (torch.arange(height)[None, :, None] + 0.5 - rows) / radii
    x = (torch.arange(width)[None, None, :] + 0.5 - columns) / radii
    return (0.5 - SHAPES[shape](x, y) * radii).clamp(0, 1)


def draw_shape(
    colour: str,
    shape: str,
    place: str,
    size: int | tuple[int, int] = 32,
    radius: float = 0.2,
    shift: tuple[float, float] = (0, 0),
) -> Tensor:
    """One picture, uint8 (3, H, W); radius and shift (down, right) as shares of the size."""
    for kind, name, known in (("colour", colour, COLOURS), ("shape", shape, SHAPES), ("place", place, PLACES)):
        if name not in known:
            raise InvalidConfigError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    height, width = (size, size) if isinstance(size, int) else size
    row, column = PLACES[place][0] + shift[0], PLACES[place][1] + shift[1]
    mask = shape_mask(shape, height, width, row * height, column * width, radius * min(height, width))
    return _paint(mask, torch.tensor([COLOURS[colour]]))[0]


def _paint(mask: Tensor, colour: Tensor) -> Tensor:
    background = torch.tensor(BACKGROUND, dtype=torch.float32)[None, :, None, None]
    mask = mask[:, None]
    return (mask * colour.to(torch.float32)[:, :, None, None] + (1 - mask) * background).round().to(torch.uint8)


class DrawnShapes(ImageData):
    """Shapes drawn when fetched."""

    in_memory = False

    def __init__(self, name: str, rows: Tensor, seed: int, channels: int, height: int, width: int) -> None:
        self.name, self._rows, self._seed = name, rows, seed
        self.channels, self.height, self.width = channels, height, width
        self._colour = _choice(rows, seed, 0, len(COLOURS))
        self._shape = _choice(rows, seed, 1, len(SHAPES))
        self._place = _choice(rows, seed, 2, len(PLACES))
        colours, shapes, places = list(COLOURS), list(SHAPES), list(PLACES)
        chosen = zip(self._colour.tolist(), self._shape.tolist(), self._place.tolist(), strict=True)
        captions = [caption(colours[colour], shapes[shape], places[place]) for colour, shape, place in chosen]
        self.broken_images = BrokenImages(name, len(rows), 0)
        self.annotations = Annotations(self._colour * len(SHAPES) + self._shape, CLASSES, captions)

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        numbers, shapes = self._rows[rows], self._shape[rows]
        middles = torch.tensor(list(PLACES.values()))[self._place[rows]]
        down, right, growth = (_uniform(numbers, self._seed, stream) for stream in (3, 4, 5))
        row = (middles[:, 0] + JITTER * (2 * down - 1)) * self.height
        column = (middles[:, 1] + JITTER * (2 * right - 1)) * self.width
        radius = (RADIUS[0] + (RADIUS[1] - RADIUS[0]) * growth) * min(self.height, self.width)
        mask = torch.empty(len(rows), self.height, self.width)
        for number, shape in enumerate(SHAPES):
            of_this = shapes == number
            mask[of_this] = shape_mask(shape, self.height, self.width, row[of_this], column[of_this], radius[of_this])
        images = _paint(mask, torch.tensor(list(COLOURS.values()))[self._colour[rows]])
        return convert_channels(images, self.channels), rows

    def _take(self, rows: Tensor) -> DrawnShapes:
        return DrawnShapes(self.name, self._rows[rows], self._seed, self.channels, self.height, self.width)

    def _pixel_digest(self) -> str:
        settings = f"shapes {self._seed} {COLOURS} {PLACES} {RADIUS} {JITTER} {list(SHAPES)}"
        return hashlib.sha256(settings.encode() + self._rows.numpy().tobytes()).hexdigest()


def load_shapes(name: str, options: Options) -> ImageData:
    """10,000 pictures, 32×32 unless asked otherwise; with a larger `limit`, that many. Each part has its own seed."""
    part = canonical(options.split) or options.split
    if part not in SEEDS:
        raise UnknownSplitError(
            f"{name!r} has no part {options.split!r}; it has {', '.join(SEEDS)}: choose one with `split`"
        )
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"shapes are drawn with 3 channels, which cannot become {options.channels}: leave `channels` out"
        )
    height, width = options.shape or (32, 32)
    drawn = DrawnShapes(name, torch.arange(options.limit or COUNT), SEEDS[part], options.channels or 3, height, width)
    if not options.fits(len(drawn), drawn.channels, height, width):
        return drawn
    images = torch.cat([drawn.fetch(rows).images for rows in torch.arange(len(drawn)).split(512)])
    return MemoryData(name, images, drawn.annotations)


def _bits(rows: Tensor, seed: int, stream: int) -> Tensor:
    """53 random bits for each row: splitmix64, in wrapping int64 arithmetic."""
    state = (rows * 8 + stream + 1) * -7046029254386353131 + seed * 0x632BE59BD9B4E019
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        state = (state ^ _shifted(state, shift)) * factor
    return _shifted(state ^ _shifted(state, 31), 11)


def _shifted(state: Tensor, by: int) -> Tensor:
    """A logical shift to the right; `>>` would copy the sign."""
    return (state >> by) & ((1 << (64 - by)) - 1)


def _uniform(rows: Tensor, seed: int, stream: int) -> Tensor:
    return (_bits(rows, seed, stream).to(torch.float64) / 2**53).to(torch.float32)


def _choice(rows: Tensor, seed: int, stream: int, count: int) -> Tensor:
    return _bits(rows, seed, stream) % count


# Recognising drawn shapes, without a network: the colour is the one whose line from the background comes closest to all
# pixels. Along it the image becomes a mask, and the shape is that of the nearest mask among all places and sizes.


def shapes_in(images: Tensor) -> list[tuple[str, str, str]]:
    """(colour, shape, place) of each image, uint8 (B, 3, H, W)."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise InvalidSamplesError(f"images must be uint8 (B, 3, H, W), got {images.dtype} {tuple(images.shape)}")
    colours, masks = _colours(images)
    templates, names = _templates(images.shape[2], images.shape[3])
    nearest = torch.cdist(masks.flatten(1), templates).argmin(dim=1)
    return [(list(COLOURS)[c], *names[t]) for c, t in zip(colours.tolist(), nearest.tolist(), strict=True)]


def shows_colour_and_shape(images: Tensor, captions: Sequence[str]) -> Tensor:
    """Whether each image has the colour and the shape of its caption: bool (B,)."""
    hits = []
    for (colour, shape, _), caption in zip(shapes_in(images), captions, strict=True):
        words = re.findall(r"\w+", caption.lower())
        hits.append(colour in words and shape in words)
    return torch.tensor(hits)


def _colours(images: Tensor) -> tuple[Tensor, Tensor]:
    """The colour of each image, and its mask with that colour."""
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
