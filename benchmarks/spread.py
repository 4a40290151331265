"""The middle and the quartiles of repeated measurements."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import BenchmarkError


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if not values:
            raise BenchmarkError("there is nothing to take the median of: no round was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round: what disturbed a whole round cancels."""
    if len(numerators) != len(denominators):
        raise BenchmarkError(f"{len(numerators)} and {len(denominators)} rounds cannot be compared")
    return [a / b for a, b in zip(numerators, denominators, strict=True)]
