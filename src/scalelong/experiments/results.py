"""Curves of a run, read back from its metrics, and the questions that a comparison asks of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..runs.folder import read_metrics
from ..stability import Oscillation, oscillation
from .runs import PlannedRun

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


# The table of a comparison: one row per method, over all seeds.

BASELINE = "none"


@dataclass(frozen=True)
class MethodSummary:
    """What became of one method. Lists have an entry per seed; None stands for what does not exist."""

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
    oscillation: list[Oscillation]
    """Of the features on the probe batch, over all blocks: mean O1, O2, O3 and the highest peak."""
    frechet: list[float | None] = field(default_factory=list)
    """Fréchet distance of the samples at the end, where it was measured."""


def summarise(runs: Sequence[PlannedRun]) -> list[MethodSummary]:
    curves = {(run.method, run.seed): read_curves(run.folder) for run in runs}
    step = _last_common_step(list(curves.values()))
    methods = list(dict.fromkeys(run.method for run in runs))
    base = baseline_of(methods)
    return [_summary(method, base, [run for run in runs if run.method == method], curves, step) for method in methods]


def baseline_of(methods: Sequence[str]) -> str:
    """The method that the others are measured against: "none", or else the first."""
    return BASELINE if BASELINE in methods else methods[0]


def _summary(
    method: str, base: str, runs: list[PlannedRun], curves: dict[tuple[str, int], dict[str, Curve]], step: int
) -> MethodSummary:
    mine = [curves[method, run.seed] for run in runs]
    held_out = [found.get("held_out_loss", Curve((), ())) for found in mine]
    baselines = [curves.get((base, run.seed), {}).get("held_out_loss", Curve((), ())) for run in runs]
    return MethodSummary(
        method=method,
        seeds=[run.seed for run in runs],
        held_out_loss=[curve.at(step) for curve in held_out],
        step=step,
        steps_ratio=[steps_ratio(curve, base) for curve, base in zip(held_out, baselines, strict=True)],
        coefficients=_coefficients(mine),
        seconds_per_step=_average([found["seconds_per_step"].values for found in mine if "seconds_per_step" in found]),
        diverged=[run.seed for run in runs if run.divergence() is not None],
        collapsed=[run.seed for run, curve in zip(runs, held_out, strict=True) if curve.collapsed],
        oscillation=[block_oscillation(found) for found in mine],
        frechet=[found["frechet"].values[-1] if "frechet" in found else None for found in mine],
    )


def block_oscillation(curves: dict[str, Curve]) -> Oscillation:
    """The scores of all blocks of one run together. A gate that closes for one block closes for the run."""
    held_out = curves.get("held_out_loss")
    loss = held_out.values[-1] if held_out else None
    series = [curve.values for name, curve in curves.items() if name.startswith("probe_block_rms/")]
    scores = [oscillation(values, loss=loss) for values in series]
    if not scores:
        return Oscillation(math.nan, math.nan, math.nan, math.nan, 0, "nothing was recorded")
    return Oscillation(
        o1=mean([score.o1 for score in scores]),
        o2=mean([score.o2 for score in scores]),
        o3=mean([score.o3 for score in scores]),
        peak=max(score.peak for score in scores),
        readings=scores[0].readings,
        gate=next((score.gate for score in scores if score.gate), ""),
    )


def _last_common_step(runs: list[dict[str, Curve]]) -> int:
    ends = [found["held_out_loss"].steps[-1] for found in runs if "held_out_loss" in found]
    return min(ends, default=0)


def _coefficients(runs: list[dict[str, Curve]]) -> list[float]:
    names = sorted((name for name in runs[0] if name.startswith("kappa/")), key=lambda name: int(name.split("/")[1]))
    return [mean([found[name].values[-1] for found in runs if name in found]) for name in names]


def _average(series: list[tuple[float, ...]]) -> float | None:
    values = [value for values in series for value in values]
    # The median: a machine that others use as well makes single records slow.
    return sorted(values)[len(values) // 2] if values else None


def table_rows(summaries: Sequence[MethodSummary]) -> list[dict[str, str]]:
    scored = any(score is not None for entry in summaries for score in entry.frechet)
    base = baseline_of([entry.method for entry in summaries])
    return [
        {
            "method": entry.method,
            f"held-out loss, step {entry.step}": spread(entry.held_out_loss, "{:.4f}"),
            **({"Fréchet distance": spread(entry.frechet, "{:.2f}")} if scored else {}),
            f"steps to {base}'s loss": "1 (baseline)" if entry.method == base else ratio_text(entry.steps_ratio),
            "ms/step": "-" if entry.seconds_per_step is None else f"{1000 * entry.seconds_per_step:.0f}",
            "κ_1 ... κ_N": " ".join(f"{value:.2f}" for value in entry.coefficients) or "-",
            **_oscillation_cells(entry.oscillation),
            **_lost(entry, summaries),
        }
        for entry in summaries
    ]


def _lost(entry: MethodSummary, summaries: Sequence[MethodSummary]) -> dict[str, str]:
    """Seeds that diverged or collapsed, if there are any."""
    kinds = [kind for kind in ("diverged", "collapsed") if any(getattr(other, kind) for other in summaries)]
    return {kind: ", ".join(f"seed {seed}" for seed in getattr(entry, kind)) or "-" for kind in kinds}


def _oscillation_cells(scores: Sequence[Oscillation]) -> dict[str, str]:
    valid = [score for score in scores if score.valid]
    return {
        "O1": spread([score.o1 for score in valid], "{:.2g}"),
        "O2": spread([score.o2 for score in valid], "{:.2g}"),
        "O3": spread([score.o3 for score in valid], "{:.2g}"),
        "peak": spread([score.peak for score in valid], "{:.2f}"),
    }


def spread(values: Sequence[float | None], form: str) -> str:
    """The mean, and the range if there are several seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return form.format(known[0])
    return f"{form.format(mean(known))} ({form.format(min(known))} to {form.format(max(known))})"


def ratio_text(ratios: Sequence[float | None]) -> str:
    reached = [ratio for ratio in ratios if ratio is not None]
    missing = len(ratios) - len(reached)
    text = "× " + spread(reached, "{:.2f}") if reached else ""
    if missing:
        text += f"{', ' if text else ''}not reached" + (
            f" by {missing} of {len(ratios)} seeds" if len(ratios) > 1 else ""
        )
    return text
