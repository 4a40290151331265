"""Methods side by side: the same recipe and the same seeds, with different scalings; also along depth, width, batch
size and rate, or any combination of them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

from ..config import TrainConfig, with_values
from ..errors import InvalidConfigError
from ..files import make_folder, refuse_links_in, write_text
from ..runs import is_uvit, this_command, with_width
from .engines import Engine
from .plan import PlannedRun, Variant, as_variant, diagnose_config, plan_runs, require_same, write_diagnosis
from .records import DIAGNOSIS, steps_ratio
from .results import Results, baseline_of, ratio_text, spread
from .sweeps import run_all

COMMAND = "command.txt"
"""The command line that made the runs of a folder."""
RECORDS = 250
"""Roughly how many readings of features and coefficients a run keeps."""
AXES = {"depth": "model_options.depth", "width": "model_options.dim", "batch": "batch_size", "rate": "optimizer.lr"}
"""What a sweep changes, and the field of the configuration that holds it."""
FLAGS = {"batch": "batch_sizes"}
Cell = tuple[float, ...]
"""A value for each axis of a sweep."""


def compare(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: str | PathLike[str],
    **pace: Any,
) -> Results | None:
    """Train every method with every seed; runs that are finished are not repeated. None if not all are finished now:
    it was interrupted.

    A method is a scaling, or a variant such as "fast: scaling=cs:0.7 lr=2e-3". The baseline is the one named "none", or
    else the first. Further arguments are those of `sweep`.
    """
    found = sweep(config, methods, seeds, out, {}, **pace)
    return None if found is None else found[()]


def sweep(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: str | PathLike[str],
    axes: Mapping[str, Sequence[float]],
    *,
    every: int | None = None,
    jobs: int | None = None,
    engine: Engine | None = None,
) -> dict[Cell, Results] | None:
    """A comparison for every combination of values of the axes ({"width": [64, 128], "rate": [1e-3, 2e-3]}), each in a
    folder of its own; their runs are carried out together. None if not all are finished now.

    `every` is the number of steps between two readings of features and coefficients, `jobs` how many runs go at once,
    `engine` where they are trained (`make_engine`).
    """
    _require_axes(axes, methods)
    refuse_links_in(out)
    if not config.images.held_out:
        raise InvalidConfigError(
            "a comparison needs held-out images, and this configuration has none: give `config` with `held_out` of "
            "`images`, such as 500, or a recipe that holds images out"
        )
    config = with_values(config, {"logging.monitor_every": every or max(1, config.steps // RECORDS)})
    by_mup = any(as_variant(method).apply(config).optimizer.base_width is not None for method in methods)
    planned: dict[Cell, list[PlannedRun]] = {}
    folders: dict[Cell, Path] = {}
    for cell in product(*axes.values()):
        changed, folder = config, Path(out)
        for axis, value in zip(axes, cell, strict=True):
            changed, folder = at(changed, axis, value, by_mup), folder / f"{axis}-{value:g}"
        planned[cell], folders[cell] = plan_runs(changed, methods, seeds, folder), folder
    together = [run for runs in planned.values() for run in runs]
    # What must be refused is refused before any work.
    if engine is not None:
        engine.check()
    require_same(together)
    for cell, runs in planned.items():
        if not (folders[cell] / DIAGNOSIS).exists():
            write_diagnosis(diagnose_config(runs[0].config), folders[cell])
    if command := this_command():
        write_text(make_folder(out) / COMMAND, f"{command}\n")
    if not run_all(together, jobs, Path(out), engine):
        return None
    return {cell: summarise(runs, folders[cell]) for cell, runs in planned.items()}


def summarise(runs: Sequence[PlannedRun], out: Path) -> Results:
    """The table of runs that are there: table.txt and comparison.json."""
    results = Results([run.read() for run in runs])
    write_text(out / "table.txt", f"{results}\n")
    write_text(out / "comparison.json", json.dumps([asdict(entry) for entry in results.summaries], indent=1))
    return results


# Axes


def at(config: TrainConfig, axis: str, value: float, by_mup: bool = False) -> TrainConfig:
    """The configuration with another depth or width of the network, another batch size or another learning rate.

    A wider network has heads of the same size, which μP asks for; a U-ViT without μP has as many as before.
    """
    if axis == "width" and (by_mup or not is_uvit(config)):
        return with_width(config, int(value))
    return Variant(axis, {AXES[axis]: value}).apply(config)


def _require_axes(axes: Mapping[str, Sequence[float]], methods: Sequence[str | Variant]) -> None:
    for axis, values in axes.items():
        if axis not in AXES:
            raise InvalidConfigError(f"a sweep goes along {', '.join(AXES)}, got {axis!r}")
        if len(set(values)) != len(values) or not values:
            shown = ", ".join(f"{value:g}" for value in values)
            raise InvalidConfigError(f"`{FLAGS.get(axis, f'{axis}s')}` must name different values, got {shown}")
        for variant in map(as_variant, methods):
            if AXES[axis] in variant.changes:
                raise InvalidConfigError(
                    f"{variant.name} has a {axis} of its own, so that a sweep of it changes nothing: leave one "
                    f"of the two out"
                )


def sweep_rows(axes: Sequence[str], found: Mapping[Cell, Results]) -> list[dict[str, str]]:
    """A row per cell and method."""
    base = baseline_of([entry.method for results in found.values() for entry in results.summaries])
    return [
        {
            **{axis: f"{value:g}" for axis, value in zip(axes, cell, strict=True)},
            "method": entry.method,
            "held-out loss": spread(entry.held_out_loss, "{:.4f}"),
            f"steps to {base}'s loss": "1 (baseline)" if entry.method == base else ratio_text(entry.steps_ratio),
            "collapsed or diverged": f"{len({*entry.collapsed, *entry.diverged})} of {len(entry.seeds)}",
        }
        for cell, results in found.items()
        for entry in results.summaries
    ]


def best_rate_rows(axes: Sequence[str], found: Mapping[Cell, Results]) -> list[dict[str, str]]:
    """Best rate against best rate: at one rate for all, a method may only like that rate better.

    A row per method and per value of the other axes: the rate with the lowest mean loss, the steps to where the
    baseline ends at its own best rate, and the regret: what the best rate of the first value costs here.
    """
    place = list(axes).index("rate")
    rates = sorted({cell[place] for cell in found})
    others = list(dict.fromkeys((*cell[:place], *cell[place + 1 :]) for cell in found))
    methods = [entry.method for entry in next(iter(found.values())).summaries]
    base = baseline_of(methods)

    def there(other: Cell, rate: float) -> Results:
        return found[(*other[:place], rate, *other[place:])]

    def best(method: str, other: Cell) -> float | None:
        rate = min(rates, key=lambda rate: there(other, rate).mean_loss(method))
        return rate if math.isfinite(there(other, rate).mean_loss(method)) else None

    def row(method: str, other: Cell) -> dict[str, str]:
        rate, theirs, first = best(method, other), best(base, other), best(method, others[0])
        if rate is None:
            return {"method": method, **_named(axes, other), "best rate": "none"}
        runs = there(other, rate).of(method)
        baselines = {} if theirs is None else {run.seed: run for run in there(other, theirs).of(base)}
        ratios = [steps_ratio(run.held_out, baselines[run.seed].held_out) for run in runs if run.seed in baselines]
        well = [r for r in rates if all(run.survived for run in there(other, r).of(method))]
        regret = None if first is None else there(other, first).mean_loss(method) / there(other, rate).mean_loss(method)
        end = len(rates) > 1 and {rates[0]: " (the smallest tried)", rates[-1]: " (the largest tried)"}.get(rate)
        return {
            "method": method,
            **_named(axes, other),
            "best rate": f"{rate:g}{end or ''}",
            "held-out loss there": spread([run.held_out.last for run in runs], "{:.4f}"),
            f"steps to {base}'s loss at its best rate": "1 (baseline)" if method == base else ratio_text(ratios),
            **({"regret of the first's best": "-" if regret is None else f"{regret - 1:.1%}"} if others[0] else {}),
            "rates at which all seeds learned": " ".join(f"{r:g}" for r in well) or "none",
        }

    return [row(method, other) for method in methods for other in others]


def _named(axes: Sequence[str], other: Cell) -> dict[str, str]:
    named = [axis for axis in axes if axis != "rate"]
    return {axis: f"{value:g}" for axis, value in zip(named, other, strict=True)}
