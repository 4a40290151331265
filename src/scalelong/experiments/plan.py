"""The runs of a comparison: variants, plans, the probe batch, one run from its first step to its last."""

import json
import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..config import CONFIG, TrainConfig, flatten, from_dict, load_config, result_values, to_dict
from ..errors import (
    CollapseError,
    InvalidConfigError,
    NonFiniteError,
    RunFolderError,
    RunLockedError,
    ScaleLongError,
)
from ..files import digest, locked, parse_json, write_text
from ..runs import (
    Run,
    RunData,
    build_model,
    fingerprints,
    load_run_data,
    require_same_data,
    require_whole_curve,
    saved_steps,
)
from ..scaling import as_scaling
from ..stability import Diagnosis, diagnose
from ..training import train
from .records import DIAGNOSIS, DIVERGED, STOPPED, VARIANT, RunRecord, read_json, read_run, write_variant

logger = logging.getLogger(__name__)

# Variants of a comparison that differ in more than the scaling: "fast: scaling=cs:0.7 lr=2e-3".

OPTIONS = "model_options"


@dataclass(frozen=True)
class Variant:
    """A name, and the fields of the configuration that it changes, by dotted name: {"optimizer.lr": 0.002}."""

    name: str
    changes: dict[str, Any]

    def apply(self, config: TrainConfig) -> TrainConfig:
        values = to_dict(config)
        for path, value in self.changes.items():
            group = values
            *parents, name = path.split(".")
            for parent in parents:
                group = group[parent]
            group[name] = value
        if values["hardware"]["precision"] == "auto":  # all runs of a comparison have the same
            values["hardware"]["precision"] = "fp32"
        return from_dict(values)


def as_variant(given: Variant | str) -> Variant:
    """A variant from itself, from a method of scaling, or from a text such as "fast: scaling=cs lr=2e-3"."""
    if isinstance(given, Variant):
        return given
    name, colon, changes = given.partition(": ")
    found = Variant(name.strip(), dict(_change(part, given) for part in changes.split()))
    found = found if colon else Variant(given, {"scaling": given})
    as_scaling(found.changes.get("scaling", "none"))
    return found


def _change(text: str, variant: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidConfigError(
            f"a variant looks like 'fast: scaling=cs:0.7 lr=2e-3'; correct {text!r} in {variant!r}"
        )
    path = _path(name)
    if path == "scaling":
        return path, value
    try:
        return path, parse_json(value)
    except ValueError:
        return path, value


def _path(name: str) -> str:
    """Fields have names of their own in all groups, so that the group may be left out."""
    base = TrainConfig()
    known = {each.name: each.name for each in fields(base)}
    for group in [each.name for each in fields(base) if is_dataclass(getattr(base, each.name))]:
        known |= {each.name: f"{group}.{each.name}" for each in fields(getattr(base, group))}
    if name in known.values() or name.startswith(f"{OPTIONS}."):
        return name
    if name not in known:
        raise InvalidConfigError(
            f"a variant cannot change {name!r}: it is not a field of the configuration. Options of the model are "
            f"written {OPTIONS}.{name}; fields are {', '.join(known)}"
        )
    return known[name]


# The diagnosis of a recipe: its model as it starts, on its own data.

BATCH = 16
IMAGES = 512
"""Images from which κ is chosen."""


def diagnose_config(config: TrainConfig) -> Diagnosis:
    """Before training: the initial weights of this configuration, without scaling."""
    data = load_run_data(config)
    return _diagnose(build_model(replace(config, scaling="none"), data.shape), data)


def diagnose_run(run: Run) -> Diagnosis:
    """During or after training: the weights of a run."""
    return _diagnose(run.model, load_run_data(run.config))


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> Path:
    """The report of this folder shows it."""
    write_text(folder / DIAGNOSIS, diagnosis.to_json())
    return folder / DIAGNOSIS


def _diagnose(model: nn.Module, data: RunData) -> Diagnosis:
    batch = data.probe(BATCH).arguments(model)
    return diagnose(model, batch)


# The runs of a comparison: one per method and seed, each in a run folder of its own.
#
# Runs of one seed differ in what the method says alone, mostly the scaling: they share initial weights, order of data,
# noise and times, because the trainer draws all of them as functions of (seed, step).


@dataclass(frozen=True)
class PlannedRun:
    """A run before, while and after it is trained."""

    method: str
    """The name of the method or variant, which is written into the folder."""
    seed: int
    folder: Path
    config: TrainConfig
    changes: dict[str, Any] = field(default_factory=dict)
    """The fields of the configuration that the method changes."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        """All steps are done, patience ran out, or the run diverged or collapsed: there is nothing left to do."""
        if (self.folder / DIVERGED).exists():
            return True
        steps = saved_steps(self.folder / "checkpoints")
        if not steps:
            return False
        stopped = read_json(self.folder / STOPPED)
        # With more patience than it had, a run that stopped early goes on.
        early = stopped.get("step") == steps[-1] and stopped["patience"] >= self.config.checkpoints.patience > 0
        return early or steps[-1] >= self.config.steps

    @property
    def at_work(self) -> bool:
        """Whether a process trains it now."""
        if not (self.folder / ".lock").exists():
            return False
        try:
            with locked(self.folder, wait=False):
                return False
        except RunLockedError:
            return True

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    def read(self, setting: str = "") -> RunRecord:
        """What became of it."""
        return read_run(
            self.folder,
            method=self.method,
            setting=setting,
            seed=self.seed,
            config=flatten(to_dict(self.config)),
        )


def plan_runs(
    config: TrainConfig, methods: Sequence[str | Variant], seeds: Sequence[int], out: Path, prefix: str = ""
) -> list[PlannedRun]:
    """Seed by seed, so that an interrupted comparison holds complete seeds."""
    if not methods or not seeds:
        raise InvalidConfigError("a comparison needs at least one method and one seed")
    variants = [as_variant(method) for method in methods]
    for given, kind in (([variant.name for variant in variants], "method"), (seeds, "seed")):
        twice = sorted({str(entry) for entry in given if list(given).count(entry) > 1})
        if twice:
            raise InvalidConfigError(f"{kind} {', '.join(twice)} is given twice: leave one out")
    configs = {variant.name: (variant.apply(config), variant.changes) for variant in variants}
    folders = _folder_names(list(configs))
    return [
        PlannedRun(name, seed, out / f"{prefix}{folders[name]}-seed{seed}", replace(changed, seed=seed), changes)
        for seed in seeds
        for name, (changed, changes) in configs.items()
    ]


def run_one(run: PlannedRun, every: int) -> bool:
    """Train, or continue to train, with a reading every `every` steps. False if it was interrupted.

    A run that diverges, collapses or stops early is a result, not a failure.
    """
    config = replace(run.config, logging=replace(run.config.logging, monitor_every=every))
    write_variant(run.folder, run.method, run.changes)
    try:
        result = train(_to_the_end(config), run.folder)
    except (NonFiniteError, CollapseError) as error:
        collapsed = isinstance(error, CollapseError)
        write_text(run.folder / DIVERGED, json.dumps({"message": str(error), "collapsed": collapsed}))
        return True
    finally:
        if not (run.folder / CONFIG).exists():  # it was refused: nothing is left
            (run.folder / VARIANT).unlink(missing_ok=True)
            with suppress(OSError):
                run.folder.rmdir()
    if result.finished and result.step < config.steps:
        stopped = {"step": result.step, "patience": config.checkpoints.patience}
        write_text(run.folder / STOPPED, json.dumps(stopped))
    return result.finished


def _to_the_end(config: TrainConfig) -> TrainConfig:
    """A run that collapses is a result as well: it goes on, so that all curves have the same length."""
    stops = config.guard.on_collapse == "stop"
    return replace(config, guard=replace(config.guard, on_collapse="ignore")) if stops else config


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"


def _folder_names(names: Sequence[str]) -> dict[str, str]:
    """A folder of its own for every name, also where two differ in a space, or in what a file system does not tell
    apart. Scalings keep their short names, such as cs-0.7."""
    found: dict[str, str] = {}
    for name in names:
        short = slug(name)
        taken = short.lower() in map(str.lower, found.values())
        whole = not taken and len(short) <= 200 and _is_whole(name, short)
        found[name] = short if whole else f"{short[:100]}-{digest(name.encode())[:6]}"
    return found


def _is_whole(name: str, short: str) -> bool:
    """Whether the short form says all that the name says."""
    if short == name:
        return True
    try:
        as_scaling(name)
    except ScaleLongError:
        return False
    return len(short) <= 100


# A finished run stands for what is asked for only if it was asked for in the same way.


def require_same(runs: Sequence[PlannedRun]) -> None:
    """RunFolderError if a finished run had other settings or other data. Those that go on are checked by `train`."""
    known: dict[str, dict[str, str]] = {}
    for run in runs:
        if run.finished:
            _require_same_settings(run)
            _require_same_data(run, known)
            require_whole_curve(run.folder)


def recorded_values(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide the weights of a run and what is recorded of it: a run without scores has none to show."""
    values = flatten(to_dict(config))
    recorded = {name: value for name, value in values.items() if name.startswith("logging.")}
    for name in ("logging.trackers", "logging.monitor_every"):
        recorded.pop(name, None)
    return recorded | result_values(config)


def _require_same_settings(run: PlannedRun) -> None:
    was, now = recorded_values(load_config(run.folder / CONFIG)), recorded_values(run.config)
    if now["hardware.precision"] == "auto":  # a run writes down what it chose
        now["hardware.precision"] = was["hardware.precision"]
    shown = [
        f"{name}: {was.get(name)!r} -> {now.get(name)!r}" for name in {**was, **now} if was.get(name) != now.get(name)
    ]
    if shown:
        raise RunFolderError(
            f"{run.folder} holds a finished run with a different configuration: {'; '.join(shown)}. Give the same "
            f"values to see its results, or another folder with `out`"
        )


def _require_same_data(run: PlannedRun, known: dict[str, dict[str, str]]) -> None:
    """Images may have been changed in place. Which are held out depends on the seed."""
    config = run.config
    key = json.dumps([config.data, to_dict(config.images), config.diffusion.condition, config.seed])
    if key not in known:
        known[key] = fingerprints(load_run_data(config))
    require_same_data(run.folder, config, known[key])


# One process at a time

POLL_SECONDS = 0.5


def wait_until_free(folder: Path) -> None:
    """Wait until no other process trains the run of this folder: one whose comparison was killed, for example."""
    waiting = False
    while (folder / ".lock").exists():
        try:
            with locked(folder, wait=False):
                return
        except RunLockedError as error:
            if not waiting:
                logger.info("%s; waiting for it", error)
            waiting = True
            time.sleep(POLL_SECONDS)
