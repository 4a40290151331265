"""Methods side by side: the same recipe and the same seeds, with different scalings."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from ..config import TrainConfig
from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_text
from ..runs import is_uvit, with_width
from .engines import Engine
from .figures import draw_comparison
from .plan import (
    PlannedRun,
    Variant,
    as_variant,
    diagnose_config,
    plan_runs,
    require_same,
    write_diagnosis,
)
from .records import DIAGNOSIS, steps_ratio
from .results import MethodSummary, Results, baseline_of, level_rows, ratio_text, spread, table_rows
from .sweeps import run_all

COMMANDS = "commands.txt"
"""The command lines that made the runs of a folder."""
RECORDS = 250
"""Roughly how many readings of features and coefficients a run keeps."""
Cell = TypeVar("Cell")


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
    pace: dict[str, Any] = {"every": every, "jobs": jobs, "engine": engine, "on_start": on_start}
    found = compare_cells({"": (config, Path(out))}, methods, seeds, Path(out), **pace)
    return None if found is None else found[""]


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
    if not all(config.images.held_out for config, _ in cells.values()):
        raise InvalidConfigError(
            "a comparison needs held-out images, and this configuration has none: give --config a YAML file that has "
            "`images: {held_out: 500}`, or a recipe that holds images out"
        )
    planned = {cell: plan_runs(config, methods, seeds, folder) for cell, (config, folder) in cells.items()}
    together = [run for runs in planned.values() for run in runs]
    # What must be refused is refused before any work.
    if engine is not None:
        engine.check()
    require_same(together)
    for runs in planned.values():
        if not (runs[0].folder.parent / DIAGNOSIS).exists():
            write_diagnosis(diagnose_config(runs[0].config), runs[0].folder.parent)
    if on_start is not None:
        on_start(together)
    run_all(together, lambda run: every or max(1, run.config.steps // RECORDS), jobs, out, checked=True, engine=engine)
    if not all(run.finished for run in together):
        return None
    return {cell: summarise(runs, cells[cell][1]) for cell, runs in planned.items()}


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


# Comparisons along an axis: depth, width, batch size or rate.

Value = TypeVar("Value", int, float)
Hold = Literal["head-size", "heads"]

AXES = {"depth": "model_options.depth", "width": "model_options.dim", "batch": "batch_size", "rate": "optimizer.lr"}
"""What a sweep changes, and the field of the configuration that holds it."""


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


# Rates × widths: the best rate of each width, and the regret: what the small network's best rate costs the wide one


@dataclass(frozen=True)
class RateGrid:
    """The comparisons of all widths and rates. Print it."""

    found: dict[tuple[int, float], Comparison]
    hold: Hold

    @property
    def widths(self) -> list[int]:
        return sorted({width for width, _ in self.found})

    @property
    def rates(self) -> list[float]:
        return sorted({rate for _, rate in self.found})

    def loss(self, method: str, width: int, rate: float) -> float:
        """The mean over seeds at the end; infinite where a seed diverged."""
        return mean_loss(self.found[width, rate], method)

    def best(self, method: str, width: int) -> float | None:
        """The rate with the lowest mean loss; None if no rate has one."""
        rate = min(self.rates, key=lambda rate: self.loss(method, width, rate))
        return rate if math.isfinite(self.loss(method, width, rate)) else None

    def regret(self, method: str, width: int) -> float | None:
        """What the best rate of the smallest width costs here, relative to the loss at the best rate."""
        taken, best = self.best(method, self.widths[0]), self.best(method, width)
        if taken is None or best is None:
            return None
        return self.loss(method, width, taken) / self.loss(method, width, best) - 1

    def rows(self) -> list[dict[str, str]]:
        methods = [entry.method for entry in next(iter(self.found.values())).summaries]
        return [self._row(method, width) for method in methods for width in self.widths]

    def _row(self, method: str, width: int) -> dict[str, str]:
        best, regret = self.best(method, width), self.regret(method, width)
        runs = [] if best is None else self.found[width, best].results.of(method)
        learned = [rate for rate in self.rates if all_well(self.found[width, rate], method)]
        return {
            "method": method,
            "width": str(width),
            "best rate": "none" if best is None else named_rate(best, self.rates),
            "held-out loss there": spread([run.held_out.last for run in runs], "{:.4f}"),
            f"regret of width {self.widths[0]}'s best": "-" if regret is None else f"{regret:.1%}",
            "rates at which all seeds learned": " ".join(f"{rate:g}" for rate in learned) or "none",
        }

    def __str__(self) -> str:
        held = "the size of an attention head" if self.hold == "head-size" else "the number of heads"
        return f"{text_table(self.rows())}\nheld over the widths: {held}"


def rate_grid(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: Path,
    widths: Sequence[int],
    rates: Sequence[float],
    *,
    hold: Hold = "head-size",
    **pace: Any,
) -> RateGrid | None:
    """One comparison per width and rate, each in a folder of its own; grid.txt. None if not all are finished now."""
    for name, values in (("`widths`", widths), ("`rates`", rates)):
        if len(set(values)) != len(values) or not values:
            raise InvalidConfigError(f"{name} must name different values, got {', '.join(f'{v:g}' for v in values)}")
    for axis in ("width", "rate"):
        require_free_axis(methods, axis)
    cells = {
        (width, rate): (at(at(config, "width", width, hold), "rate", rate), out / f"width-{width:g}" / f"rate-{rate:g}")
        for width in widths
        for rate in rates
    }
    found = compare_cells(cells, methods, seeds, out, **pace)
    if found is None:
        return None
    grid = RateGrid(found, hold)
    write_text(out / "grid.txt", f"{grid}\n")
    return grid
