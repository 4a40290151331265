"""How a measurement is made."""

import os
from dataclasses import dataclass
from pathlib import Path

from scalelong.errors import InvalidConfigError

from .checkout import checkout

QUICK_ROUNDS = 2


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    threads: int
    quick: bool = False
    """Tiny networks and few rounds: to see that it works. The figures mean little."""
    rounds: int | None = None
    """Instead of each case's own number."""
    official: Path | None = None
    """A checkout of the authors' code."""
    run: Path | None = None
    """A trained run, for the sampling benchmark."""
    target: float | None = None
    """The Fréchet distance that samples should reach."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise InvalidConfigError(f"--threads must be at least 1, got {self.threads}")
        if self.rounds is not None and self.rounds < 1:
            raise InvalidConfigError(f"--rounds must be at least 1, got {self.rounds}")
        if self.official is not None:
            checkout(self.official)
        if self.target is not None and not self.target > 0:
            raise InvalidConfigError(f"--target must be above 0, got {self.target}")

    def rounds_or(self, default: int) -> int:
        if self.rounds is not None:
            return self.rounds
        return QUICK_ROUNDS if self.quick else default

    @property
    def turn_seconds(self) -> float:
        """The shortest turn: long enough that waking up does not count."""
        return 0.02 if self.quick else 0.5
