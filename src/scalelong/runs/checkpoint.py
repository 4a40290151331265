"""Checkpoints on disk: one folder per step, complete or not there, checked by its manifest.

checkpoints/step-00001000/model.safetensors   the weights
                          ema.safetensors     their moving average: use these for sampling
                          training.pt         optimiser, random generators, counters
                          manifest.json       sizes and checksums, written last
checkpoints/latest -> step-00001000
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..errors import CheckpointError
from ..files import file_digest, sync, write_text
from .config import CheckpointConfig

MODEL, EMA, TRAINING, MANIFEST = "model.safetensors", "ema.safetensors", "training.pt", "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to go on, on the CPU."""

    step: int
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    training: dict[str, Any]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps with a folder, oldest first. Whether they are whole is for `verify` to say."""
    found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in folder.glob("step-*")]
    return sorted(int(match[1]) for match in found if match)


def write_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write under a temporary name, rename when all of it is on the disk. The previous checkpoint is not touched."""
    target = step_folder(folder, snapshot.step)
    temporary = folder / f".{target.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        _write_files(temporary, snapshot)
        sync(temporary)
        _remove(target)  # only after a rollback: the run comes to this step for the second time
        os.rename(temporary, target)
        sync(folder)
        _point_latest(folder, target)
    # torch and safetensors report a full disk as errors of their own.
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_failure(folder, target, error)) from error
    return target


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    from safetensors.torch import save_file

    def about(weights: str) -> dict[str, str]:
        # One entry only: safetensors writes several in random order, and equal weights should be equal files.
        return {"scalelong": json.dumps({"version": __version__, "step": snapshot.step, "weights": weights})}

    save_file(snapshot.model, folder / MODEL, metadata=about("raw, not averaged"))
    save_file(snapshot.ema, folder / EMA, metadata=about("exponential moving average (EMA)"))
    torch.save(snapshot.training, folder / TRAINING)
    files = {}
    for name in (MODEL, EMA, TRAINING):
        shutil.copymode(folder / TRAINING, folder / name)  # safetensors lets nobody else read its files
        sync(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
    manifest = {"format": FORMAT, "step": snapshot.step, "scalelong": __version__, "files": files}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2))


def _failure(folder: Path, target: Path, error: Exception) -> str:
    steps = saved_steps(folder)
    kept = f"{step_folder(folder, steps[-1]).name} is intact" if steps else "there is no earlier checkpoint"
    free = shutil.disk_usage(folder).free / 1e6 if folder.exists() else 0
    return (
        f"{target} could not be written: {error}. {free:.0f} MB are free there; {kept}. "
        f"Make room, then run the same command to continue"
    )


def verify(path: Path) -> None:
    """Raise CheckpointError unless every file is there and is what was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {manifest['format']}, this scalelong reads {FORMAT}")
        for name in (MODEL, EMA, TRAINING):
            size, expected = (path / name).stat().st_size, files[name]["bytes"]
            if size != expected:
                raise CheckpointError(f"{path / name} has {size} bytes instead of {expected}")
            if file_digest(path / name) != files[name]["sha256"]:
                raise CheckpointError(f"{path / name} does not match the checksum of its manifest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}") from error


def read_checkpoint(path: Path) -> Snapshot:
    from safetensors.torch import load_file

    verify(path)
    try:
        training = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
        return Snapshot(training["step"], load_file(path / MODEL), load_file(path / EMA), training)
    except (pickle.UnpicklingError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def newest_good(folder: Path, log: Callable[[str], None], before: int | None = None) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named in the log and passed over."""
    for step in reversed(saved_steps(folder)):
        if before is not None and step >= before:
            continue
        path = step_folder(folder, step)
        try:
            verify(path)
            return path
        except CheckpointError as error:
            log(f"damaged checkpoint, falling back to the previous one: {error}")
    return None


def abandon_after(folder: Path, step: int) -> None:
    """Rename checkpoints beyond a step, which are damaged or given up, and remove what interrupted writes left."""
    for path in list(_leftovers(folder)):
        shutil.rmtree(path, ignore_errors=True)
    for later in saved_steps(folder):
        if later > step:
            path = step_folder(folder, later)
            aside = path.with_name(f"abandoned-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
    if step_folder(folder, step).exists():
        _point_latest(folder, step_folder(folder, step))


def prune(folder: Path, config: CheckpointConfig) -> None:
    """Keep the last K, and those at multiples of keep_every."""
    for step in saved_steps(folder)[: -config.keep_last]:
        if not (config.keep_every and step % config.keep_every == 0):
            _remove(step_folder(folder, step))


def _leftovers(folder: Path) -> Iterator[Path]:
    yield from folder.glob(".*.part")
    yield from folder.glob(".*.old")


def _remove(path: Path) -> None:
    """Delete a folder so that a kill in the middle leaves no half of it under its name."""
    if path.exists():
        old = path.with_name(f".{path.name.lstrip('.')}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        shutil.rmtree(old)


def _point_latest(folder: Path, target: Path) -> None:
    link = folder / ".latest.part"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, folder / "latest")
