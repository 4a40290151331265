"""The runs of a comparison: variants, plans, one run from its first step to its last, the diagnosis of a recipe.

There is one run per method and seed, each in a run folder of its own. Runs of one seed differ in what the method says
alone, mostly the scaling: they share initial weights, order of data, noise and times, because the trainer draws all of
them as functions of (seed, step).
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import CONFIG, TrainConfig, field_paths, flatten, load_config, result_values, slug, to_dict, with_values
from ..errors import CollapseError, InvalidConfigError, NonFiniteError, RunFolderError, RunLockedError
from ..files import digest, locked, make_folder, parse_json, write_text
from ..runs import Run, build_model, fingerprints, load_run_data, require_same_data, require_whole_curve
from ..scaling import as_scaling
from ..stability import Diagnosis, diagnose
from ..training import train
from .records import DIAGNOSIS, DIVERGED, STOPPED, VARIANT, RunRecord, is_finished, read_run

logger = logging.getLogger(__name__)

OPTIONS = "model_options"
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Variant:
    """A name, and the fields of the configuration that it changes, by dotted name: {"optimizer.lr": 0.002}."""

    name: str
    changes: dict[str, Any]

    def apply(self, config: TrainConfig) -> TrainConfig:
        # All runs of a comparison have the same precision.
        precision = {"hardware.precision": "fp32"} if config.hardware.precision == "auto" else {}
        return with_values(config, {**precision, **self.changes})


def as_variant(given: Variant | str) -> Variant:
    """A variant from itself, from a method of scaling, or from a text such as "fast: scaling=cs:0.7 lr=2e-3"."""
    if isinstance(given, Variant):
        return given
    name, colon, changes = given.partition(": ")
    found = Variant(given, {"scaling": given})
    if colon:
        found = Variant(name.strip(), dict(_change(part, given) for part in changes.split()))
    as_scaling(found.changes.get("scaling", "none"))
    return found


def _change(text: str, variant: str) -> tuple[str, Any]:
    """The field and its value. Fields have names of their own in all groups, so that the group may be left out."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidConfigError(
            f"a variant looks like 'fast: scaling=cs:0.7 lr=2e-3'; correct {text!r} in {variant!r}"
        )
    known = field_paths()
    path = name if name in known.values() or name.startswith(f"{OPTIONS}.") else known.get(name)
    if path is None:
        raise InvalidConfigError(
            f"a variant cannot change {name!r}: it is not a field of the configuration. Options of the model are "
            f"written {OPTIONS}.{name}; fields are {', '.join(known)}"
        )
    if path == "scaling":
        return path, value
    with suppress(ValueError):
        return path, parse_json(value)
    return path, value


# The diagnosis of a recipe: its model as it starts, on its own data


def diagnose_config(config: TrainConfig, device: str = "cpu") -> Diagnosis:
    """Before training: the initial weights of this configuration, without scaling."""
    data = load_run_data(config)
    model = build_model(replace(config, scaling="none"), data.shape).to(device)
    return diagnose(model, data.probe(16).arguments(model))


def diagnose_run(run: Run) -> Diagnosis:
    """During or after training: the weights of a run."""
    return diagnose(run.model, load_run_data(run.config).probe(16).arguments(run.model))


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> Path:
    """The report of this folder shows it."""
    write_text(folder / DIAGNOSIS, diagnosis.to_json())
    return folder / DIAGNOSIS


# Runs


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
    def diverged(self) -> bool:
        """Whether its numbers stopped being finite, or it collapsed after each rollback."""
        return (self.folder / DIVERGED).exists()

    @property
    def finished(self) -> bool:
        """There is nothing left to do. With more patience than it had, a run that stopped early continues."""
        return is_finished(self.folder, self.config.steps, self.config.checkpoints.patience)

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

    def read(self, setting: str = "") -> RunRecord:
        """What became of it."""
        config = flatten(to_dict(self.config))
        return read_run(self.folder, method=self.method, setting=setting, seed=self.seed, config=config)


def plan_runs(
    config: TrainConfig, methods: Sequence[str | Variant], seeds: Sequence[int], out: Path
) -> list[PlannedRun]:
    """Seed by seed, so that an interrupted comparison holds complete seeds."""
    if not methods or not seeds:
        raise InvalidConfigError("a comparison needs at least one method and one seed")
    variants = [as_variant(method) for method in methods]
    for given, kind in (([variant.name for variant in variants], "method"), (seeds, "seed")):
        twice = sorted({str(entry) for entry in given if list(given).count(entry) > 1})
        if twice:
            raise InvalidConfigError(f"{kind} {', '.join(twice)} is given twice: leave one out")
    folders = _folder_names(variants)
    configs = [(variant.name, variant.apply(config), variant.changes) for variant in variants]
    return [
        PlannedRun(name, seed, out / f"{folders[name]}-seed{seed}", replace(changed, seed=seed), changes)
        for seed in seeds
        for name, changed, changes in configs
    ]


def _folder_names(variants: Sequence[Variant]) -> dict[str, str]:
    """Scalings keep their short names, such as cs-0.7. Other names that are not folders have a hash added, and those
    that a file system may not tell apart."""
    found: dict[str, str] = {}
    for name in (variant.name for variant in variants):
        short = slug(name)
        is_scaling = Variant(name, {"scaling": name}) in variants
        taken = short.lower() in map(str.lower, found.values())
        plain = not taken and len(short) <= 100 and (short == name or is_scaling)
        found[name] = short if plain else f"{short[:100]}-{digest(name.encode())[:6]}"
    return found


def run_one(run: PlannedRun) -> bool:
    """Train it, or continue to train it, when no other process does. False if it was interrupted.

    A run that diverges, collapses or stops early is a result, not a failure. One that collapses continues to its last
    step, so that all curves have the same length.
    """
    logger.info("%s", run.name)
    while os.environ.get("WORLD_SIZE", "1") == "1" and run.at_work:  # by a process whose comparison was killed
        time.sleep(POLL_SECONDS)
    if run.finished:
        return True
    config = run.config
    if config.guard.on_collapse == "stop":
        config = replace(config, guard=replace(config.guard, on_collapse="ignore"))
    # Reports name a run by its variant.
    variant = make_folder(run.folder) / VARIANT
    write_text(variant, json.dumps({"name": run.method, "changes": run.changes}, ensure_ascii=False))
    try:
        result = train(config, run.folder)
    except (NonFiniteError, CollapseError) as error:
        collapsed = isinstance(error, CollapseError)
        write_text(run.folder / DIVERGED, json.dumps({"message": str(error), "collapsed": collapsed}))
        return True
    finally:
        if not (run.folder / CONFIG).exists():  # it was refused: nothing is left
            variant.unlink(missing_ok=True)
            with suppress(OSError):
                run.folder.rmdir()
    if result.finished and result.step < config.steps:
        stopped = {"step": result.step, "patience": config.checkpoints.patience}
        write_text(run.folder / STOPPED, json.dumps(stopped))
    return result.finished


# A finished run stands for what is asked for only if it was asked for in the same way.


def require_same(runs: Sequence[PlannedRun]) -> None:
    """RunFolderError if a finished run had other settings or other data. Those that continue are checked by `train`."""
    known: dict[str, dict[str, str]] = {}
    for run in runs:
        if not run.finished:
            continue
        _require_same_settings(run)
        config = run.config
        # Images may have been changed in place. Which are held out depends on the seed.
        key = json.dumps([config.data, to_dict(config.images), config.diffusion.condition, config.seed])
        if key not in known:
            known[key] = fingerprints(load_run_data(config))
        require_same_data(run.folder, config, known[key])
        require_whole_curve(run.folder)


def recorded_values(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide the weights of a run and what is recorded of it: a run without scores has none to show."""
    values = flatten(to_dict(config)) | {"logging.trackers": None, "logging.monitor_every": None}
    return {name: value for name, value in values.items() if name.startswith("logging.")} | result_values(config)


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
