"""One run as a record: its curves, read from metrics.jsonl, and its outcome."""

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from ..config import CHECKPOINTS, CONFIG, DIVERGED, METRICS, VARIANT, flatten
from ..files import below, read_fields, read_json, read_json_lines
from ..stability import has_collapsed

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
        after = bisect_left(self.steps, step)
        if self.steps[after] == step:
            # Interpolated, it may come out below by a rounding error, and then the curve itself never reaches it.
            return self.values[after]
        (left, low), (right, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * (step - left) / (right - left)

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


def read_curves(folder: str | PathLike[str]) -> dict[str, Curve]:
    """All quantities of a run by name. What someone else wrote between the lines is left out."""
    found: dict[str, dict[int, float]] = {}
    for values in read_own_lines(Path(folder) / METRICS):
        step = values.pop("step", None)
        for name, value in values.items() if isinstance(step, int) else ():
            if isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 64):
                found.setdefault(name, {})[step] = float(value)
    return {name: _curve(values) for name, values in found.items()}


def _curve(values: Mapping[int, float]) -> Curve:
    """A long curve keeps every 2ᵏ-th record, at equal distances, and the last one."""
    steps, stride = sorted(values), 1
    while len(steps) > MOST_POINTS * stride:
        stride *= 2
    kept = sorted({*steps[::stride], steps[-1]})
    return Curve(tuple(kept), tuple(values[step] for step in kept))


def last_line(folder: Path, name: str) -> dict[str, Any] | None:
    """The newest line of the metrics that has this quantity."""
    return next((line for line in reversed(read_own_lines(folder / METRICS)) if name in line), None)


# One run


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
    # As it stands there: `load_config` would check it, and needs torch for that.
    values = flatten(read_own_json(folder / CONFIG, read_fields)) if config is None else dict(config)
    named = read_own_json(folder / VARIANT)
    curves = read_curves(folder)
    ending = read_own_json(folder / DIVERGED)
    # The file may have been edited.
    given = [values.get(name) for name in ("steps", "checkpoints.patience")]
    steps = [value if isinstance(value, int) else 0 for value in given]
    return RunRecord(
        method=method or named.get("name") or str(values.get("scaling", BASELINE)),
        seed=int(values.get("seed", 0)) if seed is None else seed,
        setting=setting,
        run=folder.name,
        differs=dict(named.get("changes", {})),
        held_out=curves.get("held_out_loss", Curve()),
        kappas=_kappas(curves),
        frechet=curves["frechet"].last if "frechet" in curves else None,
        diverged=str(ending.get("message", ""))
        if (folder / DIVERGED).exists() and not ending.get("collapsed")
        else None,
        gave_up=bool(ending.get("collapsed")),
        seconds=curves["seconds"].last if "seconds" in curves else None,
        curves=curves,
        config=values,
        folder=folder,
        finished=is_finished(folder, *steps),
    )


def own_file(folder: Path, name: str) -> Path:
    """The path of a file of a run. The folder may be a stranger's, so a link, which may lead anywhere, is refused."""
    if os.path.lexists(folder / name):
        below(folder).open(name).close()
    return folder / name


def read_own_json(path: Path, reader: Callable[[Path], Any] = read_json) -> dict[str, Any]:
    """A JSON object of a run folder; empty if there is no such file."""
    if not own_file(path.parent, path.name).exists():
        return {}
    values = reader(path)
    return values if isinstance(values, dict) else {}


def read_own_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines of a run folder; cut and foreign lines are left out."""
    return read_json_lines(path) if own_file(path.parent, path.name).exists() else []


def is_finished(folder: Path, steps: int, patience: int = 0) -> bool:
    """All steps are done, patience ran out, or the run diverged or collapsed: there is nothing left to do."""
    names = [path.name.removeprefix("step-") for path in (folder / CHECKPOINTS).glob("step-*")]
    saved = max((int(name) for name in names if name.isdigit()), default=0)
    stopped = read_own_json(folder / STOPPED)
    early = stopped.get("step") == saved and stopped.get("patience", 0) >= patience > 0
    return (folder / DIVERGED).exists() or early or 0 < steps <= saved


def _kappas(curves: Mapping[str, Curve]) -> tuple[float, ...]:
    """The last values of kappa/1, kappa/2, ..."""
    found: list[float] = []
    while (name := f"kappa/{len(found) + 1}") in curves:
        found.append(curves[name].values[-1])
    return tuple(found)
