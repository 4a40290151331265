"""Best rate against best rate: at one rate for all, a method may only like that rate better."""

import math

from .compare import Comparison
from .curves import Curve, mean, read_curves, steps_ratio
from .runs import PlannedRun
from .summary import baseline_of, ratio_text, spread


def best_rate_rows(found: dict[float, Comparison]) -> list[dict[str, str]]:
    """A row per method: its best rate by the mean loss, and the steps to where the baseline ends at its own."""
    rates = sorted(found)
    methods = [entry.method for entry in found[rates[0]].summaries]
    base = baseline_of(methods)
    best = {method: min(rates, key=lambda rate: _loss(found[rate], method)) for method in methods}
    curves = {method: _curves(found[best[method]], method) for method in methods}
    rows = []
    for method in methods:
        ratios = [
            steps_ratio(curve, curves[base][seed]) for seed, curve in curves[method].items() if seed in curves[base]
        ]
        rows.append(
            {
                "method": method,
                "best rate": _named(best[method], rates),
                "held-out loss there": spread([curve.values[-1] for curve in curves[method].values()], "{:.4f}"),
                f"steps to {base}'s loss at its best rate": "1 (baseline)" if method == base else ratio_text(ratios),
                "rates at which all seeds learned": " ".join(f"{r:g}" for r in rates if _all_well(found[r], method))
                or "none",
            }
        )
    return rows


def _named(rate: float, rates: list[float]) -> str:
    """A best rate at an end of those that were tried says that the best of all may lie beyond it."""
    if len(rates) > 1 and rate in (rates[0], rates[-1]):
        return f"{rate:g} (the {'smallest' if rate == rates[0] else 'largest'} tried)"
    return f"{rate:g}"


def _runs(comparison: Comparison, method: str) -> list[PlannedRun]:
    return [run for run in comparison.runs if run.method == method]


def _curves(comparison: Comparison, method: str) -> dict[int, Curve]:
    """Held-out losses by seed."""
    read = {run.seed: read_curves(run.folder).get("held_out_loss") for run in _runs(comparison, method)}
    return {seed: curve for seed, curve in read.items() if curve}


def _loss(comparison: Comparison, method: str) -> float:
    """The mean over seeds at the end; a seed that diverged has none, so that its rate is never the best."""
    if any(run.divergence() is not None for run in _runs(comparison, method)):
        return math.inf
    return mean([curve.values[-1] for curve in _curves(comparison, method).values()] or [math.inf])


def _all_well(comparison: Comparison, method: str) -> bool:
    return not any(entry.collapsed or entry.diverged for entry in comparison.summaries if entry.method == method)
