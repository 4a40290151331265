"""The folder of a run: everything needed to understand it and to continue it."""

import json
import logging
import math
import os
import platform
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
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
    TrainConfig,
    conflicting_changes,
    differences,
    dump_config,
    load_config,
)
from ..data import DATASETS, ImageData
from ..diffusion import words_of
from ..errors import CannotReadError, FileAccessError, LinkRefusedError, RunFolderError
from ..files import (
    NOT_THE_FILE,
    append_json_line,
    below,
    forget_lock,
    in_words,
    locked,
    make_folder,
    read_json,
    read_json_lines,
    read_text,
    remove_leftovers,
    write_text,
    writing,
)
from .checkpoint import remove_unfinished, run_of, saved_steps, usable_checkpoint
from .model import DataShape, RunData, factory_of, shape_of

logger = logging.getLogger(__name__)

LOST = "lost_bytes"
"""In a line of metrics: so much of the curve before it is gone."""
MOST_WORDS = 5000
"""Largest vocabulary that is listed in data.json."""
VARIANT = "variant.json"
"""The name that a comparison gives to a run, written before the run begins."""
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

    def begun_with(self) -> TrainConfig | None:
        """The configuration of the run in this folder; None before its first checkpoint."""
        begun = (self.path / CONFIG).exists() and saved_steps(self.checkpoints)
        return load_config(self.path / CONFIG) if begun else None

    def check(self, config: TrainConfig, data: RunData, say: Callable[[str], None]) -> Path | None:
        """Before anything is written: the folder is empty, or the run in it is this run and can go on.

        The checkpoint to go on from; None for a new run.
        """
        if (self.path / CONFIG).exists():
            if saved_steps(self.checkpoints):  # a run that failed before its first checkpoint may be corrected
                self._require_same(config, data, say)
        elif any(e for e in self.path.iterdir() if not e.name.startswith(".") and e.name != VARIANT):
            raise RunFolderError(f"{self.path} is not empty and holds no run; choose another folder with --out")
        for folder in (self.path, self.samples):
            remove_leftovers(folder)
        remove_unfinished(self.checkpoints)
        return self._start(say)

    def open(self, config: TrainConfig, data: RunData, processes: dict[str, Any]) -> None:
        """Write down what the run is."""
        images = data.train
        about = {
            **asdict(shape_of(images)),
            "name": images.name,
            "images": len(images),
            **fingerprints(data),
            "vocabulary": vocabulary_of(images),
        }
        # The configuration first: a kill between two of these files leaves a folder that is known as a run.
        write_text(self.path / CONFIG, dump_config(config))
        write_text(self.path / DATA, json.dumps(about, indent=2))
        if not (self.path / RUN).exists() and not saved_steps(self.checkpoints):
            write_text(self.path / RUN, json.dumps({"id": uuid.uuid4().hex[:16]}))
        write_text(self.path / ENVIRONMENT, json.dumps(environment() | processes, indent=2))
        write_text(self.path / README, _README_TEXT.format(command=self._command(config)))

    @property
    def id(self) -> str | None:
        """What tells this run from others of the same shapes. Runs of earlier versions have none."""
        try:
            if not os.path.lexists(self.path / RUN):
                return run_of(self.checkpoints)
            return str(read_json(self.path / RUN)["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileAccessError) and error.errno in NOT_THE_FILE:
                raise
            raise RunFolderError(
                f"{self.path / RUN} cannot be read ({in_words(error)}): restore it, or remove it to take "
                f"the id that all "
                f"checkpoints carry"
            ) from error

    def _start(self, say: Callable[[str], None]) -> Path | None:
        """A run whose checkpoints are lost is never begun again over it."""
        path = usable_checkpoint(self.checkpoints, say, self.id)
        if path is None and self.metrics.exists() and self.metrics.stat().st_size > 0:
            raise RunFolderError(
                f"{self.path} has {METRICS} and no checkpoint in {self.checkpoints}: to begin again would overwrite "
                f"what was recorded. To continue the run, restore its checkpoints from a copy; to begin again, choose "
                f"another folder with --out, or move {self.path} away"
            )
        return path

    def _command(self, config: TrainConfig) -> str:
        """What continues the run: the command that made it, or one that always works."""
        path = str(self.path)
        consent = ["--trust"] if factory_of(config) else []
        always = ["scalelong", "train", "--config", f"{path}/{CONFIG}", "--out", path, *consent]
        return this_command() or shlex.join(always)

    def _require_same(self, config: TrainConfig, data: RunData, say: Callable[[str], None]) -> None:
        before = load_config(self.path / CONFIG)
        conflicts = conflicting_changes(before, config)
        if "data" in conflicts and _same_data(before.data, config.data):
            del conflicts["data"]
        if conflicts:
            changes = "\n".join(f"  {name}: {old!r} -> {new!r}" for name, (old, new) in conflicts.items())
            raise RunFolderError(
                f"{self.path} holds a run with a different configuration:\n{changes}\n"
                f"Give the same values to continue it, or another folder with --out"
            )
        require_same_data(self.path, config, fingerprints(data))
        for name, (old, new) in differences(before, config).items():
            say(f"changed: {name}: {old!r} -> {new!r}")

    def about(self) -> dict[str, Any]:
        """data.json: size, classes and fingerprint of the data. A damaged one is refused."""
        path = self.path / DATA
        mend = "to write it anew, remove it and give the command that trained the run (README.md has it)"
        try:
            about = read_json(path)
        except CannotReadError as error:
            raise RunFolderError(f"{error}; {mend}") from error
        fault = _fault(about)
        if fault is not None:
            raise RunFolderError(f"{path} is damaged: {fault}; {mend}")
        return {"name": "unknown data", "images": 0, "fingerprint": "unknown", **about}

    def shape(self) -> DataShape:
        about = self.about()
        classes = about.get("classes")
        return DataShape(about["channels"], about["height"], about["width"], tuple(classes) if classes else None)

    def vocabulary(self) -> list[str] | None:
        """The words of the captions; None if there are none, or too many to list."""
        return self.about().get("vocabulary")

    def tracker_id(self) -> str:
        """The id by which trackers know the run, kept in the folder: a run that continues is the same run there."""
        path = self.path / TRACKER_ID
        if not path.exists():
            write_text(path, uuid.uuid4().hex[:12])
        return read_text(path, 1000).strip()

    def mlflow_id(self) -> str | None:
        """The id that MLflow gave the run when it was begun there; it takes none of ours."""
        path = self.path / MLFLOW_ID
        return read_text(path, 1000).strip() if path.exists() else None

    def keep_mlflow_id(self, value: str) -> None:
        write_text(self.path / MLFLOW_ID, value)

    def append_metrics(self, values: dict[str, Any]) -> None:
        append_json_line(self.metrics, values)

    def sync_metrics(self) -> int:
        """Write the metrics to the disk, and return their length. A checkpoint's manifest keeps it."""
        if not self.metrics.exists():
            return 0
        with below(self.path).open(METRICS, "r+b") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def cut_metrics(self, step: int, length: int | None = None) -> None:
        """Forget what was recorded after a step: it will be recorded again.

        `length` is how long the file was when the checkpoint of that step was written.
        """
        kept = 0
        if self.metrics.exists():
            with writing(self.metrics), below(self.path).open(METRICS, "r+b") as file:
                end = 0
                for line in file:
                    end += len(line)
                    kept = end if _step_of(line) <= step else kept
                file.truncate(kept)
        if length is not None and kept < length:
            lost = length - kept
            logger.warning(
                "%s lost %d bytes from before step %d, perhaps by a power loss: its curves have a gap, and `compare` "
                "refuses them",
                self.metrics,
                lost,
                step,
            )
            self.append_metrics({"step": step, LOST: lost})

    def rollbacks(self) -> list[dict[str, Any]]:
        path = self.path / ROLLBACKS
        found = read_json(path) if path.exists() else []
        if not isinstance(found, list) or not all(_is_rollback(entry) for entry in found):
            raise RunFolderError(f"{path} is damaged: restore it, or remove it to go on with the full rate")
        return found

    def rate_factor(self) -> float:
        """By how much rollbacks have lowered the rate."""
        return math.prod(entry["factor"] for entry in self.rollbacks())

    def record_rollback(self, entry: dict[str, Any]) -> None:
        write_text(self.path / ROLLBACKS, json.dumps([*self.rollbacks(), entry], indent=2))


_OWN_FILES = (CONFIG, DATA, RUN, ENVIRONMENT, README, METRICS, ALARMS, ROLLBACKS, SCORES, TRACKER_ID, MLFLOW_ID)
_OWN_FOLDERS = (CHECKPOINTS, SAMPLES, IMAGES, AVERAGES, TENSORBOARD)
_POINTERS = ("latest", "best")


def require_no_links(folder: Path) -> None:
    """LinkRefusedError if a file or folder of a run is a symbolic link: what is written there would go elsewhere.

    checkpoints/latest and checkpoints/best are links of ours, to a name in the same folder.
    """
    for name in (*_OWN_FILES, ".lock", ".lock-holder", *_OWN_FOLDERS):
        path = folder / name
        _refuse_link(path)
        if name in _OWN_FOLDERS and path.is_dir():
            for root, folders, files in os.walk(path):
                for inner in (Path(root, each) for each in (*folders, *files)):
                    ours = name == CHECKPOINTS and inner.parent == path and inner.name in _POINTERS
                    if not (ours and inner.is_symlink() and os.sep not in os.readlink(inner)):
                        _refuse_link(inner)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise LinkRefusedError(
            f"{path} is a symbolic link, and links inside a run folder are not followed: replace it by what it points "
            f"to, or remove it"
        )


def with_absolute_data(config: TrainConfig) -> TrainConfig:
    """The configuration with the absolute path of local data, so that the run is usable from any working directory."""
    data = Path(config.data).expanduser()
    local = config.data not in DATASETS and (os.sep in config.data or data.exists())
    return replace(config, data=str(data.absolute())) if local and data.exists() else config


def _same_data(before: str, now: str) -> bool:
    """Whether a relative path, as earlier versions kept it, may be this one. The fingerprints are compared as well."""
    parts = Path(before).parts
    return not Path(before).is_absolute() and Path(now).parts[-len(parts) :] == parts


def _fault(about: Any) -> str | None:
    """What is wrong with the content of data.json, which others may have edited."""
    if not isinstance(about, dict):
        return "it is no JSON object"
    for name in ("channels", "height", "width"):
        if not isinstance(about.get(name), int) or isinstance(about[name], bool) or not 0 < about[name] < 2**31:
            return f"{name!r} must be a whole number above 0, found {about.get(name)!r}"
    for name, kind in (("fingerprint", str), ("name", str), ("images", int)):
        if not isinstance(about.get(name, kind()), kind):
            return f"{name!r} must be of the type {kind.__name__}, found {about[name]!r}"
    for name in ("classes", "vocabulary"):
        entries = about.get(name)
        if entries is not None and not (isinstance(entries, list) and all(isinstance(one, str) for one in entries)):
            return f"{name!r} must be a list of texts or null"
    return None


def _is_rollback(entry: Any) -> bool:
    numbers = ("bad_step", "to_step", "factor")
    return isinstance(entry, dict) and all(isinstance(entry.get(name), int | float) for name in numbers)


def fingerprints(data: RunData) -> dict[str, str]:
    """Of the images that are trained on, and of those held out: both decide what a run records."""
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
                f"before, {value[:12]} now); restore them, or choose another folder with --out"
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


def vocabulary_of(data: ImageData) -> list[str] | None:
    """The words of the captions, if they are few enough to be a vocabulary."""
    if data.annotations.captions is None:
        return None
    words = sorted({word for caption in data.annotations.captions for word in words_of(caption)})
    return words if len(words) <= MOST_WORDS else None


def environment() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "scalelong": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "threads": torch.get_num_threads(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
    }
