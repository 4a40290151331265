"""The folder of a run: everything needed to understand it and to continue it."""

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..data import ImageData
from ..diffusion.conditions import words_of
from ..errors import RunFolderError
from ..files import FolderLock, append_json_line, read_json_lines, write_json_lines, write_text
from .checkpoint import saved_steps
from .config import TrainConfig, conflicting_changes, differences, dump_config, load_config
from .model import DataShape, shape_of

CONFIG, DATA, METRICS, ROLLBACKS = "config.yaml", "data.json", "metrics.jsonl", "rollbacks.json"
MOST_WORDS = 5000
PACKAGES = ("torch", "accelerate", "diffusers", "safetensors", "numpy")

README = """\
# A run of `scalelong train`

To continue it, or to train longer with more --steps, run the same command again:

    {command}

| file | what |
|---|---|
| config.yaml | the configuration; `scalelong train --config config.yaml` repeats it |
| data.json | size, classes and fingerprint of the data |
| environment.json | versions and hardware of the latest start |
| metrics.jsonl | loss, gradient norm, speed, ...: one JSON object per line |
| tensorboard/ | the same for `tensorboard --logdir .` |
| samples/ | sample grids, made with the averaged weights |
| images/, scores.jsonl | what `scalelong sample` and `scalelong eval` made of it |
| checkpoints/ | checkpoints/latest/ema.safetensors holds the averaged weights, model.safetensors the raw ones |
"""


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.metrics = self.path / METRICS

    def locked(self) -> FolderLock:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"the run folder {self.path} cannot be created: {error}") from error
        return FolderLock(self.path)

    def open(self, config: TrainConfig, data: ImageData, processes: dict[str, Any], say: Callable[[str], None]) -> None:
        """Make the folder, or check that the run in it is this run."""
        if (self.path / CONFIG).exists():
            if saved_steps(self.checkpoints):  # a run that failed before its first checkpoint may be corrected
                self._require_same(config, data, say)
        elif any(entry for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise RunFolderError(f"{self.path} is not empty and holds no run; choose another folder with --out")
        about = {
            **asdict(shape_of(data)),
            "name": data.name,
            "images": len(data),
            "fingerprint": data.fingerprint(),
            "vocabulary": vocabulary_of(data),
        }
        # The configuration first: a kill between two of these files leaves a folder that is known as a run.
        write_text(self.path / CONFIG, dump_config(config))
        write_text(self.path / DATA, json.dumps(about, indent=2))
        write_text(self.path / "environment.json", json.dumps(environment() | processes, indent=2))
        write_text(self.path / "README.md", README.format(command=shlex.join(["scalelong", *sys.argv[1:]])))

    def _require_same(self, config: TrainConfig, data: ImageData, say: Callable[[str], None]) -> None:
        before = load_config(self.path / CONFIG)
        conflicts = conflicting_changes(before, config)
        if conflicts:
            changes = "\n".join(f"  {name}: {old!r} -> {new!r}" for name, (old, new) in conflicts.items())
            raise RunFolderError(
                f"{self.path} holds a run with a different configuration:\n{changes}\n"
                f"Give the same values to continue it, or another folder with --out"
            )
        path = self.path / DATA
        fingerprint = json.loads(path.read_text())["fingerprint"] if path.exists() else data.fingerprint()
        if fingerprint != data.fingerprint():
            raise RunFolderError(
                f"the data {config.data!r} have changed since {self.path} was begun (fingerprint {fingerprint[:12]} "
                f"before, {data.fingerprint()[:12]} now); restore them, or choose another folder with --out"
            )
        for name, (old, new) in differences(before, config).items():
            say(f"changed: {name}: {old!r} -> {new!r}")

    def shape(self) -> DataShape:
        about = json.loads((self.path / DATA).read_text())
        classes = about["classes"]
        return DataShape(about["channels"], about["height"], about["width"], tuple(classes) if classes else None)

    def vocabulary(self) -> list[str] | None:
        """The words of the captions; None if there are none, or too many to list."""
        return json.loads((self.path / DATA).read_text()).get("vocabulary")

    def append_metrics(self, values: dict[str, Any]) -> None:
        append_json_line(self.metrics, values)

    def cut_metrics(self, step: int) -> None:
        """Forget what was recorded after a step: it will be recorded again."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        if self.metrics.exists():
            write_json_lines(self.metrics, kept)

    def rollbacks(self) -> list[dict[str, Any]]:
        path = self.path / ROLLBACKS
        return json.loads(path.read_text()) if path.exists() else []

    def rate_factor(self) -> float:
        """By how much rollbacks have lowered the rate."""
        return math.prod(entry["factor"] for entry in self.rollbacks())

    def record_rollback(self, entry: dict[str, Any]) -> None:
        write_text(self.path / ROLLBACKS, json.dumps([*self.rollbacks(), entry], indent=2))


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics. A line that a kill cut off is left out."""
    file = Path(path) / METRICS
    return read_json_lines(file) if file.exists() else []


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
