"""Everything that the report shows, gathered from run folders as plain data.

A folder may also hold the range.json of `scalelong range`: which rates each method survives. Nothing here needs torch.
"""

import base64
import io
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from ..config import ALARMS, ANCHOR_TITLES, CONFIG, DATA, ENVIRONMENT, ROLLBACKS, SCORE_TITLES, SCORES
from ..errors import InvalidConfigError, RunFolderError
from ..experiments import (
    BASELINE,
    DIAGNOSIS,
    Curve,
    Results,
    RunRecord,
    level_rows,
    own_file,
    read_own_json,
    read_own_lines,
    read_run,
    table_rows,
    verdict,
)
from ..files import below, read_json
from ..optional import needs
from ..stability import RateRange, RateRun

logger = logging.getLogger(__name__)

MOST_POINTS = 600
"""Longer curves are thinned: more points than pixels cannot be seen."""
MOST_GRIDS = 24
"""Sample grids per run; of more, evenly chosen ones are shown."""
LEFT_OUT = ("epoch", "seconds", "loss_scale")
RANGE = "range.json"


def collect(folders: Sequence[str | PathLike[str]], *, may_be_empty: bool = False) -> dict[str, Any]:
    """Runs, methods and tables. A folder is a run, or holds runs (what `scalelong compare` writes)."""
    ranges = _ranges(map(Path, folders))
    found = find_runs(map(Path, folders), may_be_empty=may_be_empty or bool(ranges))
    runs = [read_run(path) for path in found]
    runs.sort(key=lambda run: run.method != BASELINE)
    labelled = [replace(run, method=label) for run, label in zip(runs, _labels(runs), strict=True)]
    groups: dict[str, list[RunRecord]] = {}
    for run, labelled_run in zip(runs, labelled, strict=True):
        groups.setdefault(_identity(run, _varied(runs, run)), []).append(labelled_run)
    many = len(groups) + len(ranges) > 1
    return {
        "verdict": [
            *({"title": entry["title"], "text": entry["verdict"]} for entry in ranges if entry["verdict"]),
            *({"title": _title(group) if many else "", "text": verdict(Results(group))} for group in groups.values()),
        ],
        "runs": [_run(run) for run in labelled],
        "methods": list(dict.fromkeys(run.method for run in labelled)),
        "baseline": next((run.method for run in labelled if run.method.partition(",")[0] == BASELINE), None),
        "tables": [_table(group) for group in groups.values()],
        "levels": [table for group in groups.values() for table in _levels(group)],
        "scores": [row for run in labelled for row in _scores(run)],
        "copies": [entry for run in labelled for entry in _copies(run)],
        "alarms": [row for run in labelled for row in _alarms(run)],
        "ranges": ranges,
        "diagnosis": _diagnosis(folders),
    }


def find_runs(folders: Iterable[Path], *, may_be_empty: bool = False) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}; give run folders or a comparison's folder")
        if (folder / CONFIG).exists():
            inside = [folder]
        else:
            inside = sorted(path.parent for path in folder.glob(f"**/{CONFIG}"))
        if not inside and not may_be_empty:
            raise RunFolderError(f"{folder} is not a run and holds none: there is no {CONFIG} in it or below it")
        found += [path for path in inside if path not in found]
    return found


def _varied(runs: Sequence[RunRecord], run: RunRecord) -> set[str]:
    """The fields that the variants of one comparison change, by the names of its runs."""
    together = [other for other in runs if other.folder and run.folder and other.folder.parent == run.folder.parent]
    return {"scaling", *(name for other in together for name in other.differs)}


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """The method's name; where runs differ in more than their method and seed, what sets them apart as well."""
    names = ["model", "model_options.depth", "batch_size", "optimizer.lr", "data"]
    known = [{name: run.config.get(name) for name in names if name not in _varied(runs, run)} for run in runs]
    apart = [name for name in names if len({repr(values[name]) for values in known if name in values}) > 1]
    return [
        run.method + "".join(f", {name.split('.')[-1]} {values[name]}" for name in apart if name in values)
        for run, values in zip(runs, known, strict=True)
    ]


def _identity(run: RunRecord, varied: set[str]) -> str:
    """All that runs of one comparison have in common."""
    values = {name: value for name, value in run.config.items() if name != "seed" and name not in varied}
    return json.dumps(values, sort_keys=True, default=str)


def _run(run: RunRecord) -> dict[str, Any]:
    assert run.folder is not None
    return {
        "label": run.method,
        "seed": run.seed,
        "folder": run.run,
        "finished": run.finished,
        "diverged": run.diverged,
        "collapsed": run.collapsed,
        "prediction": run.config.get("diffusion.prediction"),
        "curves": {name: _points(curve) for name, curve in run.curves.items() if name not in LEFT_OUT},
        "samples": _samples(run.folder),
        "config": below(run.folder).read_text(CONFIG),
        "environment": read_own_json(run.folder / ENVIRONMENT),
        "data": read_own_json(run.folder / DATA),
    }


def _points(curve: Curve) -> list[list[float | int | None]]:
    points = _evenly(curve.points, MOST_POINTS)
    return [[step for step, _ in points], [_finite(value) for _, value in points]]


def _finite(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _evenly(entries: list[Any], most: int) -> list[Any]:
    """At most `most` entries, the first and the last among them."""
    if len(entries) <= most:
        return entries
    return [entries[round(i * (len(entries) - 1) / (most - 1))] for i in range(most)]


# Tables, scores, alarms


def _title(runs: Sequence[RunRecord]) -> str:
    config = runs[0].config
    options = {name.removeprefix("model_options."): value for name, value in config.items() if "model_options." in name}
    size = ", ".join(f"{name} {value}" for name, value in options.items())
    title = f"{config.get('model')} on {Path(str(config.get('data'))).name}, batch {config.get('batch_size')}"
    return f"{title} ({size})" if size else title


def _table(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The table of the comparison, without columns that say nothing: all dashes, or a method against itself."""
    summaries = Results(runs).summaries
    rows = table_rows(summaries)
    empty = [name for name in rows[0] if all(row[name] == "-" for row in rows)]
    empty += [name for name in rows[0] if name.startswith("steps to ") and len(summaries) == 1]
    kept = [{name: value for name, value in row.items() if name not in empty} for row in rows]
    return {"title": _title(runs), "rows": kept}


def _levels(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Held-out loss by noise level, where it was recorded."""
    rows = level_rows(Results(runs))
    return [{"title": f"Held-out loss by noise level: {_title(runs)}", "rows": rows}] if rows else []


def _scores(run: RunRecord) -> list[dict[str, str]]:
    """What `scalelong eval` found, from scores.jsonl, and below it what its anchors have."""
    assert run.folder is not None
    rows: list[dict[str, str]] = []
    for values in read_own_lines(run.folder / SCORES):
        with suppress(KeyError, TypeError, ValueError):  # a line that someone else wrote
            protocol = values["protocol"]
            made = {
                "images": str(protocol.get("images", "-")),
                "sampler": f"{protocol.get('sampler', '-')}, {protocol.get('sampler_steps', '-')} steps",
                "features": str(protocol.get("features", "-")),
            }
            # Of those that were not computed, the prompt accuracy leaves no empty column.
            asked = {name: title for name, title in SCORE_TITLES.items() if values.get(name) or name != "agreement"}
            cells = {title: _score(values[name]) if values.get(name) else "-" for name, title in asked.items()}
            about = {"method": run.method, "seed": str(run.seed), "step": str(values["subject"].get("step", "-"))}
            rows.append({**about, **cells, **made})
            anchors = values.get("anchors") or {}
            for kind, found in anchors.get("values", {}).items():
                cells = {title: f"{found[name]:.3g}" if name in found else "-" for name, title in asked.items()}
                same = {**made, "images": str(anchors["images"]), "sampler": "-"}
                row = {"method": f"({ANCHOR_TITLES.get(kind, kind)})", "seed": "-", "step": "-", **cells, **same}
                if row not in rows:
                    rows.append(row)
    return rows


def _copies(run: RunRecord) -> list[dict[str, Any]]:
    """The samples of the newest evaluation that are nearest to a training image, next to it."""
    assert run.folder is not None
    for values in reversed(read_own_lines(run.folder / SCORES)):
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a line that someone else wrote
            copies, step = values["subject"]["copies"], values["subject"]["step"]
            # By its name in this folder alone: the run may have been moved, and others may have written the line.
            content = _picture(run.folder, f"images/{Path(str(copies['picture'])).name}")
            if content is None:
                continue
            image = _address(content)
            text = f"{copies['samples']:.1%} of the samples are near-copies of a training image"
            if copies.get("held_out") is not None:
                text += (
                    f"; of {int(copies['held_out_images'])} held-out images {copies['held_out']:.1%} are as near to one"
                )
            return [{"method": run.method, "seed": run.seed, "step": int(step), "text": f"{text}.", "image": image}]
    return []


def _score(values: dict[str, Any]) -> str:
    return f"{values['value']:.3g} [{values['low']:.3g}, {values['high']:.3g}]"


def _alarms(run: RunRecord) -> list[dict[str, Any]]:
    """Rollbacks, and the alarms that were written down."""
    assert run.folder is not None
    written = [entry for entry in read_own_lines(run.folder / ALARMS) if "step" in entry and "kind" in entry]
    found = [*_rollbacks(run)]
    found += [{"step": e["step"], "kind": str(e["kind"]), "message": str(e.get("message", ""))} for e in written]
    about = {"method": run.method, "seed": run.seed}
    return [{**about, **entry} for entry in sorted(found, key=lambda entry: entry["step"])]


def _rollbacks(run: RunRecord) -> list[dict[str, Any]]:
    """Where the run went back to, and why."""
    assert run.folder is not None
    path, rows = own_file(run.folder, ROLLBACKS), []
    found = read_json(path) if path.exists() else []
    for entry in found if isinstance(found, list) else []:
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # a file that someone else wrote
            why = f"step {entry['bad_step']} was not finite"
            if entry.get("cause") == "collapse":
                why = f"the loss had collapsed at step {entry['bad_step']} ({entry['level']:.3g} → {entry['loss']:.3g})"
            left = entry.get("left_first")
            named = f"; {left['where']} left first" if left else ""
            rate = f"{entry['factor']:g} times the rate"
            if isinstance(entry.get("rate"), float):  # that of the bad step; further rollbacks lower it further
                rate = f"the rate {entry['factor'] * entry['rate']:.3g} instead of {entry['rate']:.3g}"
            text = f"{why}{named}: back to step {entry['to_step']}, with {rate}."
            rows.append({"step": int(entry["to_step"]), "kind": "rollback", "message": text})
    return rows


def _diagnosis(folders: Sequence[str | PathLike[str]]) -> dict[str, Any] | None:
    found = (read_own_json(Path(folder) / DIAGNOSIS) for folder in folders)
    return next((entry for entry in found if entry.get("rows")), None)


# Sample grids

MOST_GRID = 64 * 1024**2
"""Bytes of the largest picture that goes into a report."""


def _samples(folder: Path) -> list[dict[str, Any]]:
    return [{"step": step, "image": _address(content)} for step, content in sample_grids(folder)]


def sample_grids(folder: Path) -> list[tuple[int, bytes]]:
    """The grids of a run by step, as PNG files; of many, evenly chosen ones."""
    named = [(name.removeprefix("step-").removesuffix(".png"), name) for name in below(folder).names("samples")]
    grids = [(int(step), name) for step, name in named if step.isdigit() and name == f"step-{step}.png"]
    found = ((step, _picture(folder, f"samples/{name}")) for step, name in _evenly(sorted(grids), MOST_GRIDS))
    return [(step, content) for step, content in found if content is not None]


def _picture(folder: Path, name: str) -> bytes | None:
    """A PNG of a run folder; None if it is not there or not a picture.

    It is decoded first, and links are refused: any other file that stands under this name is not published.
    """
    images = needs("PIL.Image", "report", "pictures in a report")
    if not os.path.lexists(folder / name):
        return None
    content = below(folder).read_bytes(name, MOST_GRID)
    try:
        with images.open(io.BytesIO(content), formats=("PNG",)) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, images.DecompressionBombError):
        logger.warning("%s is not a PNG that can be read: the report leaves it out", folder / name)
        return None
    return content


def _address(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


# The rates that each method survives


def _ranges(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """What `scalelong range` wrote: rates x methods x seeds, with who survived."""
    paths = dict.fromkeys(path for folder in folders if folder.is_dir() for path in sorted(folder.glob(f"**/{RANGE}")))
    return [_range(path) for path in paths]


def _range(path: Path) -> dict[str, Any]:
    try:
        found = RateRange.from_json(json.dumps(read_own_json(path)))
    except InvalidConfigError as error:
        raise RunFolderError(f"{path}: {error}, or remove the file") from error
    pictures = [(entry, _picture(path.parent, str(entry.get("file", "")))) for entry in found.samples]
    halves = {half.method: half.text for half in found.half_rates}
    return {
        "verdict": [text for text in (found.summary, found.verdict) if text],
        "rule": found.rule,
        "title": found.title or path.parent.name,
        "rates": found.rates,
        "your_rate": found.your_rate,
        "methods": found.methods,
        "cells": [[_range_cell(found.cell(method, rate)) for rate in found.rates] for method in found.methods],
        "rows": [
            {"method": each, "half of the runs survive": halves[each], "left first": found.left_first(each)}
            for each in found.methods
        ],
        "runs": [
            {
                **{name: getattr(run, name) for name in ("method", "rate", "seed", "outcome")},
                "curve": _points(Curve(*zip(*run.curve, strict=True))) if run.curve else [[], []],
            }
            for run in found.runs
        ],
        "samples": [{**entry, "image": _address(content)} for entry, content in pictures if content is not None],
    }


def _range_cell(runs: Sequence[RateRun]) -> dict[str, Any]:
    """Counts, and medians of the losses that are numbers: the same statistic as in the printed table."""
    best = [run.best for run in runs if run.best is not None]
    last = [run.last for run in runs if run.last is not None]
    return {
        "survived": sum(run.survived for run in runs),
        "count": len(runs),
        "outcomes": Counter(run.outcome for run in runs),
        "best": median(best) if best else None,
        "last": median(last) if last else None,
    }
