"""The result of `rate_range`: which runs survived at which learning rate, as a table, a verdict, a picture and JSON.

The rate at which half of the runs survive is read off the share of survivors by rate, made monotone and interpolated in
log(rate); its interval of 95 % comes from resampling the seeds. Two methods are compared on pairs of equal seeds by
flipping signs, with Holm's correction for the number of methods. The verdict is computed from these numbers.
"""

import io
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise, product
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..console import listed, text_table
from ..errors import InvalidConfigError, MissingDependencyError
from ..files import fitting, in_words, parse_json, results_folder, write_bytes, write_text
from ..optional import needs
from .alarms import MERGE_NORM

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
OUTCOMES = ("survived", "collapsed", "not finite", "not learned")
RESAMPLES = 1000
LEVEL = 0.05
"""Below this p-value (Holm's) two methods differ."""
EXACT = 14
"""Up to so many seeds all signs are flipped; for more, a sample of the flips is drawn."""
BEST_LOSS = "best loss: the median of the runs' smallest smoothed losses, at the rate where it is lowest"
PLACES = 3
"""So many places that left first are named, the rest is counted."""
# Distinguishable with the common forms of colour blindness (Okabe and Ito).
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a900")


@dataclass(frozen=True, kw_only=True)
class RateRun:
    """One training at a constant rate."""

    method: str
    rate: float
    seed: int
    outcome: str
    """One of OUTCOMES."""
    steps: int
    """Steps that were done: all of them, or those until the collapse."""
    best: float | None
    """The smallest smoothed loss after the warm-up; None if it ended before."""
    best_step: int
    last: float | None
    """The smoothed loss at the end; None if it is not finite."""
    curve: list[list[float]]
    """[step, smoothed loss], thinned."""
    left_first: dict[str, Any] | None = None
    """The block or skip whose size left its level first, before a collapse: {"where", "step", "factor"}."""
    onset: int | None = None
    """The step from which on a collapsed run was lost."""
    seconds: float = 0.0
    """Processor time."""

    @property
    def survived(self) -> bool:
        return self.outcome == "survived"

    def __str__(self) -> str:
        lost = f"{self.outcome} after {self.steps} steps" if self.onset is None else f"collapsed at step {self.onset}"
        what = f"survived, loss {self.last:.3g}" if self.survived else lost
        return f"{self.method} at {rate_text(self.rate)}, seed {self.seed}: {what}"


@dataclass(frozen=True)
class HalfRate:
    """The rate at which half of the runs of a method survive, with an interval of 95 % from the seeds.

    `rate` is None where the tried rates do not bracket it. A `low` of None lies below all tried rates, a `high` of None
    above them.
    """

    method: str
    rate: float | None
    low: float | None
    high: float | None
    text: str


@dataclass(frozen=True)
class Difference:
    """Survivors of a method against those of the baseline, over all rates; `p` is Holm's."""

    method: str
    survived: int
    baseline_survived: int
    runs: int
    p: float

    @property
    def differs(self) -> bool:
        return self.p < LEVEL


@dataclass(frozen=True, kw_only=True)
class RateRange:
    """The range of learning rates in which a network trains, by method. Print it, `plot()` it, `save()` it."""

    methods: tuple[str, ...]
    """The first one is the baseline."""
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    runs: tuple[RateRun, ...]
    steps: int
    warmup: int
    reference_loss: float
    """The loss of a network that has learned nothing."""
    rule: str
    your_rate: float | None = None
    title: str = ""
    samples: tuple[dict[str, Any], ...] = ()
    """Pictures that belong to runs: {"method", "rate", "seed", "outcome", "file"}."""
    summary: str = ""
    """A sentence of its own, which the report shows above the verdict."""

    def __str__(self) -> str:
        title = f"{self.title}\n" if self.title else ""
        return f"{title}{text_table(self.rows())}\n{BEST_LOSS}\n\n{self.verdict}"

    # Counts

    @cached_property
    def _found(self) -> dict[tuple[str, float, int], RateRun]:
        return {(run.method, run.rate, run.seed): run for run in self.runs}

    def cell(self, method: str, rate: float, seeds: Sequence[int] | None = None) -> list[RateRun]:
        """The runs of a method at a rate, by seed."""
        keys = [(method, rate, seed) for seed in (self.seeds if seeds is None else seeds)]
        return [self._found[key] for key in keys if key in self._found]

    def survivors(self, method: str, rate: float | None = None) -> tuple[int, int]:
        """How many runs survived, of how many: at one rate, or at all of them."""
        runs = [run for each in ([rate] if rate is not None else self.rates) for run in self.cell(method, each)]
        return sum(run.survived for run in runs), len(runs)

    # The rate at which half of the runs survive

    @cached_property
    def half_rates(self) -> tuple[HalfRate, ...]:
        return tuple(self._half(method) for method in self.methods)

    def _half(self, method: str) -> HalfRate:
        rate, source = self._crossing(method, self.seeds), random.Random(0)
        drawn = sorted(self._crossing(method, source.choices(self.seeds, k=len(self.seeds))) for _ in range(RESAMPLES))
        low, high = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
        points = self._shares(method, self.seeds)
        for (left, p), (right, q) in pairwise(points):
            # All survive one rate and none the next: seeds do not vary, but the truth lies between the two.
            if (p, q) == (1.0, 0.0) and left < rate <= right:
                low, high = min(low, left), max(high, right)
        below, above = f"below {rate_text(self.rates[0])}", f"above {rate_text(self.rates[-1])}"
        if not 0 < rate < math.inf:
            return HalfRate(method, None, low or None, high if high < math.inf else None, above if rate else below)
        interval = f"[{rate_text(low) if low else below}, {rate_text(high) if high < math.inf else above}]"
        text = f"{rate_text(rate)} {interval}"
        return HalfRate(method, rate, low or None, high if high < math.inf else None, text)

    def _shares(self, method: str, seeds: Sequence[int]) -> list[tuple[float, float]]:
        """(rate, share of survivors). Below the smallest rate with a survivor, what has not learned is only slow."""
        slowest = next((rate for rate in self.rates if self.survivors(method, rate)[0]), 0.0)
        found = []
        for rate in self.rates:
            runs = [run for run in self.cell(method, rate, seeds) if rate >= slowest or run.outcome != "not learned"]
            found += [(rate, sum(run.survived for run in runs) / len(runs))] if runs else []
        return found

    def _crossing(self, method: str, seeds: Sequence[int]) -> float:
        """The rate at which the monotone share of survivors falls through one half; 0 below all tried, inf above."""
        points = self._shares(method, seeds)
        shares = _falling([share for _, share in points])
        if not points or shares[0] < 0.5:
            return 0.0
        for (left, _), (right, _), p, q in zip(points, points[1:], shares, shares[1:], strict=False):
            if q < 0.5 <= p:
                return math.exp(math.log(left) + (p - 0.5) / (p - q) * math.log(right / left))
        return points[-1][0] if shares[-1] == 0.5 else math.inf

    # Differences between methods

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Every other method against the baseline."""
        raw = {method: self._p_value(method, self.methods[0]) for method in self.methods[1:]}
        corrected, largest = {}, 0.0
        for position, method in enumerate(sorted(raw, key=lambda name: raw[name])):
            largest = max(largest, min(1.0, raw[method] * (len(raw) - position)))
            corrected[method] = largest
        found = []
        for method in raw:
            pairs = self._pairs(method, self.methods[0])
            alive, before = sum(mine.survived for mine, _ in pairs), sum(theirs.survived for _, theirs in pairs)
            found.append(Difference(method, alive, before, len(pairs), corrected[method]))
        return tuple(found)

    def _pairs(self, method: str, other: str) -> list[tuple[RateRun, RateRun]]:
        keys = [(rate, seed) for rate in self.rates for seed in self.seeds]
        found = [(self._found.get((method, *key)), self._found.get((other, *key))) for key in keys]
        return [(mine, theirs) for mine, theirs in found if mine is not None and theirs is not None]

    def _p_value(self, method: str, other: str) -> float:
        """Two-sided, exact up to EXACT seeds: the share of sign flips of the seeds with as large a difference."""
        totals: Counter[int] = Counter()
        for mine, theirs in self._pairs(method, other):
            totals[mine.seed] += mine.survived - theirs.survived
        values = [value for value in totals.values() if value]
        if not sum(values):
            return 1.0
        source = random.Random(0)
        exact = product((-1, 1), repeat=len(values)) if len(values) <= EXACT else ()
        signs = list(exact) or [source.choices((-1, 1), k=len(values)) for _ in range(10_000)]
        flips = [abs(sum(sign * value for sign, value in zip(flip, values, strict=True))) for flip in signs]
        return sum(flip >= abs(sum(values)) for flip in flips) / len(flips)

    # The verdict

    @cached_property
    def verdict(self) -> str:
        """The advice, in sentences that follow from the counts."""
        if not self.runs:
            return "No run is finished yet."
        yours = [] if self.your_rate is None else [self._at_your_rate(self.your_rate)]
        return " ".join([self._judgement(), *yours])

    def _judgement(self) -> str:
        baseline, seeds = self.methods[0], len(self.seeds)
        counted = "; ".join(f"{method} {_of(self.survivors(method))}" for method in self.methods)
        if len(self.methods) == 1:
            return f"Half of the runs of {baseline} survive: {self.half_rates[0].text} (survivors: {counted})."
        needed = math.ceil(1 + math.log2((len(self.methods) - 1) / LEVEL))
        if seeds < needed:
            return (
                f"Cannot be judged with {'one seed' if seeds == 1 else f'{seeds} seeds'}: {needed} or more can tell "
                f"{len(self.methods)} methods from chance. Survivors so far: {counted}."
            )
        better = [each for each in self.differences if each.differs and each.survived > each.baseline_survived]
        worse = [each.method for each in self.differences if each.differs and each.survived < each.baseline_survived]
        same = [each.method for each in self.differences if not each.differs]
        if not better and not worse:
            return f"No difference that {seeds} seeds can show: {counted} runs survive.{self._edge()}"
        parts = []
        if better:
            best = self._best(better)
            parts.append(f"{self._advantage(best)}{self._advice(best)}")
            also = [each.method for each in better if each.method != best]
            parts += [f"More survive as well with {listed(also)}."] if also else []
        parts += [f"Fewer survive with {listed(worse)} than with {baseline}."] if worse else []
        parts += [f"No difference that {seeds} seeds can show with {listed(same)}."] if same else []
        return f"{' '.join(parts)} Survivors: {counted}."

    def _best(self, better: list[Difference]) -> str:
        """The method with the most survivors; merge_norm, which lasts, unless seeds show that it has fewer."""
        most = max(better, key=lambda each: each.survived).method
        lasting = [each.method for each in better if each.method.startswith("merge_norm")]
        return next((method for method in lasting if self._p_value(most, method) >= LEVEL), most)

    def _advantage(self, method: str) -> str:
        baseline, first = self.methods[0], rate_text(self.rates[0])
        if len(self.rates) == 1:
            return f"At a rate of {first} more runs survive with {method} than with {baseline}."
        halves = {half.method: half.text.partition(" [")[0] for half in self.half_rates}
        return f"Half of the runs survive: {halves[method]} with {method}, {halves[baseline]} with {baseline}."

    def _advice(self, method: str) -> str:
        if method.startswith(("start:", "cs", "ls")):
            return f" That delays a collapse; a norm in each merge lasts (docs/recipe.md): {MERGE_NORM}."
        if not method.startswith("merge_norm"):
            return ""
        lost = [rate for rate in self.rates if not _all(self.survivors(self.methods[0], rate))]
        safe = [rate for rate in self.rates if rate < min(lost, default=math.inf)]
        stay = f"stay at {rate_text(safe[-1])} or below, where all survive without it" if safe else "lower the rate"
        return f" Call {MERGE_NORM} before the first step, or {stay}."

    def _edge(self) -> str:
        counts = [self.survivors(method) for method in self.methods]
        if all(map(_all, counts)):
            return f" All of them up to {rate_text(self.rates[-1])}: higher rates may show one."
        if not any(alive for alive, _ in counts):
            return f" None of them from {rate_text(self.rates[0])} on: lower rates may show one."
        return ""

    def _at_your_rate(self, yours: float) -> str:
        named = f"your rate of {rate_text(yours)}"
        above = next((rate for rate in self.rates if rate >= yours), None)
        if above is None:
            return f"All of these rates lie below {named}."
        if all(_all(self.survivors(method, above)) for method in self.methods):
            place = "" if above == yours else f" (and at {rate_text(above)})"
            return f"At {named}{place} nothing differs: all runs survive."
        counted = ", ".join(f"{_of(self.survivors(method, above))} with {method}" for method in self.methods)
        place = "At" if above == yours else f"At {rate_text(above)}, the next rate above"
        return f"{place} {named}, {counted} survive."

    # Table

    def rows(self) -> list[dict[str, str]]:
        """A row per method: survivors at each rate, the rate that half survive, the loss reached, what left first."""
        rows = []
        for method, half in zip(self.methods, self.half_rates, strict=True):
            best = self._median_best(method)
            at = min(best, key=lambda rate: best[rate], default=0.0)
            row = {"method": method} | {rate_text(rate): _of(self.survivors(method, rate)) for rate in self.rates}
            row |= {"half survive": half.text} if len(self.rates) > 1 else {}
            row["best loss (at)"] = f"{best[at]:.3g} ({rate_text(at)})" if best else "-"
            rows.append(row | {"left first": self.left_first(method)})
        return rows

    def _median_best(self, method: str) -> dict[float, float]:
        """The median over seeds of the smallest loss, by rate."""
        found = {rate: [run.best for run in self.cell(method, rate) if run.best is not None] for rate in self.rates}
        return {rate: median(values) for rate, values in found.items() if values}

    def left_first(self, method: str) -> str:
        """The most common place that left its level first in the lost runs; all of them where several are equal."""
        lost = [run for run in self.runs if run.method == method and not run.survived]
        counts = Counter(run.left_first["where"] for run in lost if run.left_first is not None)
        most = max(counts.values(), default=0)
        places = [place for place, count in counts.items() if count == most]
        each = " each" if len(places) > 1 else ""
        return f"{listed(places, PLACES)} ({most} of {len(lost)}{each})" if places else "-"

    # Files

    def to_json(self) -> str:
        """All fields, and the verdict for those who read the file."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        runs = [asdict(run) for run in self.runs]
        return json.dumps({"format": FORMAT, **values, "runs": runs, "verdict": self.verdict}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "RateRange":
        try:
            values = parse_json(text)
            if values["format"] != FORMAT:
                raise ValueError(f"it has format {values['format']}, this version reads {FORMAT}")
            named = {each.name: values[each.name] for each in fields(cls)}
            lists = {name: tuple(named[name]) for name in ("methods", "rates", "seeds", "samples")}
            return fitting(cls, named | lists | {"runs": tuple(fitting(RateRun, run) for run in values["runs"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidConfigError(
                f"this is not a range.json ({in_words(error)}): make it again with `scalelong range`"
            ) from error

    def save(self, folder: str | PathLike[str]) -> Path:
        """range.json, range.txt and, where matplotlib is installed, range.png. Gives the folder."""
        place = results_folder(folder)
        write_text(place / "range.json", self.to_json())
        write_text(place / "range.txt", f"{self}\n")
        try:
            self.plot(place / "range.png")
        except MissingDependencyError:
            (place / "range.png").unlink(missing_ok=True)
        return place

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """Left: rate × method, a mark for every run. Right: the smallest loss of every run, medians as lines."""
        height = max(3.4, 1.4 + 0.55 * len(self.methods))
        figure = needs("matplotlib.figure", "report", "drawing the range of rates").Figure(
            figsize=(11, height), layout="constrained", dpi=130
        )
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        for row, method in enumerate(self.methods):
            colour = COLOURS[row % len(COLOURS)]
            shift = 1.02 ** (row - (len(self.methods) - 1) / 2)  # side by side, not on top of each other
            for column, rate in enumerate(self.rates):
                runs = self.cell(method, rate)
                for place, run in enumerate(runs):
                    x = column + (place - (len(runs) - 1) / 2) * 0.7 / max(len(self.seeds), 2)
                    marker, shade = ("o", colour) if run.survived else ("x", "#c0392b")
                    left.plot(x, row, marker, color=shade, markersize=5, markeredgewidth=1.4)
                    if run.best is not None:
                        right.plot(rate * shift, run.best, marker, color=colour, markersize=3.5, alpha=0.6)
                text = _of(self.survivors(method, rate))
                left.annotate(text, (column, row + 0.3), ha="center", va="center", fontsize=8)
            best = self._median_best(method)
            right.plot([rate * shift for rate in best], list(best.values()), color=colour, linewidth=1.4, label=method)
        rates = [rate_text(rate) for rate in self.rates]
        left.set_xticks(range(len(rates)), rates)
        left.set_yticks(range(len(self.methods)), list(self.methods))
        left.set(xlim=(-0.5, len(rates) - 0.5), ylim=(len(self.methods) - 0.4, -0.5), xlabel="learning rate")
        left.set_title("Each mark is a run: ● survived, × collapsed", fontsize=9)
        if self.your_rate is not None and self.rates[0] <= self.your_rate <= self.rates[-1]:
            right.axvline(self.your_rate, color="#999999", linestyle=":", label="your rate")
        right.set(xscale="log", xlabel="learning rate", ylabel="smallest smoothed loss")
        right.set_xticks(list(self.rates), rates)
        right.minorticks_off()
        right.set_title("Loss reached (× collapsed later), median as a line", fontsize=9)
        right.legend(frameon=False, fontsize=8)
        figure.suptitle(self.title or None, fontsize=10)
        if path is not None:
            content = io.BytesIO()
            figure.savefig(content, format="png")
            write_bytes(Path(path), content.getvalue())
        return figure


def rate_text(rate: float) -> str:
    """1.1e-2, as people write rates."""
    mantissa, _, exponent = f"{rate:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _falling(shares: Sequence[float]) -> list[float]:
    """The closest sequence that never rises (pool adjacent violators; equal weights)."""
    pools: list[tuple[float, int]] = []
    for share in shares:
        pools.append((share, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return [share for share, count in pools for _ in range(count)]


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]}"


def _all(counts: tuple[int, int]) -> bool:
    return counts[1] > 0 and counts[0] == counts[1]
