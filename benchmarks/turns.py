"""Interleaved rounds: in each round every contender has one turn."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scalelong.console import Progress

from .errors import BenchmarkError
from .spread import Spread, ratios

Turn = Callable[[int], float]
"""Does so many steps and returns the seconds that they took together."""

PAUSE = 0.02
"""Seconds between two turns: threads of the last one that still wait actively for work should have gone to sleep."""
LONG = 2.0
"""Seconds of a step that is warm after the first time."""


@dataclass
class Race:
    """Seconds per step, of each contender in each round."""

    seconds: dict[str, list[float]]
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes by which the process has grown at its peak, since before it built anything."""
    missing: dict[str, str] = field(default_factory=dict)
    """Contenders that could not take part, and why."""

    def __contains__(self, name: str) -> bool:
        return name in self.seconds

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def speed(self, name: str, baseline: str) -> Spread:
        """How many times as fast as the baseline."""
        return Spread.of(ratios(self.seconds[baseline], self.seconds[name]))

    def cost(self, name: str, baseline: str) -> Spread:
        """Time beyond the baseline's, as a share of it."""
        return Spread.of([ratio - 1 for ratio in ratios(self.seconds[name], self.seconds[baseline])])

    def memory_ratio(self, name: str, baseline: str) -> float:
        return self.memory[name] / self.memory[baseline]


def interleave(
    turns: Mapping[str, Turn],
    rounds: int,
    *,
    turn_seconds: float = 0.5,
    warm_up: int = 2,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, list[float]]:
    """Warm up, choose how many steps make a turn of at least `turn_seconds`, then measure seconds per step."""
    if rounds < 1:
        raise BenchmarkError(f"there must be at least one round, got {rounds}")
    if not turns:
        return {}
    warm = {name: _warm_up(turn, warm_up) for name, turn in turns.items()}
    steps = {name: steps_per_turn(_like(warm, name), turn_seconds) for name in turns}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    progress = Progress("rounds", rounds, stream=sys.stderr)
    for number in range(rounds):
        # To and fro, so that a drift of the machine's speed falls on all alike.
        for name in list(turns) if number % 2 == 0 else reversed(list(turns)):
            pause(PAUSE)
            seconds[name].append(turns[name](steps[name]) / steps[name])
        progress(number + 1)
    return seconds


def _warm_up(turn: Turn, most: int) -> float:
    shortest = turn(1)
    for _ in range(1, most):
        if shortest > LONG:
            break
        shortest = min(shortest, turn(1))
    return shortest


def _like(warm: Mapping[str, float], name: str) -> float:
    """The shortest step of contenders about as fast as this one: they get as many steps, so as many cold starts."""
    return min(seconds for seconds in warm.values() if seconds >= warm[name] / 2)


def steps_per_turn(step_seconds: float, turn_seconds: float) -> int:
    return max(1, math.ceil(turn_seconds / max(step_seconds, 1e-7)))


def turn_of(step: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Turn:
    """A turn in this process."""

    def turn(steps: int) -> float:
        start = clock()
        for _ in range(steps):
            step()
        return clock() - start

    return turn
