"""The result of `rate_range`: which runs survived at which learning rate, as a table, a verdict, a picture and JSON.

The rate at which half of the runs survive is read off the share of survivors by rate, made monotone and interpolated in
log(rate). Two methods are compared on pairs of equal seeds by flipping signs, with Holm's correction for the number of
methods. The verdict is computed from these numbers.
"""

import io
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import product
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

    def cell(self, method: str, rate: float) -> list[RateRun]:
        """The runs of a method at a rate, by seed."""
        keys = [(method, rate, seed) for seed in self.seeds]
        return [self._found[key] for key in keys if key in self._found]

    def survivors(self, method: str, rate: float | None = None) -> tuple[int, int]:
        """How many runs survived, of how many: at one rate, or at all of them."""
        runs = [run for each in ([rate] if rate is not None else self.rates) for run in self.cell(method, each)]
        return sum(run.survived for run in runs), len(runs)

    # The rate at which half of the runs survive

    def half_rate(self, method: str) -> float:
        """The rate at which the monotone share of survivors falls through one half; 0 below all tried, inf above."""
        points = self._shares(method)
        shares = _falling([share for _, share in points])
        if not points or shares[0] < 0.5:
            return 0.0
        for (left, _), (right, _), p, q in zip(points, points[1:], shares, shares[1:], strict=False):
            if q < 0.5 <= p:
                return math.exp(math.log(left) + (p - 0.5) / (p - q) * math.log(right / left))
        return points[-1][0] if shares[-1] == 0.5 else math.inf

    def half_text(self, method: str) -> str:
        """The same in words: a rate, or "above" or "below" all that were tried."""
        rate = self.half_rate(method)
        if 0 < rate < math.inf:
            return rate_text(rate)
        return f"above {rate_text(self.rates[-1])}" if rate else f"below {rate_text(self.rates[0])}"

    def _shares(self, method: str) -> list[tuple[float, float]]:
        """(rate, share of survivors). Below the smallest rate with a survivor, what has not learned is only slow."""
        slowest = next((rate for rate in self.rates if self.survivors(method, rate)[0]), 0.0)
        found = []
        for rate in self.rates:
            runs = [run for run in self.cell(method, rate) if rate >= slowest or run.outcome != "not learned"]
            found += [(rate, sum(run.survived for run in runs) / len(runs))] if runs else []
        return found

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
        survivors = "; ".join(f"{method} {_of(self.survivors(method))}" for method in self.methods)
        yours = [] if self.your_rate is None else [self._at_your_rate(self.your_rate)]
        return " ".join([*self._judgement(), f"Survivors: {survivors}.", *yours])

    def _judgement(self) -> list[str]:
        baseline, seeds = self.methods[0], len(self.seeds)
        if len(self.methods) == 1:
            return [f"Half of the runs of {baseline} survive: {self.half_text(baseline)}."]
        needed = math.ceil(1 + math.log2((len(self.methods) - 1) / LEVEL))
        if seeds < needed:
            few = "one seed" if seeds == 1 else f"{seeds} seeds"
            return [f"Cannot be judged with {few}: {needed} or more tell {len(self.methods)} methods from chance."]
        better = [each for each in self.differences if each.differs and each.survived > each.baseline_survived]
        worse = [each.method for each in self.differences if each.differs and each.survived < each.baseline_survived]
        same = [each.method for each in self.differences if not each.differs]
        sentences = []
        if better:
            best = self._best(better)
            sentences += [f"More runs survive with {listed([each.method for each in better])} than with {baseline}."]
            halves = f"{self.half_text(best)} with {best}, {self.half_text(baseline)} with {baseline}"
            sentences += [f"Half of them survive: {halves}."] if len(self.rates) > 1 else []
            sentences += self._advice(best)
        sentences += [f"Fewer survive with {listed(worse)} than with {baseline}."] if worse else []
        return [*sentences, *([f"No difference that {seeds} seeds can show with {listed(same)}."] if same else [])]

    def _best(self, better: list[Difference]) -> str:
        """The method with the most survivors; merge_norm, which lasts, unless seeds show that it has fewer."""
        most = max(better, key=lambda each: each.survived).method
        lasting = [each.method for each in better if each.method.startswith("merge_norm")]
        return next((method for method in lasting if self._p_value(most, method) >= LEVEL), most)

    def _advice(self, method: str) -> list[str]:
        if method.startswith(("start:", "cs", "ls")):
            return [f"That delays a collapse; a norm in each merge lasts (docs/recipe.md): {MERGE_NORM}."]
        if not method.startswith("merge_norm"):
            return []
        lost = [rate for rate in self.rates if not _all(self.survivors(self.methods[0], rate))]
        safe = [rate for rate in self.rates if rate < min(lost, default=math.inf)]
        stay = f"stay at {rate_text(safe[-1])} or below, where all survive without it" if safe else "lower the rate"
        return [f"Call {MERGE_NORM} before the first step, or {stay}."]

    def _at_your_rate(self, yours: float) -> str:
        above = next((rate for rate in self.rates if rate >= yours), None)
        if above is None:
            return f"All of these rates lie below your rate of {rate_text(yours)}."
        place = "" if above == yours else f" (counted at {rate_text(above)}, the next one above)"
        counted = ", ".join(f"{_of(self.survivors(method, above))} with {method}" for method in self.methods)
        return f"At your rate of {rate_text(yours)}{place} {counted} survive."

    # Table

    def rows(self) -> list[dict[str, str]]:
        """A row per method: survivors at each rate, the rate that half survive, the loss reached, what left first."""
        rows = []
        for method in self.methods:
            best = self._median_best(method)
            at = min(best, key=lambda rate: best[rate], default=0.0)
            row = {"method": method} | {rate_text(rate): _of(self.survivors(method, rate)) for rate in self.rates}
            row |= {"half survive": self.half_text(method)} if len(self.rates) > 1 else {}
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
