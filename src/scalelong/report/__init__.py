"""Show it: one HTML file that holds runs, curves, samples and the long skips, and works offline."""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import NoRunsError
from ..experiments.results import BASELINE, Curve, MethodSummary, read_curves, summarise, table_rows
from ..experiments.runs import DIAGNOSIS, PlannedRun
from ..files import write_text
from ..runs.config import TrainConfig, flatten, load_config, to_dict
from ..runs.folder import CONFIG

__all__ = ["NoRunsError", "collect", "write_report"]


# Everything that the report shows, gathered from run folders as plain data.

MOST_POINTS = 600
"""Longer curves are thinned: more points than pixels cannot be seen."""
MOST_GRIDS = 24
"""Sample grids per run; of more, evenly chosen ones are shown."""
LEFT_OUT = ("epoch", "seconds", "loss_scale")


def collect(folders: Sequence[str | PathLike[str]]) -> dict[str, Any]:
    """Runs, methods and tables. A folder is a run, or holds runs (what `scalelong compare` writes)."""
    runs = [_planned(path) for path in find_runs(map(Path, folders))]
    runs.sort(key=lambda run: run.method != BASELINE)
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(_essence(run.config), []).append(run)
    labels = _labels(runs)
    return {
        "runs": [_run(run, label) for run, label in zip(runs, labels, strict=True)],
        "methods": list(dict.fromkeys(labels)),
        "tables": [_table(group) for group in groups.values()],
        "diagnosis": _diagnosis(folders),
    }


def find_runs(folders: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise NoRunsError(f"there is no folder {folder}; give run folders or a comparison's folder")
        inside = [folder] if (folder / CONFIG).exists() else sorted(path.parent for path in folder.glob(f"**/{CONFIG}"))
        if not inside:
            raise NoRunsError(f"{folder} is not a run and holds none: there is no {CONFIG} in it or below it")
        found += [path for path in inside if path not in found and not path.name.startswith("control")]
    return found


def _planned(path: Path) -> PlannedRun:
    config = load_config(path / CONFIG)
    return PlannedRun(config.scaling, config.seed, path, config)


def _labels(runs: list[PlannedRun]) -> list[str]:
    """The method; where runs differ in more than method and seed, what sets them apart as well."""
    flat = [flatten(to_dict(run.config)) for run in runs]
    names = ["model", "model_options.depth", "batch_size", "optimizer.lr", "data"]
    apart = [name for name in names if len({repr(values.get(name)) for values in flat}) > 1]
    return [
        run.method + "".join(f", {name.split('.')[-1]} {values.get(name)}" for name in apart)
        for run, values in zip(runs, flat, strict=True)
    ]


def _essence(config: TrainConfig) -> str:
    """All that runs of one comparison have in common."""
    values = {name: value for name, value in flatten(to_dict(config)).items() if name not in ("scaling", "seed")}
    return json.dumps(values, sort_keys=True)


def _run(run: PlannedRun, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "seed": run.seed,
        "folder": run.name,
        "finished": run.finished,
        "diverged": (run.divergence() or {}).get("message"),
        "curves": {name: _points(curve) for name, curve in read_curves(run.folder).items() if name not in LEFT_OUT},
        "samples": [_sample(path) for path in _evenly(sorted((run.folder / "samples").glob("step-*.png")), MOST_GRIDS)],
        "config": (run.folder / CONFIG).read_text(encoding="utf-8"),
        "environment": _json(run.folder / "environment.json"),
        "data": _json(run.folder / "data.json"),
    }


def _points(curve: Curve) -> list[list[float | int | None]]:
    points = _evenly(curve.points, MOST_POINTS)
    return [[step for step, _ in points], [_rounded(value) for _, value in points]]


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _evenly(entries: list[Any], most: int) -> list[Any]:
    """At most so many entries, the first and the last among them."""
    if len(entries) <= most:
        return entries
    return [entries[round(i * (len(entries) - 1) / (most - 1))] for i in range(most)]


def _sample(path: Path) -> dict[str, Any]:
    image = base64.b64encode(path.read_bytes()).decode()
    return {"step": int(path.stem.removeprefix("step-")), "image": f"data:image/png;base64,{image}"}


def _table(runs: list[PlannedRun]) -> dict[str, Any]:
    summaries: list[MethodSummary] = summarise(runs)
    options = runs[0].config.model_options
    size = ", ".join(f"{name} {value}" for name, value in options.items())
    title = f"{runs[0].config.model} on {Path(runs[0].config.data).name}, batch {runs[0].config.batch_size}"
    return {"title": f"{title} ({size})" if size else title, "rows": table_rows(summaries)}


def _diagnosis(folders: Sequence[str | PathLike[str]]) -> dict[str, Any] | None:
    found = (_json(Path(folder) / DIAGNOSIS) for folder in folders)
    return next((entry for entry in found if entry), None)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


# The HTML file: template, style, script and data in one, without any reference to the outside.


def write_report(folders: Sequence[str | PathLike[str]], out: str | PathLike[str]) -> Path:
    """Write the report of these runs, atomically. Returns its path."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render({**collect(folders), "version": __version__}))
    return path


def render(data: dict[str, object]) -> str:
    # Inside a script element only "</" could end it, and "<!--" could begin a comment.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = _asset("page.html")
    for mark, content in (("/*STYLE*/", _asset("style.css")), ("/*SCRIPT*/", _script()), ("/*DATA*/", text)):
        page = page.replace(mark, content)
    return page


def _script() -> str:
    return "\n".join(_asset(name) for name in ("chart.js", "skips.js", "app.js"))


def _asset(name: str) -> str:
    return (files("scalelong.report") / "assets" / name).read_text(encoding="utf-8")
