"""Intervals and tests for paired seeds."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean, stdev


def interval(values: Sequence[float], confidence: float = 0.9) -> tuple[float, float, float]:
    """Mean and ends of its interval (Student's t); both ends are infinite for fewer than two values."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = student_quantile(len(values) - 1, (1 + confidence) / 2) * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


@cache
def student_quantile(freedom: int, share: float) -> float:
    """The value below which this share (above a half) of Student's t lies."""
    low, high = 0.0, 2.0
    while _student_tail(high, freedom) > 1 - share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, freedom) > 1 - share else (low, middle)
    return (low + high) / 2


def _student_tail(t: float, freedom: int) -> float:
    """P(T > t), a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total, first = (cosine, 0.0, 1) if freedom % 2 else (1.0, 0.0, 0)
    for k in range(first, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine * cosine
    within = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return (1 - within) / 2


def mcnemar(pairs: Sequence[tuple[bool, bool]]) -> float:
    """The exact two-sided p of McNemar's test: pairs that differ are as likely to differ either way."""
    first, second = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    count = first + second
    if count == 0:
        return 1.0
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(min(first, second) + 1)) / 2**count)


def holm(tests: Mapping[str, float]) -> dict[str, float]:
    """p values corrected for their number (Holm 1979)."""
    found, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(tests.items(), key=lambda entry: entry[1])):
        largest = found[name] = max(largest, min(1.0, (len(tests) - rank) * p))
    return found
