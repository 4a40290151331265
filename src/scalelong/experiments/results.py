"""The results of runs as rows, sentences and intervals: compare, the report and `research/` use them.

    results = Results([read_run(folder) for folder in folders])
    print(results)

`Results` selects records, pairs them by seed and summarises them by method. Nothing here needs torch: a report of a
long run should be there in a second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist, fmean, stdev

from ..console import text_table
from .records import BASELINE, Curve, RunRecord, steps_ratio

# Many runs


def baseline_of(methods: Sequence[str]) -> str:
    """The method that the others are measured against: "none", or else the first."""
    return BASELINE if BASELINE in methods else methods[0]


@dataclass(frozen=True)
class MethodSummary:
    """What became of one method. Lists have an entry per seed; None stands for what does not exist.

    The fields are those of comparison.json.
    """

    method: str
    seeds: list[int]
    held_out_loss: list[float | None]
    """At `step`, the last step that all runs reached."""
    step: int
    steps_ratio: list[float | None]
    """Steps to the baseline's loss, relative to the baseline of the same seed."""
    coefficients: list[float]
    """κ_i at the end, mean over seeds."""
    seconds_per_step: float | None
    diverged: list[int]
    """Seeds whose numbers stopped being finite."""
    collapsed: list[int]
    """Seeds whose loss went up again for good."""
    frechet: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Results:
    """Records of runs: selected, paired and summarised."""

    runs: Sequence[RunRecord]

    def of(self, method: str, setting: str | None = None) -> list[RunRecord]:
        """The runs of a method, in the order of their seeds."""
        found = [run for run in self.runs if run.method == method and setting in (None, run.setting)]
        return sorted(found, key=lambda run: run.seed)

    def methods(self, setting: str | None = None) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs if setting in (None, run.setting)))

    @property
    def baseline(self) -> str:
        return baseline_of(self.methods())

    def pairs(self, method: str, other: str, setting: str | None = None) -> list[tuple[RunRecord, RunRecord]]:
        """Runs of two methods under equal seeds."""
        theirs = {run.seed: run for run in self.of(other, setting)}
        return [(run, theirs[run.seed]) for run in self.of(method, setting) if run.seed in theirs]

    @property
    def last_common_step(self) -> int:
        return min((run.held_out.steps[-1] for run in self.runs if len(run.held_out)), default=0)

    @cached_property
    def summaries(self) -> list[MethodSummary]:
        """A row per method, over all seeds."""
        return [self._summary(method) for method in self.methods()]

    def mean_loss(self, method: str) -> float:
        """The mean over seeds at the end; infinite where a seed diverged, so that its rate is never the best."""
        runs = self.of(method)
        if any(run.diverged is not None for run in runs):
            return math.inf
        return fmean([run.held_out.values[-1] for run in runs if len(run.held_out)] or [math.inf])

    def __str__(self) -> str:
        return text_table(table_rows(self.summaries))

    def _summary(self, method: str) -> MethodSummary:
        runs = [run for run in self.runs if run.method == method]
        baselines = {run.seed: run.held_out for run in self.of(self.baseline)}
        count = len(runs[0].kappas)
        paces = sorted(value for run in runs for value in run.curves.get("seconds_per_step", Curve()).values)
        return MethodSummary(
            method=method,
            seeds=[run.seed for run in runs],
            held_out_loss=[run.held_out.at(self.last_common_step) for run in runs],
            step=self.last_common_step,
            steps_ratio=[steps_ratio(run.held_out, baselines.get(run.seed, Curve())) for run in runs],
            coefficients=[fmean(run.kappas[i] for run in runs if len(run.kappas) > i) for i in range(count)],
            # The median: a machine that others use as well makes single records slow.
            seconds_per_step=paces[len(paces) // 2] if paces else None,
            diverged=[run.seed for run in runs if run.diverged is not None],
            collapsed=[run.seed for run in runs if run.collapsed],
            frechet=[run.frechet for run in runs],
        )


# Tables


def table_rows(summaries: Sequence[MethodSummary]) -> list[dict[str, str]]:
    scored = any(score is not None for entry in summaries for score in entry.frechet)
    lost = [kind for kind in ("diverged", "collapsed") if any(getattr(entry, kind) for entry in summaries)]
    base = baseline_of([entry.method for entry in summaries])
    scaled = any(value != 1 for entry in summaries for value in entry.coefficients)
    return [
        {
            "method": entry.method,
            f"held-out loss, step {entry.step}": spread(entry.held_out_loss, "{:.4f}"),
            **({"Fréchet distance": spread(entry.frechet, "{:.2f}")} if scored else {}),
            f"steps to {base}'s loss": "1 (baseline)" if entry.method == base else ratio_text(entry.steps_ratio),
            "ms/step": "-" if entry.seconds_per_step is None else f"{1000 * entry.seconds_per_step:.0f}",
            **({"κ_1 ... κ_N": " ".join(f"{value:.2f}" for value in entry.coefficients) or "-"} if scaled else {}),
            **{kind: ", ".join(f"seed {seed}" for seed in getattr(entry, kind)) or "-" for kind in lost},
        }
        for entry in summaries
    ]


def spread(values: Sequence[float | None], form: str) -> str:
    """The mean, and the range if there are several seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return form.format(known[0])
    return f"{form.format(fmean(known))} ({form.format(min(known))} to {form.format(max(known))})"


def ratio_text(ratios: Sequence[float | None]) -> str:
    reached = [ratio for ratio in ratios if ratio is not None]
    missing = len(ratios) - len(reached)
    text = "× " + spread(reached, "{:.2f}") if reached else ""
    if missing:
        text += f"{', ' if text else ''}not reached" + (
            f" by {missing} of {len(ratios)} seeds" if len(ratios) > 1 else ""
        )
    return text


# Intervals, and what the runs say in a sentence

# The 95 % quantile of Student's t for 1, 2, ... degrees of freedom.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)


def student_t(freedom: int) -> float:
    """Beyond the table by the first terms of an expansion around the normal's quantile z: right to three digits."""
    if freedom <= len(T_95):
        return T_95[freedom - 1]
    z = NormalDist().inv_cdf(0.95)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the mean lies with 90 % confidence; everywhere, for fewer than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def fisher_p(survived: int, runs: int, other_survived: int, other_runs: int) -> float:
    """Fisher's exact test, two-sided: how often chance alone divides the survivors at least this unevenly."""
    total, alive = runs + other_runs, survived + other_survived

    def chance(count: int) -> float:
        return math.comb(runs, count) * math.comb(other_runs, alive - count) / math.comb(total, alive)

    possible = range(max(0, alive - other_runs), min(runs, alive) + 1)
    seen = chance(survived) * (1 + 1e-9)
    return min(1.0, sum(chance(count) for count in possible if chance(count) <= seen))


CHANCE = 0.05


def verdict(results: Results) -> list[str]:
    """What the runs say, in sentences that are computed from them: who survived, and who ends lower than the baseline.

    Losses are compared under equal seeds, by the logarithm of their ratio, with its 90 % interval (Student's t).
    """
    methods = [method for method in results.methods() if results.of(method)]
    if not methods:
        return []
    sentences = [_survivors(results, methods)]
    for method in methods:
        if method != results.baseline:
            sentences += _against(results, method, results.baseline)
    running = sum(not run.finished for run in results.runs)
    if running and len(results.runs) > 1:
        many = f"{running} run{'s' * (running > 1)}"
        sentences.append(f"{many} of {len(results.runs)} not finished: this is what is there so far.")
    return sentences


def _survivors(results: Results, methods: Sequence[str]) -> str:
    runs = list(results.runs)
    if len(runs) == 1:
        (run,) = runs
        if run.survived:
            last = run.held_out.last
            if run.finished:
                ends = "" if last is None else f" and ends with a held-out loss of {last:.4g}"
                return f"Your run did not collapse{ends}."
            known = "" if last is None else f"; its held-out loss is {last:.4g}"
            return f"Your run is not finished. It has not collapsed so far{known}."
        how = "collapsed" if run.diverged is None else "diverged: its numbers stopped being finite"
        return f"Your run {how}."
    if all(run.survived for run in runs):
        return f"All {len(runs)} runs survived: none diverged and none collapsed."
    counts = [(method, _alive(results.of(method)), len(results.of(method))) for method in methods]
    return "Survivors: " + ", ".join(f"{method} {alive} of {count}" for method, alive, count in counts) + "."


def _alive(runs: Sequence[RunRecord]) -> int:
    return sum(run.survived for run in runs)


def _against(results: Results, method: str, base: str) -> list[str]:
    mine, theirs = results.of(method), results.of(base)
    sentences: list[str] = []
    alive, other = _alive(mine), _alive(theirs)
    lost = alive < len(mine) or other < len(theirs)
    if lost and min(len(mine), len(theirs)) > 1:
        p = fisher_p(alive, len(mine), other, len(theirs))
        counts = f"{alive} of {len(mine)} against {other} of {len(theirs)}"
        more = "more" if alive / len(mine) > other / len(theirs) else "less"
        if p < CHANCE:
            said = f"{method} survives {more} often than {base}: {counts}"
        else:
            said = f"Whether {method} survives more often than {base} cannot be decided from {counts}"
        sentences.append(f"{said} (Fisher's exact test, p = {p:.2g}).")
    pairs = [
        (one.held_out.at(results.last_common_step), two.held_out.at(results.last_common_step))
        for one, two in results.pairs(method, base)
        if one.survived and two.survived
    ]
    logs = [math.log(one / two) for one, two in pairs if one and two and one > 0 and two > 0]
    if logs:
        sentences.append(_difference(method, base, logs))
    elif not lost:
        sentences.append(f"{method} and {base} have no seed in common that could be compared.")
    return sentences


def _difference(method: str, base: str, logs: Sequence[float]) -> str:
    middle, (low, high) = fmean(logs), interval(logs)
    ends = f"{method} ends {100 * abs(math.expm1(middle)):.1f} % {'below' if middle < 0 else 'above'} {base}"
    if len(logs) < 2:
        return f"One seed cannot be judged: there {ends} in held-out loss."
    span = f"90 % interval {100 * math.expm1(low):+.1f} % to {100 * math.expm1(high):+.1f} %, {len(logs)} seeds"
    if low <= 0 <= high:
        return f"No difference can be seen between {method} and {base} in held-out loss ({span})."
    return f"{ends} in held-out loss ({span})."
