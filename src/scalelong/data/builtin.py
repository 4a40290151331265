"""Data sets that come with the package: digits, photographs of garments, portraits in colour, and drawn shapes.

Digits and garments are there with captions, too.

Shapes are drawn: "a red circle at the top left". Image i is a pure function of i and a seed.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files

import torch
from torch import Tensor

from ..errors import DataNotFoundError, InvalidConfigError
from ..optional import needs
from .dataset import Annotations, ImageData, MemoryData, Options, from_array
from .decode import convert_channels
from .folders import canonical

DIGITS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
PORTRAITS = ("adventurer", "big smile", "persona", "pixel art", "toon")


EMBEDDED = {
    "digits": ("digits.npz", DIGITS),  # 1797 handwritten digits, 8×8, gray (digits.md)
    "garments": ("garments.npz", GARMENTS),  # 2000 of Fashion-MNIST, 16×16, gray (garments.md): deep networks break
    "portraits": ("portraits.npz.xz", PORTRAITS),  # 6000 drawn faces in colour, 32×32, in five styles (portraits.md)
}

# The first two with captions, several wordings of each class, for networks that draw from a text.
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GARMENT_WORDS = (
    *("a t-shirt", "trousers", "a pullover", "a dress", "a coat"),
    *("a sandal", "a shirt", "a sneaker", "a bag", "an ankle boot"),
)
WORDINGS = {
    "captioned-digits": [(word, f"the digit {i}", f"a handwritten {word}") for i, word in enumerate(NUMBER_WORDS)],
    "captioned-garments": [
        (phrase.removeprefix("a ").removeprefix("an "), phrase, f"a photograph of {phrase}") for phrase in GARMENT_WORDS
    ],
}


def load_embedded(name: str, options: Options) -> ImageData:
    """A set of EMBEDDED; in one of WORDINGS image i has wording i of its class, in turn."""
    if options.split != "train":
        raise DataNotFoundError(
            f"{name!r} has no part {options.split!r}: all of it is 'train'. Use data.split(held_out=...) to keep some "
            "images apart"
        )
    np = needs("numpy", "train", "reading the embedded images")
    file, classes = EMBEDDED[name.removeprefix("captioned-")]
    content = files("scalelong.data").joinpath(file).read_bytes()
    if file.endswith(".xz"):
        content = lzma.decompress(content)
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).to(torch.int64)
    images = images if images.ndim == 4 else images[:, None]  # without an axis of channels they are gray
    data = from_array(name, images, Annotations(labels, classes), options)
    if name in WORDINGS and data.annotations.labels is not None:
        wordings, labels = WORDINGS[name], data.annotations.labels.tolist()
        captions = [wordings[label][row % 3] for row, label in enumerate(labels)]
        data.annotations = replace(data.annotations, captions=captions)
    return data


# Drawn shapes. The distance to an outline is known in closed form: a mask is one formula for a whole batch.

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


def _cross(x: Tensor, y: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x.abs() - 1, y.abs() - 0.32), torch.maximum(x.abs() - 0.32, y.abs() - 1))


# Distance to the outline, negative inside, for a shape of radius 1; y grows downwards.
SHAPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda x, y: torch.hypot(x, y) - 1,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.85,
    # Three half planes: below the two slanted sides, above the base.
    "triangle": lambda x, y: torch.maximum(0.866 * x.abs() - 0.5 * y - 0.5, y - 0.6) - 0.1,
    "cross": _cross,
    "ring": lambda x, y: (torch.hypot(x, y) - 0.8).abs() - 0.22,
}
CLASSES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def load_shapes(name: str, options: Options) -> ImageData:
    """10,000 pictures, 32×32 unless asked otherwise; with a larger `limit`, that many. Each part has its own seed."""
    part = canonical(options.split)
    if part not in SEEDS:
        raise DataNotFoundError(
            f"{name!r} has no part {options.split!r}; it has {', '.join(SEEDS)}: choose one with `split`"
        )
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"shapes are drawn with 3 channels, which cannot become {options.channels}: leave `channels` out"
        )
    height, width = options.shape or (32, 32)
    numbers, seed = torch.arange(options.limit or COUNT), SEEDS[part]
    tables = [list(known) for known in (COLOURS, SHAPES, PLACES)]
    kinds = [_bits(numbers, seed, stream) % len(known) for stream, known in enumerate(tables)]
    captions = [
        "a {} {} at the {}".format(*(known[number] for known, number in zip(tables, three, strict=True)))
        for three in torch.stack(kinds, dim=1).tolist()
    ]
    about = Annotations(kinds[0] * len(SHAPES) + kinds[1], CLASSES, captions)
    drawn = [
        convert_channels(_drawn(rows, [kind[rows] for kind in kinds], seed, height, width), options.channels or 3)
        for rows in numbers.split(512)
    ]
    return MemoryData(name, torch.cat(drawn), about)


def _drawn(rows: Tensor, kinds: list[Tensor], seed: int, height: int, width: int) -> Tensor:
    """The pictures with these numbers, uint8 (B, 3, H, W)."""
    colour, shape, place = kinds
    middles = torch.tensor(list(PLACES.values()))[place]
    down, right, growth = (_uniform(rows, seed, stream) for stream in (3, 4, 5))
    row = (middles[:, 0] + JITTER * (2 * down - 1)) * height
    column = (middles[:, 1] + JITTER * (2 * right - 1)) * width
    radius = (RADIUS[0] + (RADIUS[1] - RADIUS[0]) * growth) * min(height, width)
    row, column, radius = (value.view(-1, 1, 1) for value in (row, column, radius))
    y = (torch.arange(height)[None, :, None] + 0.5 - row) / radius
    x = (torch.arange(width)[None, None, :] + 0.5 - column) / radius
    covered = torch.empty(len(rows), 1, height, width)  # the share of each pixel
    for number, distance in enumerate(SHAPES.values()):
        of_this = shape == number
        outline = distance(x[of_this], y[of_this]) * radius[of_this]
        covered[of_this, 0] = (0.5 - outline).clamp(0, 1)
    ink = torch.tensor(list(COLOURS.values()), dtype=torch.float32)[colour][:, :, None, None]
    paper = torch.tensor(BACKGROUND, dtype=torch.float32)[None, :, None, None]
    return (covered * ink + (1 - covered) * paper).round().to(torch.uint8)


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
