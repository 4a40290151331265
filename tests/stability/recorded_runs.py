"""Recorded losses of 41 runs, collapsed and healthy (docs/evidence/collapse), and what is true of each of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalelong.noise import LEVELS
from scalelong.stability import Collapse, CollapseDetector

FILE = Path(__file__).parents[2] / "docs" / "evidence" / "collapse" / "losses.npz"
FIRST_SEED = 7000
# Losses are stored as codes 1 to 255 on a logarithmic scale between these.
LEAST, MOST = 1e-3, 1e3
LEARNED, LATE, WITHIN = 0.2, 30, 30


@dataclass(frozen=True)
class Record:
    """The losses of one run: arrays of (steps, LEVELS)."""

    name: str
    counts: Any
    losses: Any
    zeros: Any

    @property
    def mean_losses(self) -> Any:
        return (self.counts * self.losses).sum(1) / self.counts.sum(1)

    @property
    def mean_zeros(self) -> Any:
        return (self.counts * self.zeros).sum(1) / self.counts.sum(1)


def unpacked(codes: Any) -> Any:
    return LEAST * (MOST / LEAST) ** ((codes.astype(np.float64) - 1) / 254)


def read_records() -> list[Record]:
    found = []
    with np.load(FILE) as file:
        for key in [name for name in file.files if name.endswith("-group")]:
            number = key.partition("-")[0]
            name = json.loads(str(file[key]))["name"]
            counts, losses, zeros = (file[f"{number}-{part}"] for part in ("counts", "losses", "zeros"))
            for row in range(len(counts)):
                values = counts[row].astype(float), unpacked(losses[row]), unpacked(zeros[row])
                found.append(Record(f"{name}, seed {FIRST_SEED + row}", *values))
    return found


def truth(run: Record) -> int | None:
    """The step at which the run collapses, by the whole curve; 0 if it leaves too late to tell; None if healthy."""
    loss, zero = np.cumsum([0, *run.mean_losses]), np.cumsum([0, *run.mean_zeros])
    steps = len(loss) - 1

    def learned(start: int, length: int) -> float:
        stop = min(steps, start + length)
        return 1 - (loss[stop] - loss[start]) / (zero[stop] - zero[start])

    best = 0.0
    for step in range(20, steps - 9):
        best = max(best, learned(step - 20, 20))
        if best >= LEARNED and learned(step, 10) < best / 2 and learned(step, 50) < best / 2:
            return step if steps - step >= LATE else 0
    return None


def alarms(run: Record, *, by_level: bool = True) -> list[Collapse]:
    """The collapses that the detector finds: from losses by noise level, or from the mean loss of each step alone."""
    detector = CollapseDetector(levels=LEVELS) if by_level else CollapseDetector(zero_loss=float(run.mean_zeros.mean()))
    found = []
    for step, (counts, losses, zeros) in enumerate(zip(run.counts, run.losses, run.zeros, strict=True), start=1):
        if by_level:
            event = detector.add_levels(step, list(counts), list(counts * losses), list(counts * zeros))
        else:
            event = detector.add(step, float((counts * losses).sum() / counts.sum()))
        found += [event] if isinstance(event, Collapse) else []
    return found


def judged(run: Record, *, by_level: bool = True) -> tuple[str, int | None, int | None]:
    """(verdict, step of the collapse, step of the first alarm)."""
    collapsed, found = truth(run), alarms(run, by_level=by_level)
    first = found[0].step if found else None
    if collapsed == 0:
        return "not counted", collapsed, first
    if collapsed is None:
        return ("false alarm" if found else "healthy, quiet"), collapsed, first
    if first is None or first > collapsed + WITHIN:
        return "missed", collapsed, first
    return ("early alarm" if first < collapsed - WITHIN else "found"), collapsed, first
