"""Differences of less than a percent: contenders that share a process and go in lockstep, and their memory."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from scalelong.console import Progress

from .contender import Contender, Worker
from .settings import Settings, cores
from .spread import Spread

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""All threads of the process get their memory from the same place."""
STEPS = 2
"""Until the memory of a process has its peak."""


@dataclass(frozen=True)
class Lockstepped:
    """What was found about contenders in lockstep; the first is the baseline."""

    seconds: dict[str, list[float]]
    """Of each contender's step, in each round."""
    whole: dict[str, Spread]
    """Time over the baseline's, as a share of it, with its 95 % interval."""
    parts: dict[str, Spread]
    """The same, of the slices in which any of them calls other operations than the baseline."""
    share: float
    """Of the baseline's time, in these slices."""
    same: list[str]
    """Contenders that call the same operations as the baseline, everywhere."""

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def notes(self, baseline: str, again: str, besides: str = "") -> list[str]:
        """What the two columns of costs are. `besides` says where else the first one compares."""
        same = ", ".join(name for name in self.same if name not in (baseline, again))
        return [
            f"Costs over {baseline!r} with 95 % intervals. First where any of them calls other operations than it"
            f"{besides} ({100 * self.share:.0f} % of the time): the rest is the same calls on the same sizes. Then by "
            f"the whole. {again!r} is the noise.",
            *([f"The same operations as {baseline!r} everywhere: {same}."] if same else []),
        ]


def lockstep(
    factory: str, arguments: dict[str, Any], rounds: int, settings: Settings, *, imports: tuple[str, ...]
) -> Lockstepped:
    """Rounds of the contenders that the factory makes, on one core."""
    contender = Contender("contenders in lockstep", factory, arguments, ONE_ARENA, imports)
    with ExitStack() as stack:
        worker = Worker(contender, threads=1)
        stack.callback(worker.close)
        worker.wait_until_built()
        worker.turn(1)
        same = worker.ask("compare_operations")
        worker.ask("forget")
        total = settings.rounds_or(rounds)
        progress = Progress("rounds in lockstep", total, stream=sys.stderr)
        for number in range(total):
            worker.turn(1)
            progress(number + 1)
        found = worker.ask("found")
    whole, parts = ({name: Spread(**value) for name, value in found[key].items()} for key in ("whole", "parts"))
    return Lockstepped(found["seconds"], whole, parts, found["share"], same)


@dataclass(frozen=True)
class Memory:
    process: float
    """Bytes by which a process of its own has grown at its peak, with all threads."""
    tensors: float
    """Bytes of tensors at the peak of a step on one core, the same in every run."""


def memory_of(contenders: Sequence[Contender], settings: Settings) -> dict[str, Memory]:
    """Each in a process of its own."""
    progress = Progress("memory of contenders", len(contenders), stream=sys.stderr)
    found: dict[str, Memory] = {}

    def measure(contender: Contender) -> Memory:
        with ExitStack() as stack:
            worker = Worker(contender, settings.threads)
            stack.callback(worker.close)
            worker.wait_until_built()
            worker.turn(STEPS)
            return Memory(worker.memory, worker.tensors())

    with ThreadPoolExecutor(max(1, cores() // settings.threads)) as pool:
        for contender, memory in zip(contenders, pool.map(measure, contenders), strict=True):
            found[contender.name] = memory
            progress(len(found))
    return found
