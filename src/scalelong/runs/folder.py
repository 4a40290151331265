"""The folder of a run: everything needed to understand it and to continue it."""

import json
import logging
import math
import os
import platform
import shlex
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..config import (
    ALARMS,
    AVERAGES,
    CHECKPOINTS,
    CONFIG,
    DATA,
    ENVIRONMENT,
    IMAGES,
    METRICS,
    MLFLOW_ID,
    README,
    ROLLBACKS,
    RUN,
    SAMPLES,
    SCORES,
    TENSORBOARD,
    TRACKER_ID,
    VARIANT,
    TrainConfig,
    conflicting_changes,
    differences,
    dump_config,
    load_config,
)
from ..data import DATASETS
from ..diffusion import words_of
from ..errors import CannotReadError, RunFolderError
from ..files import (
    NOT_THE_FILE,
    append_json_line,
    below,
    forget_lock,
    locked,
    make_folder,
    parse_json,
    read_json_lines,
    refuse_link,
    refuse_links_in,
    remove_leftovers,
    writing,
)
from .checkpoint import newest_good, remove_unfinished, saved_steps
from .model import DataShape, RunData, factory_of, shape_of

logger = logging.getLogger(__name__)

LOST = "lost_bytes"
"""In a line of metrics: so much of the curve before it is gone."""
MOST_WORDS = 5000
"""Largest vocabulary that is listed in data.json."""
COMMAND_VARIABLE = "SCALELONG_COMMAND"
"""Tells the processes of a comparison which command they belong to."""
PACKAGES = ("torch", "accelerate", "diffusers", "safetensors", "numpy")

_README_TEXT = """\
# A run of `scalelong train`

To continue it, or to train longer with more --steps, run the same command again:

    {command}

| file | what |
|---|---|
| config.yaml | the configuration; `scalelong train --config config.yaml` repeats it |
| data.json | size, classes and fingerprint of the data |
| run.json | the id of the run, which its checkpoints carry |
| environment.json | versions and hardware of the latest start |
| metrics.jsonl | loss, gradient norm, speed, ...: one JSON object per line |
| alarms.jsonl | what the stability monitor warned of, if anything |
| tensorboard/ | the same for `tensorboard --logdir .` |
| samples/ | sample grids, made with the averaged weights |
| images/, scores.jsonl | what `scalelong sample` and `scalelong eval` made of it |
| averages/ | with --ema-lengths: snapshots of the averages, for `scalelong export --ema` |
| checkpoints/ | checkpoints/latest/ema.safetensors holds the averaged weights, model.safetensors the raw ones |
"""


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.files = below(self.path)
        self.checkpoints = self.path / CHECKPOINTS
        self.samples = self.path / SAMPLES
        self.averages = self.path / AVERAGES
        self.metrics = self.path / METRICS

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While this process has the folder, another one is refused. Where no run was begun, nothing remains."""
        require_no_links(self.path)
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        make_folder(self.path)
        try:
            with locked(self.path, wait=False):
                try:
                    yield
                finally:
                    if not (self.path / CONFIG).exists():
                        forget_lock(self.path)
        finally:
            with suppress(OSError):  # what is not empty stays
                for folder in missing:
                    folder.rmdir()

    # What the run is

    def begun_with(self) -> TrainConfig | None:
        """The configuration of the run in this folder; None before its first checkpoint."""
        begun = (self.path / CONFIG).exists() and saved_steps(self.checkpoints)
        return load_config(self.path / CONFIG) if begun else None

    def check(self, config: TrainConfig, data: RunData) -> Path | None:
        """Before anything is written: the folder is empty, or the run in it is this run and can go on.

        The checkpoint to go on from; None for a new run.
        """
        before = self.begun_with()  # a run that failed before its first checkpoint may be corrected
        if before is not None:
            self._require_same(before, config, data)
        elif not (self.path / CONFIG).exists() and any(
            name for name in self.files.names() if not name.startswith(".") and name != VARIANT
        ):
            raise RunFolderError(f"{self.path} is not empty and holds no run; choose another folder (`out`)")
        for folder in (self.path, self.samples):
            remove_leftovers(folder)
        remove_unfinished(self.checkpoints)
        path = newest_good(self.checkpoints, run=self.id, needed=True)
        if path is None and self.metrics.exists() and self.metrics.stat().st_size > 0:
            raise RunFolderError(
                f"{self.path} has {METRICS} and no checkpoint: to continue the run, restore its checkpoints from a "
                f"copy; to begin again, choose another folder (`out`), or move this one away"
            )
        return path

    def _require_same(self, before: TrainConfig, config: TrainConfig, data: RunData) -> None:
        conflicts = conflicting_changes(before, config)
        parts = Path(before.data).parts
        # A relative path, as 0.2 kept it, may be this one. The fingerprints are compared as well.
        if not Path(before.data).is_absolute() and Path(config.data).parts[-len(parts) :] == parts:
            conflicts.pop("data", None)
        if conflicts:
            changes = "\n".join(f"  {name}: {old!r} -> {new!r}" for name, (old, new) in conflicts.items())
            raise RunFolderError(
                f"{self.path} holds a run with a different configuration:\n{changes}\n"
                f"Give the same values to continue it, or another folder (`out`)"
            )
        require_same_data(self.path, config, fingerprints(data))
        for name, (old, new) in differences(before, config).items():
            logger.info(f"changed: {name}: {old!r} -> {new!r}")

    def open(self, config: TrainConfig, data: RunData, processes: dict[str, Any]) -> None:
        """Write down what the run is."""
        images = data.train
        captions = images.annotations.captions
        words = None if captions is None else sorted({word for caption in captions for word in words_of(caption)})
        about = {
            **asdict(shape_of(images)),
            "name": images.name,
            "images": len(images),
            **fingerprints(data),
            "vocabulary": words if words is not None and len(words) <= MOST_WORDS else None,
        }
        consent = ["--trust"] if factory_of(config) else []
        always = ["scalelong", "train", "--config", str(self.path / CONFIG), "--out", str(self.path), *consent]
        # The configuration first: a kill between two of these files leaves a folder that is known as a run.
        self.files.write_text(CONFIG, dump_config(config))
        self.files.write_text(DATA, json.dumps(about, indent=2))
        if not (self.path / RUN).exists() and not saved_steps(self.checkpoints):
            self.files.write_text(RUN, json.dumps({"id": uuid.uuid4().hex[:16]}))
        self.files.write_text(ENVIRONMENT, json.dumps(environment() | processes, indent=2))
        self.files.write_text(README, _README_TEXT.format(command=this_command() or shlex.join(always)))

    @property
    def id(self) -> str | None:
        """The id that tells this run from others of the same shapes; None before its first checkpoint."""
        if not os.path.lexists(self.path / RUN) and not saved_steps(self.checkpoints):
            return None
        mend = 'write {"id": "..."} with the id that "run" is in the manifest.json of its checkpoints'
        found = self._json(RUN, mend)
        if not isinstance(found, dict) or "id" not in found:
            raise RunFolderError(f"{self.path / RUN} has no entry 'id': restore it, or {mend}")
        return str(found["id"])

    def about(self) -> dict[str, Any]:
        """data.json: size, classes and fingerprint of the data. A damaged one is refused."""
        mend = "to write it again, remove it and give the command that trained the run (README.md has it)"
        about = self._json(DATA, mend)
        about = about if isinstance(about, dict) else {}
        for name, kind in _ABOUT.items():
            value = about.get(name)
            if kind is int:
                fits = type(value) is int and 0 < value < 2**31
            else:
                fits = value is None or (isinstance(value, kind) and all(isinstance(text, str) for text in value))
            if not fits:
                raise RunFolderError(f"{self.path / DATA} is damaged: {name!r} cannot be {str(value)[:60]!r}; {mend}")
        return {"name": "unknown data", "images": 0, "fingerprint": "unknown", **about}

    def shape(self) -> DataShape:
        about = self.about()
        classes = about.get("classes")
        return DataShape(about["channels"], about["height"], about["width"], tuple(classes) if classes else None)

    def vocabulary(self) -> list[str] | None:
        """The words of the captions; None if there are none, or too many to list."""
        return self.about().get("vocabulary")

    def _json(self, name: str, mend: str) -> Any:
        try:
            return parse_json(self.files.read_text(name))
        except (CannotReadError, ValueError) as error:
            if isinstance(error, CannotReadError) and error.errno in NOT_THE_FILE:
                raise
            raise RunFolderError(f"{self.path / name} cannot be read ({error}): restore it, or {mend}") from error

    # Ids of trackers: a run that continues is the same run there

    def tracker_id(self) -> str:
        """The id by which trackers know the run."""
        if not (self.path / TRACKER_ID).exists():
            self.files.write_text(TRACKER_ID, uuid.uuid4().hex[:12])
        return self.files.read_text(TRACKER_ID, 1000).strip()

    def mlflow_id(self, new: str | None = None) -> str | None:
        """The id that MLflow gave the run when it was begun there; it takes none of ours. `new` is kept."""
        if new is not None:
            self.files.write_text(MLFLOW_ID, new)
        return self.files.read_text(MLFLOW_ID, 1000).strip() if (self.path / MLFLOW_ID).exists() else None

    # What the run records

    def append_metrics(self, values: dict[str, Any]) -> None:
        append_json_line(self.metrics, values)

    def sync_metrics(self) -> int:
        """Write the metrics to the disk, and return their length. A checkpoint's manifest keeps it."""
        if not self.metrics.exists():
            return 0
        with self.files.open(METRICS, "r+b") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def cut_metrics(self, step: int, length: int | None = None) -> None:
        """Forget what was recorded after a step: it will be recorded again.

        `length` is how long the file was when the checkpoint of that step was written.
        """
        kept = 0
        if self.metrics.exists():
            with writing(self.metrics), self.files.open(METRICS, "r+b") as file:
                end = 0
                for line in file:
                    end += len(line)
                    kept = end if _step_of(line) <= step else kept
                file.truncate(kept)
        if length is not None and kept < length:
            logger.warning(
                "%s lost %d bytes from before step %d, perhaps by a power loss: its curves have a gap, and `compare` "
                "refuses them",
                *(self.metrics, length - kept, step),
            )
            self.append_metrics({"step": step, LOST: length - kept})

    def rollbacks(self) -> list[dict[str, Any]]:
        mend = "remove it to go on with the full rate"
        found = self._json(ROLLBACKS, mend) if (self.path / ROLLBACKS).exists() else []
        numbers = ("bad_step", "to_step", "factor")
        if not isinstance(found, list) or not all(
            isinstance(entry, dict) and all(isinstance(entry.get(name), int | float) for name in numbers)
            for entry in found
        ):
            raise RunFolderError(f"{self.path / ROLLBACKS} is damaged: restore it, or {mend}")
        return found

    def rate_factor(self) -> float:
        """By how much rollbacks have lowered the rate."""
        return math.prod(entry["factor"] for entry in self.rollbacks())

    def record_rollback(self, entry: dict[str, Any]) -> None:
        self.files.write_text(ROLLBACKS, json.dumps([*self.rollbacks(), entry], indent=2))


_ABOUT = {"channels": int, "height": int, "width": int, "fingerprint": str, "name": str}
_ABOUT |= {"classes": list, "vocabulary": list}
_OWN_FILES = (CONFIG, DATA, RUN, ENVIRONMENT, README, METRICS, ALARMS, ROLLBACKS, SCORES, TRACKER_ID, MLFLOW_ID)
_OWN_FOLDERS = (CHECKPOINTS, SAMPLES, IMAGES, AVERAGES, TENSORBOARD)


def require_no_links(folder: Path) -> None:
    """LinkRefusedError if a file or folder of a run is a symbolic link: what is written there would go elsewhere."""
    for name in (*_OWN_FILES, ".lock", ".lock-holder", *_OWN_FOLDERS):
        refuse_link(folder / name)
        if name in _OWN_FOLDERS:
            refuse_links_in(folder / name)


def with_absolute_data(config: TrainConfig) -> TrainConfig:
    """The configuration with the absolute path of local data, so that the run is usable from any working directory."""
    data = Path(config.data).expanduser()
    local = config.data not in DATASETS and (os.sep in config.data or data.exists())
    return replace(config, data=str(data.absolute())) if local and data.exists() else config


def fingerprints(data: RunData) -> dict[str, str]:
    """The fingerprints of the images that are trained on and of those held out: both decide what a run records."""
    found = {"fingerprint": data.train.fingerprint()}
    return found if data.held_out is None else found | {"held_out_fingerprint": data.held_out.fingerprint()}


def require_same_data(folder: Path, config: TrainConfig, now: dict[str, str]) -> None:
    """RunFolderError if the images are not those that the folder notes. What it does not note is not compared."""
    before = RunFolder(folder).about() if (folder / DATA).exists() else {}
    for name, value in now.items():
        if before.get(name, value) != value:
            which = "the held-out images of" if name.startswith("held_out") else "the data"
            raise RunFolderError(
                f"{which} {config.data!r} have changed since {folder} was begun (fingerprint {str(before[name])[:12]} "
                f"before, {value[:12]} now); restore them, or choose another folder (`out`)"
            )


def _step_of(line: bytes) -> float:
    """The step of a line of metrics. A line that a kill cut off belongs to what is forgotten."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int | float) else math.inf


def this_command() -> str | None:
    """The `scalelong` command that this process carries out; None in a script or a notebook."""
    program = Path(sys.argv[0])
    if program.stem == "scalelong" or program.parts[-2:] == ("scalelong", "__main__.py"):
        return shlex.join(["scalelong", *sys.argv[1:]])
    # A run of a comparison in a process of its own: what a person typed is known to the one that started it.
    return os.environ.get(COMMAND_VARIABLE) or None


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics. A line that a kill cut off, or that someone else wrote, is left out."""
    file = Path(path) / METRICS
    lines = read_json_lines(file) if file.exists() else []
    return [line for line in lines if isinstance(line.get("step"), int)]


def require_whole_curve(folder: Path) -> None:
    """RunFolderError if a part of the metrics of a run is lost: its curves cannot be compared with others."""
    lost = [line["step"] for line in read_metrics(folder) if LOST in line]
    if lost:
        raise RunFolderError(
            f"{folder / METRICS} has a gap before step {lost[0]}: restore it from a copy, or train the run again in "
            f"another folder"
        )


def environment() -> dict[str, Any]:
    return {
        "scalelong": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: next((found.version for found in distributions(name=name)), None) for name in PACKAGES},
        "threads": torch.get_num_threads(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
    }
