"""How step time and peak memory grow with the size of the network: exponents of a power law."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..contender import Contender, race
from ..contenders import TRAINER, UNET_IMPORTS
from ..record import Result, Spread, Table
from ..settings import SMALL_UNET, TINY_UNET, Settings, UNetSize, UViTSize

BASE = UViTSize(image=16, patch=2, dim=128, depth=8, heads=4, batch=16)
HEAD = 32
"""Channels of a head, at every width."""
QUICK_SIZES = 2
LEVELS = 4
COLUMNS = {"time per step": "seconds", "peak memory": "bytes"}
NOTE = "In a U-ViT the number of long skips is half the depth."


def uvit(axis: str, values: Sequence[int], rounds: int, settings: Settings) -> Result:
    if settings.quick:
        values = values[:QUICK_SIZES]
    contenders = [Contender(str(value), TRAINER, uvit_at(axis, value).ours()) for value in values]
    base = f"U-ViT, dim {BASE.dim}, depth {BASE.depth}, {BASE.tokens} tokens, batch {BASE.batch}"
    sizes = [uvit_at(axis, value).tokens if axis == "tokens" else value for value in values]
    return _result(f"{base}, but for the {axis}", axis, contenders, sizes, rounds, settings)


def uvit_at(axis: str, value: int) -> UViTSize:
    """The base with one size changed; tokens are counted by the side of the image, in patches."""
    changes: dict[str, dict[str, Any]] = {
        "depth": {"depth": value},
        "tokens": {"image": value * BASE.patch},
        "width": {"dim": value, "heads": value // HEAD},
        "batch": {"batch": value},
    }
    return replace(BASE, **changes[axis])


def skips(layers: Sequence[int], rounds: int, settings: Settings) -> Result:
    base: UNetSize = TINY_UNET if settings.quick else SMALL_UNET
    layers = layers[:QUICK_SIZES] if settings.quick else layers
    sizes = [LEVELS * (count + 1) for count in layers]
    contenders = [
        Contender(str(size), TRAINER, replace(base, layers=count).ours(), imports=UNET_IMPORTS)
        for size, count in zip(sizes, layers, strict=True)
    ]
    title = f"{base.describe()}: 1 to {layers[-1]} layers and long skips in each of its {LEVELS} levels"
    return _result(title, "long skips", contenders, sizes, rounds, settings)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size), by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return products / sum((a - x_mean) ** 2 for a in x)


def _result(
    title: str, axis: str, contenders: list[Contender], sizes: Sequence[int], rounds: int, settings: Settings
) -> Result:
    found = race(contenders, settings, rounds)
    names = [contender.name for contender in contenders]
    rows = [[size, found.time(name), found.memory[name]] for size, name in zip(sizes, names, strict=True)]
    by_round = list(zip(*(found.seconds[name] for name in names), strict=True))
    time = Spread.of([exponent(sizes, values) for values in by_round])
    last = Spread.of([exponent(sizes[-2:], values[-2:]) for values in by_round])
    memory = [found.memory[name] for name in names]
    exponents = [
        ["time, all sizes", time],
        ["time, last two sizes", last],
        ["memory, all sizes", exponent(sizes, memory)],
        ["memory, last two sizes", exponent(sizes[-2:], memory[-2:])],
    ]
    tables = [
        Table(title, {axis: "count", **COLUMNS}, rows),
        Table(
            f"Exponents: time or memory ~ {axis}^p", {"": "text", "p": "times"}, exponents, [NOTE] * (axis == "depth")
        ),
    ]
    return Result(tables, {"seconds": found.seconds, "memory": found.memory, "sizes": list(sizes)})


CASES = {
    "depth": partial(uvit, "depth", (4, 8, 12, 16, 24), 9),
    "tokens": partial(uvit, "tokens", (4, 8, 12, 16, 24), 9),
    "width": partial(uvit, "width", (64, 128, 192, 256, 384), 9),
    "batch": partial(uvit, "batch", (4, 8, 16, 32, 64), 9),
    "skips": partial(skips, (1, 2, 3, 4), 9),
}
