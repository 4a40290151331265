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
LOW_COLUMNS = {name: kind for name, kind in COLUMNS.items() if name.strip() != "at most"}
"""In bf16 the attention of both is another kernel, so that the kernels of one do not bound the other."""
GRID_COLUMNS = {
    "": "text",
    "threads": "count",
    "sizes": "count",
    "training, times as fast": "times",
    "inference, times as fast": "times",
}
SLOWER_COLUMNS = {"": "text", "threads": "count", "what": "text", "times as fast": "times"}
TITLE = "UViT against a U-ViT of stock modules, in a plain loop"
TURNS = (
    "One process, the networks in turns; the same loop and fused AdamW for both. Processor time with one thread, the "
    "clock on the wall with several. Above 1 ours is the faster."
)
BOUND = (
    "At most: if all of a plain step were free but its products, attention, GELU and norms, which both call; on one "
    "thread."
)
Race = dict[str, Any]
Found = dict[int, list[Race]]
"""Races by the number of threads: training and inference of each size in turn."""
KERNELS = ("matrix products", "attention", "GELU", "norms")
"""Groups of operations that both networks have to compute. They bound how much faster one can be that calls the same
kernels."""
SIDES = ("plain", "ours")
REST = "rest (Python, autograd, allocation)"


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
EXTREMES = [size_of(32, 4, 17, 1), size_of(512, 12, 257, 1)]
TINY = [size_of(32, 4, 17, 1)]


def against_plain(
    sizes: list[UViTSize], rounds: int, seconds: float, settings: Settings, *, low: bool = False
) -> Result:
    """`low`: both under autocast to bf16."""
    sizes, found = _measured(sizes, rounds, seconds, settings, low)
    rows: list[list[Any]] = []
    for count, races in found.items():
        for size, training, inference in zip(sizes, races[::2], races[1::2], strict=True):
            cells = [_cells(race, count)[: 2 if low else 3] for race in (training, inference)]
            rows.append([size.describe(), count, *cells[0], *cells[1]])
    if low:
        table = Table(f"{TITLE}, both in bf16", LOW_COLUMNS, rows, [TURNS, _agreement(found)])
    else:
        table = Table(TITLE, COLUMNS, rows, [TURNS, BOUND, _agreement(found)])
    return Result([table], {"races": _by_text(found)})


def over_grid(rounds: int, seconds: float, settings: Settings) -> Result:
    sizes, found = _measured(GRID, rounds, seconds, settings)
    return grid_result(sizes, found, len(GRID))


def grid_result(sizes: list[UViTSize], found: Found, tried: int) -> Result:
    """The ratios of all sizes by width and tokens, and the sizes at which ours is the slower one."""
    groups: dict[tuple[int, int, int], list[list[Spread]]] = {}
    slower: list[list[Any]] = []
    for count, races in found.items():
        for size, *pair in zip(sizes, races[::2], races[1::2], strict=True):
            speeds = [_speed(race) for race in pair]
            groups.setdefault((size.dim, size.tokens, count), []).append(speeds)
            for what, speed in zip(("training", "inference"), speeds, strict=True):
                if speed.high < 1.0:
                    slower.append([size.describe(), count, what, speed])
    rows: list[list[Any]] = []
    for (dim, tokens, count), speeds in sorted(groups.items(), key=lambda item: (item[0][2], *item[0][:2])):
        medians = [[speed.median for speed in column] for column in zip(*speeds, strict=True)]
        rows.append([f"dim {dim}, {tokens} tokens", count, len(speeds), *(Spread.of(column) for column in medians)])
    notes = [
        TURNS,
        "In brackets the quartiles over depths of 4, 12 and 40 and batches of 1, 8, 32 and 128.",
        f"{len(slower)} of {2 * len(sizes) * len(found)} ratios have both quartiles over their rounds below 1.",
        _agreement(found),
    ]
    if len(sizes) < tried:
        notes.append(f"{tried - len(sizes)} sizes of more than {LARGEST / 1e9:.0f} GFLOP a step are left out.")
    tables = [Table(f"{TITLE}: all sizes", GRID_COLUMNS, rows, notes)]
    if slower:
        slower.sort(key=lambda row: row[3].median)
        tables.append(Table("The sizes at which ours is slower", SLOWER_COLUMNS, slower, []))
    return Result(tables, {"races": _by_text(found)})


def profiles(sizes: list[UViTSize], rounds: int, seconds: float, settings: Settings) -> Result:
    """Where the time of a training step goes, with stock modules and with ours."""
    sizes = TINY if settings.quick else sizes
    races = _races(sizes, settings.rounds_or(rounds), seconds, 1)[::2]
    tables = []
    for size, race in zip(sizes, races, strict=True):
        whole, groups = {name: median(race["seconds"][name]) for name in SIDES}, race["groups"]
        rest = {name: max(0.0, whole[name] - sum(groups[name].values())) for name in SIDES}
        names = [name for name in groups[SIDES[0]] if any(groups[side][name] for side in SIDES)]
        rows: list[list[Any]] = [[name, *(groups[side][name] for side in SIDES)] for name in names]
        rows.sort(key=lambda row: -row[1])
        rows += [[REST, *rest.values()], ["together", *whole.values()]]
        columns = {"": "text", "stock modules": "seconds", "ours": "seconds"}
        notes = [
            "One thread. Together: the median step, in turns. Groups: by a profile, without what an operation calls. "
            "An attention of batched products counts among the products.",
        ]
        tables.append(Table(f"A training step of U-ViT, {size.describe()}", columns, rows, notes))
    return Result(tables, {"races": races})


def _measured(
    sizes: list[UViTSize], rounds: int, seconds: float, settings: Settings, low: bool = False
) -> tuple[list[UViTSize], Found]:
    """The sizes that are not too large, and their races by the number of threads."""
    sizes = [size for size in (TINY if settings.quick else sizes) if operations(size) <= LARGEST]
    threads = sorted({1, settings.threads})
    return sizes, {count: _races(sizes, settings.rounds_or(rounds), seconds, count, low) for count in threads}


def _agreement(found: Found) -> str:
    largest = max(race["difference"] for races in found.values() for race in races)
    if not largest <= TOLERANCE:
        raise BenchmarkError(
            f"both networks differ by {largest:.1e} of the largest output with the same weights, more than "
            f"{TOLERANCE:.0e}: their speeds cannot be compared"
        )
    return f"With the same weights both networks' outputs differ by at most {largest:.0e} of the largest in float32."


def _by_text(found: Found) -> dict[str, list[Race]]:
    return {str(count): races for count, races in found.items()}


def _races(sizes: list[UViTSize], rounds: int, seconds: float, threads: int, low: bool = False) -> list[Race]:
    given = {"sizes": [size.network() for size in sizes], "rounds": rounds, "seconds": seconds, "low": low}
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


def _speed(race: Race) -> Spread:
    return Spread.of(ratios(race["seconds"]["plain"], race["seconds"]["ours"]))


def _cells(race: Race, threads: int) -> tuple[Spread, Spread, float | None]:
    seconds = race["seconds"]
    # Kernels are timed on one thread.
    kernels = sum(race["groups"]["plain"][name] for name in KERNELS)
    bound = max(1.0, median(seconds["plain"]) / kernels) if threads == 1 else None
    return Spread.of(seconds["ours"]), _speed(race), bound


CASES = {
    "small": partial(against_plain, SMALL, 60, 4.0),
    "middle": partial(against_plain, MIDDLE, 30, 4.0),
    "large": partial(against_plain, LARGE, 20, 4.0),
    "grid": partial(over_grid, 20, 3.0),
    "bf16": partial(against_plain, [*SMALL[2:4], *MIDDLE, *LARGE[::2]], 20, 4.0, low=True),
    "profile": partial(profiles, EXTREMES, 20, 4.0),
}
