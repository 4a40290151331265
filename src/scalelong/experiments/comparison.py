"""Methods side by side: the same recipe and the same seeds, with different scalings."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from ..config import TrainConfig
from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_text
from ..runs import is_uvit, load_run, with_width
from ..stability import oscillation
from ..theory import noise_gain
from .engines import Engine
from .figures import draw_comparison
from .plan import (
    PlannedRun,
    Variant,
    as_variant,
    diagnose_config,
    noisy_probe,
    plan_runs,
    require_same,
    write_diagnosis,
)
from .records import CONTROL, DIAGNOSIS, read_curves, steps_ratio
from .results import MethodSummary, Results, baseline_of, level_rows, ratio_text, spread, table_rows
from .sweeps import run_all

COMMANDS = "commands.txt"
"""The command lines that made the runs of a folder."""
RECORDS = 250
"""Roughly how many readings of features and coefficients a run keeps."""


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison and what became of them."""

    out: Path
    runs: list[PlannedRun]
    results: Results

    @cached_property
    def summaries(self) -> list[MethodSummary]:
        return self.results.summaries()

    def __str__(self) -> str:
        levels = level_rows(self.results)
        named = f"\n\nheld-out loss by noise level (bounds of log-SNR):\n{text_table(levels)}" if levels else ""
        return f"{text_table(table_rows(self.summaries))}{named}"


def compare(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: str | PathLike[str],
    *,
    every: int | None = None,
    jobs: int | None = None,
    engine: Engine | None = None,
    on_start: Callable[[list[PlannedRun]], None] | None = None,
) -> Comparison | None:
    """Train every method with every seed; runs that are finished are not repeated. None if not all are finished now:
    it was interrupted, or its jobs are only submitted.

    A method is a scaling, or a variant such as "fast: scaling=cs:0.7 lr=2e-3". The baseline is the one named "none", or
    else the first.

    `every` is the number of steps between two readings of features and coefficients, `jobs` how many runs go at once,
    `engine` where they are trained (`make_engine`). `on_start` is called with the runs when nothing can be refused any
    more.
    """
    runs = _planned(config, methods, seeds, Path(out))
    _prepare([runs], engine, on_start)
    if not run_all(runs, _pace(every), jobs, checked=True, engine=engine):
        return None
    return summarise(runs, Path(out))


def _planned(
    config: TrainConfig, methods: Sequence[str | Variant], seeds: Sequence[int], out: Path
) -> list[PlannedRun]:
    if not config.images.held_out:
        raise InvalidConfigError(
            "a comparison needs held-out images, and this configuration has none: give --config a YAML file that has "
            "`images: {held_out: 500}`, or a recipe that holds images out"
        )
    return plan_runs(config, methods, seeds, out)


def _prepare(
    comparisons: Sequence[list[PlannedRun]],
    engine: Engine | None,
    on_start: Callable[[list[PlannedRun]], None] | None,
) -> None:
    """Refuse what must be refused, of all comparisons before any work; then look at the networks as they start."""
    if engine is not None:
        engine.check()
    for runs in comparisons:
        require_same(runs)
    for runs in comparisons:
        if not (runs[0].folder.parent / DIAGNOSIS).exists():
            write_diagnosis(diagnose_config(runs[0].config), runs[0].folder.parent)
    if on_start is not None:
        on_start([run for runs in comparisons for run in runs])


def _pace(every: int | None) -> Callable[[PlannedRun], int]:
    return lambda run: every or max(1, run.config.steps // RECORDS)


def summarise(runs: list[PlannedRun], out: Path) -> Comparison:
    """The table and the figure of runs that are there: table.txt, comparison.json, comparison.png."""
    comparison = Comparison(out, runs, Results([run.read() for run in runs]))
    write_text(out / "table.txt", f"{comparison}\n")
    write_text(out / "comparison.json", json.dumps([asdict(entry) for entry in comparison.summaries], indent=1))
    draw_comparison(comparison.results, out / "comparison.png")
    return comparison


# Best rate against best rate: at one rate for all, a method may only like that rate better.


def best_rate_rows(found: dict[float, Comparison]) -> list[dict[str, str]]:
    """A row per method: its best rate by the mean loss, and the steps to where the baseline ends at its own."""
    rates = sorted(found)
    methods = [entry.method for entry in found[rates[0]].summaries]
    base = baseline_of(methods)
    best = {method: min(rates, key=lambda rate: mean_loss(found[rate], method)) for method in methods}
    curves = {
        method: {run.seed: run.held_out for run in found[best[method]].results.of(method) if len(run.held_out)}
        for method in methods
    }
    rows = []
    for method in methods:
        ratios = [
            steps_ratio(curve, curves[base][seed]) for seed, curve in curves[method].items() if seed in curves[base]
        ]
        rows.append(
            {
                "method": method,
                "best rate": named_rate(best[method], rates),
                "held-out loss there": spread([curve.values[-1] for curve in curves[method].values()], "{:.4f}"),
                f"steps to {base}'s loss at its best rate": "1 (baseline)" if method == base else ratio_text(ratios),
                "rates at which all seeds learned": " ".join(f"{r:g}" for r in rates if all_well(found[r], method))
                or "none",
            }
        )
    return rows


def named_rate(rate: float, rates: list[float]) -> str:
    """A best rate at an end of those that were tried says that the best of all may lie beyond it."""
    if len(rates) > 1 and rate in (rates[0], rates[-1]):
        return f"{rate:g} (the {'smallest' if rate == rates[0] else 'largest'} tried)"
    return f"{rate:g}"


def mean_loss(comparison: Comparison, method: str) -> float:
    """The mean over seeds at the end; a seed that diverged has none, so that its rate is never the best."""
    runs = comparison.results.of(method)
    if any(run.diverged is not None for run in runs):
        return math.inf
    return fmean([run.held_out.values[-1] for run in runs if len(run.held_out)] or [math.inf])


def all_well(comparison: Comparison, method: str) -> bool:
    return all(run.survived for run in comparison.results.of(method))


# Comparisons along an axis: depth, width, batch size, rate, and noise on the input of the trained networks.

Value = TypeVar("Value", int, float)
Cell = TypeVar("Cell")

Hold = Literal["head-size", "heads"]

AXES = {"depth": "model_options.depth", "width": "model_options.dim", "batch": "batch_size", "rate": "optimizer.lr"}
"""What a sweep changes, and the field of the configuration that holds it."""
PROBE = 32


def at(config: TrainConfig, axis: str, value: float, hold: Hold = "heads") -> TrainConfig:
    """The configuration with another depth or width of the network, another batch size or another learning rate.

    A wider U-ViT has the same number of heads, or heads of the same size (`hold`); other networks have the latter.
    """
    if axis not in AXES:
        raise InvalidConfigError(f"a sweep goes along {', '.join(AXES)}, got {axis!r}")
    if axis == "width" and (hold == "head-size" or not is_uvit(config)):
        return with_width(config, int(value))
    return Variant(axis, {AXES[axis]: value}).apply(config)


def sweep(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: Path,
    axis: str,
    values: Sequence[Value],
    *,
    hold: Hold = "heads",
    **pace: Any,
) -> dict[Value, Comparison] | None:
    """One comparison per value, each in a folder of its own. None if not all are finished now."""
    require_free_axis(methods, axis)
    cells = {value: (at(config, axis, value, hold), out / f"{axis}-{value:g}") for value in values}
    return compare_cells(cells, methods, seeds, out, **pace)


def compare_cells(
    cells: dict[Cell, tuple[TrainConfig, Path]],
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: Path,
    *,
    every: int | None = None,
    jobs: int | None = None,
    engine: Engine | None = None,
    on_start: Callable[[list[PlannedRun]], None] | None = None,
) -> dict[Cell, Comparison] | None:
    """A comparison of each configuration in its folder; their runs are carried out together. None if not all are
    finished now."""
    planned = {cell: _planned(config, methods, seeds, folder) for cell, (config, folder) in cells.items()}
    _prepare(list(planned.values()), engine, on_start)
    together = [run for runs in planned.values() for run in runs]
    run_all(together, _pace(every), jobs, out, checked=True, engine=engine)
    found = {
        cell: summarise(runs, cells[cell][1]) for cell, runs in planned.items() if all(run.finished for run in runs)
    }
    return found if len(found) == len(planned) else None


def require_free_axis(methods: Sequence[str | Variant], axis: str) -> None:
    for variant in map(as_variant, methods):
        if AXES.get(axis) in variant.changes:
            raise InvalidConfigError(
                f"{variant.name} has a {axis} of its own, so that a sweep of it changes nothing: leave one "
                f"of the two out"
            )


def default_hold(config: TrainConfig, methods: Sequence[str | Variant]) -> Hold:
    """μP holds the size of attention heads; without it a sweep of widths changes the width alone."""
    based = any(as_variant(method).apply(config).optimizer.base_width is not None for method in methods)
    return "head-size" if based else "heads"


def sweep_rows(axis: str, found: dict[Value, Comparison]) -> list[dict[str, str]]:
    base = baseline_of([entry.method for comparison in found.values() for entry in comparison.summaries])
    return [
        {
            axis: f"{value:g}",
            "method": entry.method,
            "held-out loss": spread(entry.held_out_loss, "{:.4f}"),
            f"steps to {base}'s loss": "1 (baseline)" if entry.method == base else ratio_text(entry.steps_ratio),
            "O1": spread([score.o1 for score in entry.oscillation if score.valid], "{:.2g}"),
            "collapsed or diverged": f"{len({*entry.collapsed, *entry.diverged})} of {len(entry.seeds)}",
        }
        for value, comparison in found.items()
        for entry in comparison.summaries
    ]


def noise_rows(runs: Sequence[PlannedRun], sigmas: Sequence[float]) -> list[dict[str, str]]:
    """By how much each trained network amplifies extra noise on its input (Figure 3 c); averaged weights, all seeds."""
    gains: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        if run.diverged:
            continue
        trained = load_run(run.folder, trust=True)  # by the configuration of this command, which was trained
        x, t, condition = noisy_probe(run.config, PROBE)
        keywords = trained.network.keywords(condition)
        for sigma in sigmas:
            gain = noise_gain(trained.model, x, t, sigma=sigma, keywords=keywords)
            gains.setdefault((run.method, sigma), []).append(gain)
    methods = list(dict.fromkeys(method for method, _ in gains))
    return [
        {"method": method, **{f"gain at σ = {sigma:g}": f"{fmean(gains[method, sigma]):.3f}" for sigma in sigmas}}
        for method in methods
    ]


# The control of the instrument: with a rate of zero nothing learns, so features on a fixed batch must stand still.


def control_text(
    config: TrainConfig, out: Path, every: int | None = None, jobs: int | None = None, engine: Engine | None = None
) -> str:
    """One run with lr = 0, long enough for two windows of readings; its scores in words."""
    steps = 102 * (every or 1)
    still = replace(
        config,
        steps=steps,
        optimizer=replace(config.optimizer, lr=0.0),
        logging=replace(config.logging, samples_every=0, held_out_every=steps),
    )
    run = PlannedRun("none", config.seed, out / CONTROL, replace(still, scaling="none"))
    if not run_all([run], every or 1, jobs, engine=engine):
        return "the control was interrupted"
    curves = read_curves(run.folder)
    scores = [oscillation(curve.values) for name, curve in curves.items() if name.startswith("probe_block_rms/")]
    # The mean of a window differs from its equal readings in the last digits.
    features = round(fmean([score.o1 for score in scores]), 9)
    gradient = oscillation(curves["gradient_norm/all"].values)
    return (
        f"control with a rate of zero: O1 of the features is {features:.2g} (must be 0); "
        f"O1 of the gradient norm is {gradient.o1:.2g}: what batches alone do"
    )
