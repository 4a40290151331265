"""The rule by which a claim is judged. It looks at the spread over seeds, and nobody overrules it.

Each claim is about a number per seed, such as the log of the ratio of two losses under equal seeds. From these numbers
follows the interval that holds their mean with 90 % confidence (Student's t). The paper's claim says in which region
the mean lies, and which region would be the opposite:

- reproduced: the whole interval lies in the claimed region
- contradicted: the whole interval lies in the opposite region
- not reproduced at this scale: anything else, and always where there are fewer than two seeds
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

# Student's t, 95 % one-sided, for 1, 2, ... degrees of freedom; then that of the normal distribution.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)
T_NORMAL = 1.645


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    NOT = "not reproduced at this scale"
    CONTRADICTED = "contradicted"


@dataclass(frozen=True)
class Region:
    """low < value < high."""

    low: float = -math.inf
    high: float = math.inf

    def holds(self, interval: "Region") -> bool:
        return self.low < interval.low and interval.high < self.high


BELOW_ZERO, ABOVE_ZERO = Region(high=0.0), Region(low=0.0)


def interval(values: Sequence[float]) -> Region:
    """Where the mean lies with 90 % confidence; everywhere, for fewer than two values."""
    if len(values) < 2:
        return Region()
    freedom = len(values) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else T_NORMAL
    half = t * stdev(values) / math.sqrt(len(values))
    return Region(fmean(values) - half, fmean(values) + half)


def judge(values: Sequence[float], claimed: Region, opposite: Sequence[Region]) -> Verdict:
    found = interval(values)
    if claimed.holds(found):
        return Verdict.REPRODUCED
    return Verdict.CONTRADICTED if any(region.holds(found) for region in opposite) else Verdict.NOT


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """Of an item: reproduced if all of its claims are, contradicted if at least half of them are."""
    if verdicts and all(verdict is Verdict.REPRODUCED for verdict in verdicts):
        return Verdict.REPRODUCED
    contradicted = sum(verdict is Verdict.CONTRADICTED for verdict in verdicts)
    return Verdict.CONTRADICTED if verdicts and 2 * contradicted >= len(verdicts) else Verdict.NOT
