"""Methods side by side: the same recipe and seeds, with different scalings; also at several widths and rates."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

from ..config import TrainConfig, with_values
from ..errors import InvalidConfigError, require
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
Cell = tuple[int | None, float | None]
"""A width and a rate of a sweep; None for the configuration's own."""


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
    else the first. Further arguments are `jobs` and `engine` of `sweep`.
    """
    found = sweep(config, methods, seeds, out, **pace)
    return None if found is None else found[None, None]


def sweep(
    config: TrainConfig,
    methods: Sequence[str | Variant],
    seeds: Sequence[int],
    out: str | PathLike[str],
    *,
    widths: Sequence[int] = (),
    rates: Sequence[float] = (),
    jobs: int | None = None,
    engine: Engine | None = None,
) -> dict[Cell, Results] | None:
    """A comparison for every combination of the widths and rates, each in a folder of its own; their runs are carried
    out together. None if not all are finished now.

    `jobs` is how many runs go at once, `engine` where they are trained (`make_engine`).
    """
    _require_different("widths", widths, "model_options.dim", methods)
    _require_different("rates", rates, "optimizer.lr", methods)
    refuse_links_in(out)
    require(
        config.images.held_out > 0,
        "a comparison needs held-out images, and this configuration has none: give `config` with `held_out` of "
        "`images`, such as 500, or a recipe that holds images out",
    )
    if config.logging.monitor_every is None:
        config = with_values(config, {"logging.monitor_every": max(1, config.steps // RECORDS)})
    by_mup = any(as_variant(method).apply(config).optimizer.base_width is not None for method in methods)
    planned: dict[Cell, list[PlannedRun]] = {}
    folders: dict[Cell, Path] = {}
    for width, rate in product(widths or (None,), rates or (None,)):
        changed, folder = config, Path(out)
        if width is not None:
            changed, folder = _at_width(changed, width, by_mup), folder / f"width-{width}"
        if rate is not None:
            changed, folder = with_values(changed, {"optimizer.lr": rate}), folder / f"rate-{rate:g}"
        planned[width, rate], folders[width, rate] = plan_runs(changed, methods, seeds, folder), folder
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


def _at_width(config: TrainConfig, width: int, by_mup: bool) -> TrainConfig:
    """A wider network has heads of the same size, which μP asks for; a U-ViT without μP has as many as before."""
    if by_mup or not is_uvit(config):
        return with_width(config, width)
    return Variant("width", {"model_options.dim": width}).apply(config)


def _require_different(name: str, values: Sequence[float], field: str, methods: Sequence[str | Variant]) -> None:
    if len(set(values)) < len(values):
        raise InvalidConfigError(f"`{name}` must name different values, got {', '.join(f'{v:g}' for v in values)}")
    for variant in map(as_variant, methods if values else ()):
        if field in variant.changes:
            raise InvalidConfigError(f"{variant.name} sets {field} itself, so `{name}` change nothing: leave one out")


def best_rate_rows(found: Mapping[Cell, Results]) -> list[dict[str, str]]:
    """Best rate against best rate, a row per method and width: at one rate for all, a method may only like that rate
    better."""
    methods = [entry.method for entry in next(iter(found.values())).summaries]
    by_width: dict[int | None, dict[float, Results]] = {}
    for (width, rate), results in sorted(found.items(), key=lambda item: item[0][1] or 0.0):
        by_width.setdefault(width, {})[rate or 0.0] = results
    rows = []
    for method in methods:
        for width, there in sorted(by_width.items(), key=lambda item: item[0] or 0):
            named = {} if width is None else {"width": f"{width}"}
            rows.append({"method": method, **named, **_best_rate(method, baseline_of(methods), there)})
    return rows


def _best_rate(method: str, base: str, there: Mapping[float, Results]) -> dict[str, str]:
    """The rate with the lowest mean loss, and the steps to where the baseline ends at its own best rate."""

    def best(name: str) -> float | None:
        rate = min(there, key=lambda each: there[each].mean_loss(name))
        return rate if math.isfinite(there[rate].mean_loss(name)) else None

    rate, theirs = best(method), best(base)
    if rate is None:
        return {"best rate": "none"}
    runs, rates = there[rate].of(method), list(there)
    baselines = {} if theirs is None else {run.seed: run for run in there[theirs].of(base)}
    ratios = [steps_ratio(run.held_out, baselines[run.seed].held_out) for run in runs if run.seed in baselines]
    well = [each for each in rates if all(run.survived for run in there[each].of(method))]
    edge = {rates[0]: " (the smallest tried)", rates[-1]: " (the largest tried)"}.get(rate, "") if rates[1:] else ""
    return {
        "best rate": f"{rate:g}{edge}",
        "held-out loss there": spread([run.held_out.last for run in runs], "{:.4f}"),
        f"steps to {base}'s loss at its best rate": "1 (baseline)" if method == base else ratio_text(ratios),
        "rates at which all seeds learned": " ".join(f"{each:g}" for each in well) or "none",
    }
