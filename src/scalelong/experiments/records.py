"""One run as a record: its curves, read from metrics.jsonl, and its outcome."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

from ..config import CONFIG, DIVERGED, METRICS, VARIANT, flatten
from ..errors import CannotReadError, InvalidConfigError
from ..files import (
    below,
    make_folder,
    parse_json,
    read_fields,
    read_json as read_json_file,
    read_json_lines,
    write_text,
)
from ..stability import Oscillation, has_collapsed, oscillation

BASELINE = "none"
STOPPED = "stopped.json"
"""Written when patience ran out: the last step, and the patience."""
DIAGNOSIS = "diagnosis.json"


# Curves


@dataclass(frozen=True)
class Curve:
    """A quantity over training steps."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def at(self, step: int) -> float | None:
        """The value at a step, interpolated; None outside what was recorded."""
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if step == right:
                # Interpolated, it may come out below by a rounding error, and then the curve itself never reaches it.
                return high
            if left <= step < right:
                return low + (high - low) * (step - left) / (right - left)
        return self.values[0]

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    @property
    def collapsed(self) -> bool:
        """Whether a held-out loss went up again for good. It is the error in ε, of which an output of zero has 1."""
        return has_collapsed(self.values, zero_loss=1.0)

    @cached_property
    def points(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))


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


# Reading metrics.jsonl

MOST_POINTS = 8192
"""Points of a curve that are kept. Comparisons record a few hundred; only the curves of long runs are thinned."""
LARGEST = 10**300
"""Whole numbers beyond this are not floats."""


def read_curves(folder: str | PathLike[str]) -> dict[str, Curve]:
    """All quantities of a run by name. A long curve keeps every 2ᵏ-th record, at equal distances, and the last one."""
    path = own_file(Path(folder), METRICS)
    found: dict[str, dict[int, float]] = {}
    for values in read_json_lines(path) if path.exists() else []:
        try:
            step = int(values.pop("step"))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # a line that someone else wrote
        for name, value in values.items():
            if isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST):
                found.setdefault(name, {})[step] = float(value)
    return {name: _curve(values) for name, values in found.items()}


def _curve(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    stride = 1
    while len(steps) > MOST_POINTS * stride:
        stride *= 2
    kept = steps[::stride] if (len(steps) - 1) % stride == 0 else [*steps[::stride], steps[-1]]
    return Curve(tuple(kept), tuple(values[step] for step in kept))


def last_line(folder: Path, name: str) -> dict[str, Any] | None:
    """The newest line of the metrics that has this quantity, looked for from the end of the file."""
    path = own_file(Path(folder), METRICS)
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 200_000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if f'"{name}":'.encode() in line:
            try:
                found = parse_json(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


# One run

NOT_RECORDED = Oscillation(math.nan, math.nan, math.nan, math.nan, 0, "nothing was recorded")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What became of one run. The same run may appear in several results, under the names that it has there."""

    method: str
    """The name of the method or variant."""
    seed: int
    setting: str = ""
    """Where methods are compared: data, network, depth, batch."""
    run: str = ""
    """Name of the run folder."""
    differs: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration by which this method differs from others: {"scaling": "cs"}."""
    held_out: Curve = Curve()
    """Held-out losses of the averaged weights."""
    kappas: tuple[float, ...] = ()
    """Coefficients of the last step."""
    oscillation: Oscillation = NOT_RECORDED
    """Of the features on the probe batch, over all blocks: mean O1, O2, O3 and the highest peak."""
    o1_gradient: float | None = None
    frechet: float | None = None
    """Fréchet distance of the last samples, where it was measured."""
    diverged: str | None = None
    """Why the run ended early: its numbers stopped being finite."""
    seconds: float | None = None
    """Seconds of training, on whatever machine that was; without held-out losses and scores."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """All that was recorded, by name; empty for records that come from a file of results."""
    traces: dict[str, list[float]] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    """Further measurements of a study."""
    config: dict[str, Any] = field(default_factory=dict)
    """The configuration by dotted names."""
    folder: Path | None = None
    finished: bool = True
    gave_up: bool = False
    """The guard of training ended the run, because its loss collapsed again after each rollback."""

    @property
    def collapsed(self) -> bool:
        """Whether the loss went up again for good."""
        return self.gave_up or self.held_out.collapsed

    @property
    def survived(self) -> bool:
        return not self.collapsed and self.diverged is None


def read_run(
    folder: str | PathLike[str],
    *,
    method: str | None = None,
    setting: str = "",
    seed: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunRecord:
    """One run, read once. What is not given comes from the folder: the variant's name, or else its scaling."""
    folder = Path(folder)
    values = dict(config) if config is not None else _config(folder)
    named = read_json(folder / VARIANT)
    curves = read_curves(folder)
    ending = read_json(folder / DIVERGED)
    gradient = curves.get("gradient_norm/all")
    return RunRecord(
        method=method or named.get("name") or str(values.get("scaling", BASELINE)),
        seed=int(values.get("seed", 0)) if seed is None else seed,
        setting=setting,
        run=folder.name,
        differs=dict(named.get("changes", {})),
        held_out=curves.get("held_out_loss", Curve()),
        kappas=_kappas(curves),
        oscillation=block_oscillation(curves),
        o1_gradient=oscillation(gradient.values).o1 if gradient else None,
        frechet=curves["frechet"].last if "frechet" in curves else None,
        diverged=str(ending.get("message", ""))
        if (folder / DIVERGED).exists() and not ending.get("collapsed")
        else None,
        gave_up=bool(ending.get("collapsed")),
        seconds=curves["seconds"].last if "seconds" in curves else None,
        curves=curves,
        config=values,
        folder=folder,
        finished=_finished(folder, values),
    )


def write_variant(folder: Path, name: str, changes: Mapping[str, Any]) -> None:
    """Write the name under which a comparison knows the run into its folder, for reports."""
    make_folder(folder)
    if not (folder / VARIANT).exists():
        write_text(folder / VARIANT, json.dumps({"name": name, "changes": dict(changes)}, ensure_ascii=False))


def own_file(folder: Path, name: str) -> Path:
    """The path of a file of a run. The folder may be a stranger's, so a link, which may lead anywhere, is refused."""
    if os.path.lexists(folder / name):
        below(folder).open(name).close()
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder; empty if there is no such file."""
    if not own_file(path.parent, path.name).exists():
        return {}
    try:
        values = read_json_file(path)
    except CannotReadError as error:
        raise InvalidConfigError(f"{error}; or remove it from the run folder") from error
    return values if isinstance(values, dict) else {}


def _config(folder: Path) -> dict[str, Any]:
    """config.yaml by dotted names, as it stands there. `load_config` would check it, and needs torch for that."""
    path = own_file(folder, CONFIG)
    if not path.exists():
        return {}
    try:
        return flatten(read_fields(path))
    except CannotReadError as error:
        raise InvalidConfigError(str(error)) from error


def _finished(folder: Path, config: Mapping[str, Any]) -> bool:
    """All steps are done, patience ran out, or the run diverged or collapsed: there is nothing left to do."""
    if (folder / DIVERGED).exists() or (folder / STOPPED).exists():
        return True
    saved = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    steps = [int(step) for step in saved if step.isdigit()]
    return bool(steps) and max(steps) >= int(config.get("steps", 0))


def _kappas(curves: Mapping[str, Curve]) -> tuple[float, ...]:
    names = sorted((name for name in curves if name.startswith("kappa/")), key=lambda name: int(name.split("/")[1]))
    return tuple(curves[name].values[-1] for name in names)


def block_oscillation(curves: Mapping[str, Curve]) -> Oscillation:
    """The scores of all blocks of one run together. A gate that closes for one block closes for the run."""
    held_out = curves.get("held_out_loss")
    loss = held_out.values[-1] if held_out else None
    series = [curve.values for name, curve in curves.items() if name.startswith("probe_block_rms/")]
    scores = [oscillation(values, loss=loss) for values in series]
    if not scores:
        return NOT_RECORDED
    return Oscillation(
        o1=fmean(score.o1 for score in scores),
        o2=fmean(score.o2 for score in scores),
        o3=fmean(score.o3 for score in scores),
        peak=max(score.peak for score in scores),
        readings=scores[0].readings,
        gate=next((score.gate for score in scores if score.gate), ""),
    )
