"""Claims: a number per seed, and where the paper says that it lies."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from scalelong.experiments.results import steps_ratio

from .methods import CS, LS, NONE, UNIFORM, Method
from .quantities import Quantity
from .results import Results, RunRecord
from .verdict import ABOVE_ZERO, BELOW_ZERO, Region, Verdict, interval, judge

SPEED_UP = 1.5
"""The paper's promise: this many times fewer steps."""


def percent(value: float) -> str:
    """Of the log of a ratio."""
    return f"{100 * math.expm1(value):+.1f} %"


def factor(value: float) -> str:
    return f"× {math.exp(value):.2f}"


@dataclass(frozen=True)
class Claim:
    text: str
    setting: str
    values: Sequence[float | None]
    """One per seed; None where a seed has no such number."""
    claimed: Region
    opposite: tuple[Region, ...]
    show: Callable[[float], str] = percent

    @property
    def verdict(self) -> Verdict:
        return judge(self.known, self.claimed, self.opposite)

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    def text_of(self, value: float | None) -> str:
        return "-" if value is None else self.show(value)

    def interval_text(self) -> str:
        """The mean, and where it lies with 90 % confidence."""
        found = interval(self.known)
        if math.isinf(found.low):
            return "-"
        return f"{self.show(fmean(self.known))} ({self.show(found.low)} to {self.show(found.high)})"


def below(results: Results, setting: str, method: Method, other: Method, quantity: Quantity) -> Claim:
    """The method's number is smaller than the other's, under equal seeds."""
    return Claim(
        f"{quantity.name}: {method.label} below {other.label}",
        setting,
        log_ratios(results, setting, method, other, quantity),
        BELOW_ZERO,
        (ABOVE_ZERO,),
    )


def scaling_below(results: Results, settings: Iterable[str], quantities: Iterable[Quantity]) -> list[Claim]:
    """CS and LS each below no scaling and below 1/√2."""
    return [
        below(results, setting, method, other, quantity)
        for quantity in quantities
        for setting in settings
        for other in (NONE, UNIFORM)
        for method in (CS, LS)
    ]


def alike(results: Results, setting: str, method: Method, other: Method, quantity: Quantity, margin: float) -> Claim:
    """The two numbers differ by less than the margin, as a share."""
    low, high = -math.log1p(margin), math.log1p(margin)
    return Claim(
        f"{quantity.name}: {method.label} within {100 * margin:.0f} % of {other.label}",
        setting,
        log_ratios(results, setting, method, other, quantity),
        Region(low, high),
        (Region(high=low), Region(low=high)),
    )


def faster(results: Results, setting: str, method: Method, other: Method) -> Claim:
    """The method reaches the loss where the other ends in 1.5 times fewer steps."""
    return Claim(
        f"steps to the loss of {other.label}: {method.label} needs 1/{SPEED_UP} or less",
        setting,
        [log_steps(mine, theirs) for mine, theirs in pairs(results, setting, method, other)],
        Region(high=-math.log(SPEED_UP)),
        (ABOVE_ZERO,),
        factor,
    )


def log_steps(mine: RunRecord, theirs: RunRecord) -> float | None:
    """Log of the steps to equal quality, relative to the other's.

    A run that ends above the other never gets there. How much slower it is, the other tells: it has passed the loss
    where this one ends.
    """
    if mine.diverged or theirs.diverged:
        return None
    ratio = steps_ratio(mine.curve, theirs.curve)
    if ratio is not None:
        return math.log(ratio)
    reverse = steps_ratio(theirs.curve, mine.curve)
    return None if reverse is None else -math.log(reverse)


def pairs(results: Results, setting: str, method: Method, other: Method) -> list[tuple[RunRecord, RunRecord]]:
    """Runs of two methods under equal seeds."""
    theirs = {run.seed: run for run in results.of(setting, other.label)}
    mine = results.of(setting, method.label)
    return [(run, theirs[run.seed]) for run in mine if run.seed in theirs]


def log_ratios(results: Results, setting: str, method: Method, other: Method, quantity: Quantity) -> list[float | None]:
    values = [(quantity.of(mine), quantity.of(theirs)) for mine, theirs in pairs(results, setting, method, other)]
    return [math.log(mine / theirs) if mine and theirs else None for mine, theirs in values]
