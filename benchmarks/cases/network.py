"""`sl.UViT` in anybody's own loop, against a U-ViT of stock modules: LayerNorm, Linear, SDPA, GELU, concatenation."""

import sys
from contextlib import ExitStack
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from scalelong.console import Progress

from ..contender import Contender, Worker
from ..contenders import PLAIN_RACES
from ..record import Result, Spread, Table, ratios
from ..settings import BenchmarkError, Settings, UViTSize

TOLERANCE = 1e-4
"""Largest difference between the outputs of both networks, as a share of the largest output."""
LARGEST = 100e9
"""Additions and multiplications of a training step, above which a size of the grid is left out."""
COLUMNS = {
    "": "text",
    "threads": "count",
    "training, ours": "seconds",
    "training, times as fast": "times",
    "at most": "times",
    "inference, ours": "seconds",
    "inference, times as fast": "times",
    "at most ": "times",
}


def size_of(dim: int, depth: int, tokens: int, batch: int) -> UViTSize:
    side = round((tokens - 1) ** 0.5)
    heads = max(1, dim // (32 if dim < 512 else 64))
    return UViTSize(image=2 * side, patch=2, dim=dim, depth=depth, heads=heads, batch=batch)


def operations(size: UViTSize) -> float:
    """Of the products in a training step: 12 D² for each token of a block, 2 D² for that of a merge, thrice."""
    return 3 * 2 * 13 * size.dim**2 * size.depth * size.tokens * size.batch


SMALL = [size_of(*each) for each in ((32, 4, 17, 1), (32, 40, 17, 4), (48, 6, 17, 16), (64, 8, 17, 8), (64, 24, 17, 8))]
MIDDLE = [size_of(*each) for each in ((96, 8, 17, 64), (96, 12, 65, 16), (128, 12, 65, 8), (192, 8, 17, 64))]
LARGE = [size_of(*each) for each in ((256, 4, 257, 2), (512, 4, 17, 1), (512, 12, 257, 1))]
GRID = [size_of(*each) for each in product((32, 64, 128, 256, 512), (4, 12, 40), (17, 65, 257), (1, 8, 32, 128))]
TINY = [size_of(32, 4, 17, 1)]


def against_plain(sizes: list[UViTSize], rounds: int, seconds: float, settings: Settings) -> Result:
    sizes = TINY if settings.quick else sizes
    measured = [size for size in sizes if operations(size) <= LARGEST]
    threads = sorted({1, settings.threads})
    found = {count: _races(measured, settings.rounds_or(rounds), seconds, count) for count in threads}
    rows: list[list[Any]] = []
    for count, races in found.items():
        for size, training, inference in zip(measured, races[::2], races[1::2], strict=True):
            rows.append([size.describe(), count, *_cells(training, count), *_cells(inference, count)])
    largest = max(race["difference"] for races in found.values() for race in races)
    if not largest <= TOLERANCE:
        raise BenchmarkError(
            f"both networks differ by {largest:.1e} of the largest output with the same weights, more than "
            f"{TOLERANCE:.0e}: their speeds cannot be compared"
        )
    notes = [
        "One process, the networks in turns; the same loop and fused AdamW for both. Processor time with one thread, "
        "the clock on the wall with several. Above 1 ours is the faster.",
        "At most: if all of a plain step were free but its products, attention, GELU and norms, which both call; on "
        "one thread.",
        f"With the same weights both networks' outputs differ by at most {largest:.0e} of the largest.",
    ]
    if len(measured) < len(sizes):
        notes.append(f"{len(sizes) - len(measured)} sizes of more than {LARGEST / 1e9:.0f} GFLOP a step are left out.")
    table = Table("UViT against a U-ViT of stock modules, in a plain loop", COLUMNS, rows, notes)
    return Result([table], {"races": {str(count): races for count, races in found.items()}})


def _races(sizes: list[UViTSize], rounds: int, seconds: float, threads: int) -> list[dict[str, Any]]:
    given = {"sizes": [size.network() for size in sizes], "rounds": rounds, "seconds": seconds}
    contender = Contender("both networks", PLAIN_RACES, given)
    return run_races(contender, 2 * len(sizes), threads, f"races with {threads} thread(s)")


def run_races(contender: Contender, count: int, threads: int, title: str) -> list[dict[str, Any]]:
    """So many races, one after the other, in one process."""
    with ExitStack() as stack:
        worker = Worker(contender, threads)
        stack.callback(worker.close)
        worker.wait_until_built()
        progress = Progress(title, count, stream=sys.stderr)
        for number in range(count):
            worker.turn(1)
            progress(number + 1)
        return worker.ask("found")


def _cells(race: dict[str, Any], threads: int) -> tuple[Spread, Spread, float | None]:
    seconds = race["seconds"]
    # Kernels are timed on one thread.
    bound = max(1.0, median(seconds["plain"]) / race["kernels"]) if threads == 1 else None
    return Spread.of(seconds["ours"]), Spread.of(ratios(seconds["plain"], seconds["ours"])), bound


CASES = {
    "small": partial(against_plain, SMALL, 60, 4.0),
    "middle": partial(against_plain, MIDDLE, 30, 4.0),
    "large": partial(against_plain, LARGE, 20, 4.0),
    "grid": partial(against_plain, GRID, 20, 3.0),
}
