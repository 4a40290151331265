"""Races in one process, one after the other: what a worker that has several of them runs."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Race(Protocol):
    """A call is a round: every contender has its turn."""

    seconds: dict[str, list[float]]
    difference: float

    def __call__(self) -> None: ...

    def about(self) -> dict[str, Any]:
        """What else is known of it, when it is over."""
        ...


class Races:
    """A call is a race of at most `rounds` rounds, and of `fewest` where they take longer than `seconds` in all."""

    def __init__(self, made: Iterable[Callable[[], Race]], *, rounds: int, fewest: int, seconds: float) -> None:
        self.waiting, self.rounds, self.fewest, self.limit = list(made), rounds, fewest, seconds
        self.results: list[dict[str, Any]] = []

    def __call__(self) -> None:
        race, began = self.waiting.pop(0)(), time.process_time()
        for number in range(self.rounds):
            if number >= self.fewest and time.process_time() - began > self.limit:
                break
            race()
        self.results.append({"seconds": race.seconds, "difference": race.difference, **race.about()})

    def found(self) -> list[dict[str, Any]]:
        return self.results
