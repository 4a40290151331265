"""Curves of a run, read back from its metrics, and the questions that a comparison asks of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..runs.folder import read_metrics

COLLAPSED = 2.0
"""A loss that ends at more than so many times its smallest value has collapsed."""


@dataclass(frozen=True)
class Curve:
    """A quantity over training steps."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int) -> float | None:
        """The value at a step, interpolated; None outside of what was recorded."""
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if step == right:
                # Interpolated, it may come out below by a rounding error, and then the curve itself never reaches it.
                return high
            if left <= step < right:
                return low + (high - low) * (step - left) / (right - left)
        return self.values[0]

    def best(self, step: int) -> float | None:
        """The smallest value up to a step, the interpolated one there included; None if there is nothing yet."""
        last = self.at(step)
        values = [value for at, value in self.points if at <= step] + ([] if last is None else [last])
        return min(values, default=None)

    @property
    def collapsed(self) -> bool:
        """Whether a loss went up again for good, though it stayed finite."""
        return len(self) > 0 and self.values[-1] > COLLAPSED * min(self.values)

    @property
    def points(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))


def read_curves(folder: Path) -> dict[str, Curve]:
    """All quantities of a run by name."""
    found: dict[str, dict[int, float]] = {}
    for line in read_metrics(folder):
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                found.setdefault(name, {})[int(line["step"])] = float(value)
    return {
        name: Curve(tuple(sorted(values)), tuple(values[s] for s in sorted(values))) for name, values in found.items()
    }


def steps_to(curve: Curve, target: float) -> float | None:
    """When the curve first comes down to the target, interpolated between two records; None if it never does."""
    before: tuple[int, float] | None = None
    for step, value in curve.points:
        if value <= target:
            if before is None:
                return float(step)
            left, high = before
            return left + (step - left) * (high - target) / (high - value)
        before = (step, value)
    return None


def steps_ratio(curve: Curve, baseline: Curve) -> float | None:
    """Steps that a method needs for the baseline's last loss, divided by the steps that the baseline needs for it.

    Of a baseline that collapsed it is the smallest loss. Below 1 is faster than the baseline. None: the method does not
    get there in the steps that were run.
    """
    if not len(curve) or not len(baseline):
        return None
    target = min(baseline.values) if baseline.collapsed else baseline.values[-1]
    mine, theirs = steps_to(curve, target), steps_to(baseline, target)
    return None if mine is None or not theirs else mine / theirs


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
