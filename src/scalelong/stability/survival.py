"""Who survives at which learning rate: the result of `rate_range`, in numbers, words and a picture.

Every run has an outcome. The rate at which half of the runs survive is read off the share of survivors by rate, made
monotone (the more a network is asked to bear, the fewer bear it) and interpolated in log(rate). Its interval comes from
drawing seeds anew. Whether two methods differ is a test on pairs of equal seeds, by flipping signs, with Holm's
correction for the number of methods. So the sentence at the end is computed, and says so when there is no difference.
"""

import bisect
import io
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from os import PathLike
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..console import listed, text_table
from ..errors import InvalidConfigError, MissingDependencyError
from ..files import fitting, in_words, make_folder, parse_json, write_bytes, write_text
from .advice import MERGE_NORM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = 1
LOADED = (
    "methods",
    "rates",
    "seeds",
    "runs",
    "steps",
    "warmup",
    "reference_loss",
    "rule",
    "your_rate",
    "title",
    "samples",
)
"""Fields of a range that range.json holds; the rest of that file is computed from them."""
OUTCOMES = ("survived", "collapsed", "not finite", "not learned")
RESAMPLES = 1000
LEVEL = 0.05
"""Below this p-value (Holm's) two methods differ."""
EXACT = 14
"""Up to so many seeds all signs are flipped; for more, a sample of the flips is drawn."""
BEST_LOSS = "best loss: the median of the runs' smallest smoothed losses, at the rate where it is lowest"
PLACES = 3
"""Of more places that left first, the rest is counted."""
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


@dataclass(frozen=True)
class HalfRate:
    """The rate at which half of the runs survive, with an interval of 95 % from the seeds.

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
    _by_cell: dict[tuple[str, float], dict[int, RateRun]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cells: dict[tuple[str, float], dict[int, RateRun]] = {}
        for run in self.runs:
            cells.setdefault((run.method, run.rate), {})[run.seed] = run
        object.__setattr__(self, "_by_cell", cells)

    def __str__(self) -> str:
        title = f"{self.title}\n" if self.title else ""
        return f"{title}{self.table()}\n{BEST_LOSS}\n\n{self.verdict}"

    # Counts

    @property
    def baseline(self) -> str:
        return self.methods[0]

    def cell(self, method: str, rate: float) -> list[RateRun]:
        """The runs of a method at a rate, by seed."""
        found = self._by_cell.get((method, rate), {})
        return [found[seed] for seed in self.seeds if seed in found]

    def survivors(self, method: str, rate: float | None = None) -> tuple[int, int]:
        """How many runs survived, of how many: at one rate, or at all of them."""
        runs = [run for each in ([rate] if rate is not None else self.rates) for run in self.cell(method, each)]
        return sum(run.survived for run in runs), len(runs)

    def _share(self, method: str, rate: float, seeds: Sequence[int]) -> float | None:
        """The share of survivors among these seeds; None where a rate is too low to have learned anything yet."""
        found = self._by_cell.get((method, rate), {})
        chosen = [found[seed] for seed in seeds if seed in found]
        if rate < self._slowest(method):
            chosen = [run for run in chosen if run.outcome != "not learned"]
        return sum(run.survived for run in chosen) / len(chosen) if chosen else None

    def _slowest(self, method: str) -> float:
        """The smallest rate with a survivor. Below it a run that has not learned is slow, not broken."""
        return next((rate for rate in self.rates if self.survivors(method, rate)[0]), 0.0)

    # The rate at which half of the runs survive

    @cached_property
    def half_rates(self) -> tuple[HalfRate, ...]:
        return tuple(self._half(method) for method in self.methods)

    def _half(self, method: str) -> HalfRate:
        rate = self._crossing(method, self.seeds)
        source = random.Random(0)
        drawn = sorted(self._crossing(method, source.choices(self.seeds, k=len(self.seeds))) for _ in range(RESAMPLES))
        low, high = drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)]
        if math.isfinite(rate):
            # Where all runs survive one rate and none the next, seeds do not vary, but the truth lies between the two.
            above = bisect.bisect_left(self.rates, rate)
            shares = [self._share(method, each, self.seeds) for each in self.rates]
            if above > 0 and shares[above - 1] == 1.0 and shares[above] == 0.0:
                low, high = min(low, self.rates[above - 1]), max(high, self.rates[above])
        text = self._half_text(rate, low, high)
        rate_, low_, high_ = (value if 0 < value < math.inf else None for value in (rate, low, high))
        return HalfRate(method, rate_, low_, high_, text)

    def _crossing(self, method: str, seeds: Sequence[int]) -> float:
        """The rate at which the monotone share of survivors falls through one half; 0 below all tried, inf above."""
        points = [(rate, share) for rate in self.rates if (share := self._share(method, rate, seeds)) is not None]
        shares = _falling([share for _, share in points])
        if not points or shares[0] < 0.5:
            return 0.0
        for (left, _), (right, _), p, q in zip(points, points[1:], shares, shares[1:], strict=False):
            if q < 0.5 <= p:
                return math.exp(math.log(left) + (p - 0.5) / (p - q) * math.log(right / left))
        return points[-1][0] if shares[-1] == 0.5 else math.inf

    def _half_text(self, rate: float, low: float, high: float) -> str:
        if rate == 0.0:
            return f"below {rate_text(self.rates[0])}"
        if rate == math.inf:
            return f"above {rate_text(self.rates[-1])}"
        least = rate_text(low) if low > 0 else f"below {rate_text(self.rates[0])}"
        most = rate_text(high) if high < math.inf else f"above {rate_text(self.rates[-1])}"
        return f"{rate_text(rate)} [{least}, {most}]"

    # Differences between methods

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Every other method against the baseline."""
        raw = {method: self._p_value(method, self.baseline) for method in self.methods[1:]}
        corrected, largest = {}, 0.0
        for position, method in enumerate(sorted(raw, key=lambda name: raw[name])):
            largest = max(largest, min(1.0, raw[method] * (len(raw) - position)))
            corrected[method] = largest
        return tuple(
            Difference(method, *self._both(method)[:2], self._both(method)[2], corrected[method])
            for method in self.methods[1:]
        )

    def _pairs(self, method: str, other: str) -> list[tuple[RateRun, RateRun]]:
        cells = self._by_cell
        return [
            (cells[method, rate][seed], cells[other, rate][seed])
            for seed in self.seeds
            for rate in self.rates
            if seed in cells.get((method, rate), {}) and seed in cells.get((other, rate), {})
        ]

    def _both(self, method: str) -> tuple[int, int, int]:
        pairs = self._pairs(method, self.baseline)
        return sum(a.survived for a, _ in pairs), sum(b.survived for _, b in pairs), len(pairs)

    def _p_value(self, method: str, other: str) -> float:
        """Two-sided, exact up to EXACT seeds: the share of sign flips of the seeds with as large a difference."""
        totals: Counter[int] = Counter()
        for mine, theirs in self._pairs(method, other):
            totals[mine.seed] += mine.survived - theirs.survived
        values = [value for value in totals.values() if value]
        observed = abs(sum(values))
        if not observed:
            return 1.0
        if len(values) <= EXACT:
            flips = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in _signs(len(values))]
        else:
            source = random.Random(0)
            flips = [abs(sum(source.choice((-1, 1)) * value for value in values)) for _ in range(10_000)]
        return sum(flip >= observed for flip in flips) / len(flips)

    @property
    def seeds_needed(self) -> int:
        """The fewest seeds with which a difference could be told from chance."""
        return math.ceil(1 + math.log2(max(1, len(self.methods) - 1) / LEVEL))

    # Words

    @cached_property
    def verdict(self) -> str:
        """What to do, in sentences that follow from the counts."""
        if not self.runs:
            return "No run is finished yet."
        parts = [self._judgement()]
        if self.your_rate is not None:
            parts.append(self._at_your_rate(self.your_rate))
        return " ".join(parts)

    def _judgement(self) -> str:
        counted = "; ".join(f"{method} {_of(self.survivors(method))}" for method in self.methods)
        if len(self.methods) == 1:
            half = self.half_rates[0]
            return f"Half of the runs of {half.method} survive: {half.text} (survivors at all rates: {counted})."
        if len(self.seeds) < self.seeds_needed:
            count = "one seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
            return (
                f"Cannot be judged with {count}: {self.seeds_needed} or more can tell {len(self.methods)} methods from "
                f"chance. Survivors so far: {counted}."
            )
        better = [entry for entry in self.differences if entry.differs and entry.survived > entry.baseline_survived]
        worse = [entry for entry in self.differences if entry.differs and entry.survived < entry.baseline_survived]
        if not better and not worse:
            return f"No difference that {len(self.seeds)} seeds can show: {counted} runs survive.{self._edge()}"
        parts = []
        if better:
            best = self._best(better)
            also = [entry.method for entry in better if entry is not best]
            parts.append(f"{self._advantage(best.method)}{self._advice(best.method)}")
            if also:
                parts.append(f"More survive as well with {listed(also)}.")
        if worse:
            parts.append(f"Fewer survive with {listed([entry.method for entry in worse])} than with {self.baseline}.")
        same = [entry.method for entry in self.differences if not entry.differs]
        if same:
            parts.append(f"No difference that {len(self.seeds)} seeds can show with {listed(same)}.")
        return f"{' '.join(parts)} Survivors: {counted}."

    def _best(self, better: list[Difference]) -> Difference:
        """The method with the most survivors; merge_norm, which lasts, or a start, which costs nothing, unless seeds
        show that it has fewer."""
        most = max(better, key=lambda entry: entry.survived)
        for preferred in ("merge_norm", "start:"):
            some = [entry for entry in better if entry.method.startswith(preferred)]
            equal = [entry for entry in some if self._p_value(most.method, entry.method) >= LEVEL]
            if equal:
                return max(equal, key=lambda entry: entry.survived)
        return most

    def _advantage(self, method: str) -> str:
        if len(self.rates) == 1:
            # The counts follow at the end: this sentence is what other seeds should say as well.
            return f"At a rate of {rate_text(self.rates[0])} more runs survive with {method} than with {self.baseline}."
        halves = {entry.method: entry for entry in self.half_rates}
        return (
            f"Half of the runs survive {self._bound(halves[method])} with {method} and "
            f"{self._bound(halves[self.baseline])} with {self.baseline}."
        )

    def _bound(self, half: HalfRate) -> str:
        if half.rate is not None:
            return rate_text(half.rate)
        at_most = half.text.startswith("below")
        return f"less than {rate_text(self.rates[0])}" if at_most else f"more than {rate_text(self.rates[-1])}"

    def _advice(self, method: str) -> str:
        kind, _, spec = method.partition(":")
        call = {"start": f'start_skips_(model, "{spec}")', "merge_norm": MERGE_NORM}.get(kind)
        safe = [rate for rate in self.rates if _all(self.survivors(self.baseline, rate))]
        if call is None:
            return ""
        if safe and safe == list(self.rates[: len(safe)]):
            return (
                f" Call {call} before the first step, or stay at {rate_text(safe[-1])} or below, where all survive "
                f"without it."
            )
        return f" Call {call} before the first step, or lower the rate."

    def _edge(self) -> str:
        everyone = [self.survivors(method) for method in self.methods]
        if all(map(_all, everyone)):
            return f" All of them up to {rate_text(self.rates[-1])}: higher rates may show one."
        if not any(alive for alive, _ in everyone):
            return f" None of them from {rate_text(self.rates[0])} on: lower rates may show one."
        return ""

    def _at_your_rate(self, yours: float) -> str:
        named = f"your rate of {rate_text(yours)}"
        above = [rate for rate in self.rates if rate >= yours]
        if not above:
            return f"All of these rates lie below {named}."
        if all(_all(self.survivors(method, above[0])) for method in self.methods):
            place = "" if above[0] == yours else f" (and at {rate_text(above[0])})"
            return f"At {named}{place} nothing differs: all runs survive."
        counted = ", ".join(f"{_of(self.survivors(method, above[0]))} with {method}" for method in self.methods)
        place = "At" if above[0] == yours else f"At {rate_text(above[0])}, the next rate above"
        return f"{place} {named}, {counted} survive."

    # Table

    def rows(self) -> list[dict[str, str]]:
        """A row per method: survivors at each rate, the rate that half survive, the loss reached, what left first."""
        return [
            {
                "method": method,
                **{rate_text(rate): _of(self.survivors(method, rate)) for rate in self.rates},
                **({"half survive": half.text} if len(self.rates) > 1 else {}),
                "best loss (at)": self._best_loss(method),
                "left first": self._left_first_text(method),
            }
            for method, half in zip(self.methods, self.half_rates, strict=True)
        ]

    def table(self) -> str:
        return text_table(self.rows())

    def _best_loss(self, method: str) -> str:
        """As BEST_LOSS says."""
        found = self._median_best(method)
        if not found:
            return "-"
        rate = min(found, key=lambda each: found[each])
        return f"{found[rate]:.3g} ({rate_text(rate)})"

    def _median_best(self, method: str) -> dict[float, float]:
        """The median over seeds of the smallest loss, by rate."""
        return {
            rate: median(values)
            for rate in self.rates
            if (values := [run.best for run in self.cell(method, rate) if run.best is not None])
        }

    def left_first(self, method: str) -> Counter[str]:
        """Which block or skip left its level first, over the collapsed runs of the method."""
        return Counter(
            run.left_first["where"] for run in self.runs if run.method == method and run.left_first is not None
        )

    def _left_first_text(self, method: str) -> str:
        """The most common place of the lost runs; all of them where several are equally common."""
        lost = sum(run.method == method and not run.survived for run in self.runs)
        counts = self.left_first(method)
        most = max(counts.values(), default=0)
        places = [place for place, count in counts.items() if count == most]
        each = " each" if len(places) > 1 else ""
        return f"{listed(places, PLACES)} ({most} of {lost}{each})" if places else "-"

    # Files

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "title": self.title,
            "verdict": self.verdict,
            "baseline": self.baseline,
            "methods": list(self.methods),
            "rates": list(self.rates),
            "seeds": list(self.seeds),
            "your_rate": self.your_rate,
            "steps": self.steps,
            "warmup": self.warmup,
            "reference_loss": self.reference_loss,
            "rule": self.rule,
            "cells": [self._cell_dict(method, rate) for method in self.methods for rate in self.rates],
            "half": [asdict(half) for half in self.half_rates],
            "left_first": [
                {
                    "method": method,
                    "counts": dict(self.left_first(method).most_common()),
                    "collapsed": sum(run.method == method and not run.survived for run in self.runs),
                }
                for method in self.methods
            ],
            "differences": [asdict(entry) for entry in self.differences],
            "samples": list(self.samples),
            "runs": [asdict(run) for run in self.runs],
        }

    def _cell_dict(self, method: str, rate: float) -> dict[str, Any]:
        found = self._by_cell.get((method, rate), {})
        runs = [found.get(seed) for seed in self.seeds]
        outcomes = Counter(run.outcome for run in runs if run is not None)
        return {
            "method": method,
            "rate": rate,
            "survived": outcomes["survived"],
            "runs": sum(outcomes.values()),
            "outcomes": {outcome: outcomes[outcome] for outcome in OUTCOMES},
            "best_loss": [None if run is None else run.best for run in runs],
            "last_loss": [None if run is None else run.last for run in runs],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "RateRange":
        try:
            values = parse_json(text)
            if values["format"] != FORMAT:
                raise InvalidConfigError(
                    f"the range has format {values['format']}, this version reads {FORMAT}: make it anew "
                    f"with `scalelong range`"
                )
            found = cls(
                **{name: tuple(values[name]) for name in ("methods", "rates", "seeds", "samples")},
                **{name: values[name] for name in ("steps", "warmup", "reference_loss", "rule", "your_rate", "title")},
                runs=tuple(fitting(RateRun, run) for run in values["runs"]),
            )
            return fitting(cls, {name: getattr(found, name) for name in LOADED})
        except InvalidConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidConfigError(
                f"this is not a range.json ({in_words(error)}): make it anew with `scalelong range`"
            ) from error

    def save(self, folder: str | PathLike[str]) -> Path:
        """range.json, range.txt and, where matplotlib is installed, range.png. Gives the folder."""
        place = Path(folder)
        make_folder(place)
        write_text(place / "range.json", self.to_json())
        write_text(place / "range.txt", f"{self}\n")
        try:
            self.plot(place / "range.png")
        except MissingDependencyError:
            (place / "range.png").unlink(missing_ok=True)
        return place

    # Picture

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """Rate × method, a mark for every run; and the loss reached at each rate, or the curves at a single rate."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependencyError("matplotlib", "report", "drawing the range of rates") from error
        height = 1.4 + 0.55 * len(self.methods)
        figure = Figure(figsize=(11, max(3.4, height)), layout="constrained", dpi=130)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        self._draw_runs(left)
        self._draw_losses(right) if len(self.rates) > 1 else self._draw_curves(right)
        right.legend(frameon=False, fontsize=8)
        if self.title:
            figure.suptitle(self.title, fontsize=10)
        if path is not None:
            content = io.BytesIO()
            figure.savefig(content, format="png")
            write_bytes(Path(path), content.getvalue())
        return figure

    def _draw_runs(self, axes: "Axes") -> None:
        for row, method in enumerate(self.methods):
            for column, rate in enumerate(self.rates):
                runs = self.cell(method, rate)
                places = [column + (k - (len(runs) - 1) / 2) * 0.7 / max(len(self.seeds), 2) for k in range(len(runs))]
                for alive, marker, colour in ((True, "o", _colour(row)), (False, "x", "#c0392b")):
                    xs = [x for x, run in zip(places, runs, strict=True) if run.survived is alive]
                    axes.plot(xs, [row] * len(xs), marker, color=colour, markersize=5, markeredgewidth=1.4)
                axes.annotate(
                    _of(self.survivors(method, rate)), (column, row + 0.3), ha="center", va="center", fontsize=8
                )
        axes.set_xticks(range(len(self.rates)), [rate_text(rate) for rate in self.rates])
        axes.set_yticks(range(len(self.methods)), list(self.methods))
        axes.set(xlim=(-0.5, len(self.rates) - 0.5), ylim=(len(self.methods) - 0.4, -0.5))
        axes.set_xlabel("learning rate")
        axes.set_title("Each mark is a run: ● survived, × collapsed", fontsize=9)

    def _draw_losses(self, axes: "Axes") -> None:
        for row, method in enumerate(self.methods):
            runs = [run for rate in self.rates for run in self.cell(method, rate) if run.best is not None]
            # Side by side, not on top of each other.
            shift = 1.02 ** (row - (len(self.methods) - 1) / 2)
            for alive in (True, False):
                mine = [(run.rate * shift, run.best) for run in runs if run.survived is alive and run.best]
                axes.plot(
                    [x for x, _ in mine],
                    [y for _, y in mine],
                    "o" if alive else "x",
                    color=_colour(row),
                    markersize=3.5,
                    alpha=0.6,
                )
            lines = [(rate * shift, loss) for rate, loss in self._median_best(method).items()]
            axes.plot([x for x, _ in lines], [y for _, y in lines], color=_colour(row), linewidth=1.4, label=method)
        if self.your_rate is not None and self.rates[0] <= self.your_rate <= self.rates[-1]:
            axes.axvline(self.your_rate, color="#999999", linestyle=":", label="your rate")
        axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="smallest smoothed loss")
        axes.set_xticks(list(self.rates), [rate_text(rate) for rate in self.rates])
        axes.minorticks_off()
        _plain_losses(axes)
        axes.set_title("Loss reached (× collapsed later), median as a line", fontsize=9)

    def _draw_curves(self, axes: "Axes") -> None:
        for row, method in enumerate(self.methods):
            for number, run in enumerate(self.cell(method, self.rates[0])):
                label = method if number == 0 else None
                xs, ys = [step for step, _ in run.curve], [value for _, value in run.curve]
                axes.plot(xs, ys, color=_colour(row), alpha=0.7, linewidth=1, label=label)
                if not run.survived and xs:
                    at = min(range(len(xs)), key=lambda place: abs(xs[place] - (run.onset or xs[-1])))
                    axes.plot(xs[at : at + 1], ys[at : at + 1], "x", color="#c0392b", markersize=6)
        axes.set(yscale="log", xlabel="training step", ylabel="smoothed loss")
        _plain_losses(axes)
        axes.set_title(f"All runs at a rate of {rate_text(self.rates[0])}", fontsize=9)


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


def _signs(count: int) -> list[tuple[int, ...]]:
    return list(product((-1, 1), repeat=count))


def _of(counts: tuple[int, int]) -> str:
    return f"{counts[0]} of {counts[1]}"


def _all(counts: tuple[int, int]) -> bool:
    return counts[1] > 0 and counts[0] == counts[1]


def _colour(position: int) -> str:
    return COLOURS[position % len(COLOURS)]


def _plain_losses(axes: "Axes") -> None:
    """A logarithmic axis over less than two decades has few numbers of its own: give it some between."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    low, high = axes.get_ylim()
    if high < 3 * low:
        axes.set_yscale("linear")
    else:
        axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.tick_params(axis="y", which="both", labelsize=7)
