"""Many runs of a small network: one by one, and as a stack of several at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..contender import Contender
from ..contenders import ALONE, SWEEP_RACES, TOGETHER
from ..record import Result, Spread, Table, ratios
from ..settings import BenchmarkError, Settings, UViTSize
from .growth import exponent
from .network import run_races, size_of

TOLERANCE = 1e-3
"""Largest difference between the losses of a run in both ways after some steps, as a share of it."""
QUICK_STEPS = 2
RUN = 300
"""Steps of a run, as `scalelong range` has them."""
NOTE = (
    "Processor time of one process and one thread, in turns, of runs of {} steps by the library's own functions: "
    "building (which weighs less in longer runs), data, training, readings and judging."
)
COLUMNS = {
    "": "text",
    "runs at once": "count",
    "a step of a run, one by one": "seconds",
    "together": "seconds",
    f"runs of {RUN} steps an hour, one by one": "rate",
    "together ": "rate",
    "times as fast": "times",
}

SMALL = [*((size_of(64, 8, 17, 8), runs) for runs in (2, 4, 6, 12)), (size_of(64, 24, 17, 8), 6)]
GRID = [(size_of(*each), 6) for each in ((32, 8, 17, 8), (128, 8, 17, 8), (64, 8, 65, 8), (128, 8, 65, 8))]
TINY = size_of(32, 4, 17, 1)


def against_alone(
    cases: Sequence[tuple[UViTSize, int]], rounds: int, steps: int, seconds: float, settings: Settings
) -> Result:
    cases = [(TINY, 2)] if settings.quick else cases
    steps = QUICK_STEPS if settings.quick else steps
    races = _races(cases, settings.rounds_or(rounds), steps, seconds)
    rows: list[list[Any]] = []
    for (size, runs), race in zip(cases, races, strict=True):
        alone, together = race["seconds"][ALONE], race["seconds"][TOGETHER]
        hourly = [Spread.of([3600 / (RUN * each) for each in values]) for values in (alone, together)]
        times = [Spread.of(alone), Spread.of(together)]
        rows.append([size.describe(), runs, *times, *hourly, Spread.of(ratios(alone, together))])
    table = Table("Runs of one U-ViT, one by one and together", COLUMNS, rows, [NOTE.format(steps), _agreement(races)])
    return Result([table], {"races": races})


def growth(
    size: UViTSize, counts: Sequence[int], rounds: int, steps: int, seconds: float, settings: Settings
) -> Result:
    """How the time of a sweep grows with its runs."""
    size, counts = (TINY, counts[:2]) if settings.quick else (size, counts)
    steps = QUICK_STEPS if settings.quick else steps
    races = _races([(size, runs) for runs in counts], settings.rounds_or(rounds), steps, seconds)
    whole = {
        name: [[runs * each for each in race["seconds"][name]] for runs, race in zip(counts, races, strict=True)]
        for name in (ALONE, TOGETHER)
    }
    rows = [[runs, *(Spread.of(whole[name][place]) for name in whole)] for place, runs in enumerate(counts)]
    powers = [
        [name, *(Spread.of([exponent(counts[a:], e[a:]) for e in zip(*values, strict=False)]) for a in (0, -2))]
        for name, values in whole.items()
    ]
    tables = [
        Table(
            f"A step of all runs of a sweep, {size.describe()}",
            {"runs": "count", ALONE: "seconds", TOGETHER: "seconds"},
            rows,
            [NOTE.format(steps), _agreement(races)],
        ),
        Table("Exponents: time ~ runs^p", {"": "text", "p, all": "times", "p, last two": "times"}, powers),
    ]
    return Result(tables, {"races": races, "sizes": list(counts)})


def _agreement(races: Sequence[dict[str, Any]]) -> str:
    largest = max(race["difference"] for race in races)
    if not largest <= TOLERANCE:
        raise BenchmarkError(
            f"the losses of runs together and one by one differ by {largest:.1e}, more than "
            f"{TOLERANCE:.0e}: they do not train the same"
        )
    return f"The smoothed losses at the end of a run differ by at most {largest:.0e}."


def _races(cases: Sequence[tuple[UViTSize, int]], rounds: int, steps: int, seconds: float) -> list[dict[str, Any]]:
    races = [{**size.network(), "runs": runs} for size, runs in cases]
    given = {"races": races, "rounds": rounds, "seconds": seconds, "steps": steps}
    return run_races(Contender("runs in both ways", SWEEP_RACES, given), len(cases), 1, "sweeps")


CASES = {
    "small": partial(against_alone, SMALL, 15, 20, 12.0),
    "grid": partial(against_alone, GRID, 9, 8, 12.0),
    "growth": partial(growth, size_of(64, 8, 17, 8), (1, 2, 4, 8, 16), 9, 20, 12.0),
}
