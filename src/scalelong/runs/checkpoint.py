"""Checkpoints on disk: one folder per step, complete or not there, checked by its manifest.

checkpoints/step-00001000/model.safetensors   the weights
                          ema.safetensors     their moving average: use these for sampling
                          averages.safetensors   averages of other lengths, if the run keeps some (--ema-lengths)
                          training.pt         optimiser, random generators, counters
                          manifest.json       sizes, checksums and the run they belong to, written last
checkpoints/latest -> step-00001000           a text file with that name where there are no symbolic links
checkpoints/best -> step-00000800             the one with the best measurement, with --keep-best
checkpoints/abandoned-step-00000900           set aside: damaged, or given up by a rollback. Never deleted here
"""

import json
import logging
import os
import pickle
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..config import CheckpointConfig
from ..errors import CannotReadError, CheckpointError
from ..files import NOT_THE_FILE, below, file_digest, in_words, read_json, refusal, remove_leftovers, sync, write_text
from ..stability import last_good

logger = logging.getLogger(__name__)

MODEL, EMA, TRAINING, MANIFEST = "model.safetensors", "ema.safetensors", "training.pt", "manifest.json"
AVERAGES = "averages.safetensors"
FORMAT = 1
BEST, ASIDE = "best", "abandoned-"


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to go on, on the CPU."""

    step: int
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    training: dict[str, Any]
    run: str | None = None
    """The id of the run that it belongs to."""
    metrics: int | None = None
    """The length of metrics.jsonl when it was written."""
    averages: dict[str, Tensor] = field(default_factory=dict)
    """Averages of other lengths, as "5%/name"."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint's folder says."""
    return int(path.name.removeprefix("step-"))


def saved_steps(folder: Path) -> list[int]:
    """The steps with a folder, oldest first. Whether they are whole is for `verify` to say."""
    found = [re.fullmatch(r"step-(\d{8,})", name) for name in below(folder.parent).names(folder.name)]
    return sorted(int(match[1]) for match in found if match)


# Writing


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
        _point(folder, "latest", target)
    # torch and safetensors report a full disk as errors of their own.
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        steps = saved_steps(folder)
        kept = f"{step_folder(folder, steps[-1]).name} is intact" if steps else "there is no earlier checkpoint"
        free = shutil.disk_usage(folder).free / 1e6 if folder.exists() else 0
        raise CheckpointError(
            f"{target} could not be written: {in_words(error)}. {free:.0f} MB are free there; {kept}. "
            f"Make room, then run the same command to continue"
        ) from error
    return target


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    from safetensors.torch import save_file

    tensors = {
        MODEL: (snapshot.model, "raw, not averaged"),
        EMA: (snapshot.ema, "exponential moving average (EMA)"),
        **({AVERAGES: (snapshot.averages, "averages of other lengths")} if snapshot.averages else {}),
    }
    for name, (weights, kind) in tensors.items():
        # One entry only: safetensors writes several in random order, and equal weights should be equal files.
        about = json.dumps({"version": __version__, "step": snapshot.step, "weights": kind})
        save_file(weights, folder / name, metadata={"scalelong": about})
    torch.save(snapshot.training, folder / TRAINING)
    files = {}
    for name in (*tensors, TRAINING):
        # safetensors makes its files readable to their owner alone. Not every file system knows who may read.
        with suppress(PermissionError):
            shutil.copymode(folder / TRAINING, folder / name)
        sync(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
    manifest = {"format": FORMAT, "step": snapshot.step, "run": snapshot.run, "scalelong": __version__, "files": files}
    if snapshot.metrics is not None:
        manifest["metrics"] = snapshot.metrics
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2))


# Reading: only what is whole, and of this run


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest. CheckpointError unless every file is there and is what was written."""
    try:
        manifest = read_json(path / MANIFEST)
        files, made = manifest["files"], manifest["format"]
        if made != FORMAT:
            raise CheckpointError(
                f"{path} has format {made}, written by scalelong {manifest.get('scalelong', '?')}; this scalelong "
                f"{__version__} reads {FORMAT}. Use that version"
            )
        for name in (MODEL, EMA, TRAINING, *([AVERAGES] if AVERAGES in files else [])):
            size, expected = (path / name).stat().st_size, files[name]["bytes"]
            if size != expected or file_digest(path / name) != files[name]["sha256"]:
                found = f"{size} bytes instead of {expected}, or another checksum"
                raise CheckpointError(f"{path / name} does not match its manifest ({found}); restore it from a copy")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # What the machine lacks is no damage: to fall back to an older one would lose steps.
        if isinstance(error, OSError) and error.errno in NOT_THE_FILE:
            raise refusal(error, path, CannotReadError) or error from error
        raise CheckpointError(f"{path} is incomplete ({in_words(error)}); restore it from a copy") from error
    return manifest


def read_checkpoint(path: Path) -> Snapshot:
    length = verify_checkpoint(path).get("metrics")
    try:
        training = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
        if not isinstance(training["step"], int):
            raise TypeError
    except pickle.UnpicklingError as error:  # torch's text ends with how to run the code in it
        raise CheckpointError(
            f"{path / TRAINING} cannot be read: it holds more than numbers, which may be code; restore it from a copy"
        ) from error
    except (KeyError, TypeError, ValueError, OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read ({in_words(error)}); restore it from a copy") from error
    return Snapshot(
        training["step"],
        read_tensors(path / MODEL),
        read_tensors(path / EMA),
        training,
        averages=read_tensors(path / AVERAGES) if (path / AVERAGES).exists() else {},
        metrics=length if isinstance(length, int) else None,
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({in_words(error)}); restore it from a copy") from error


def newest_good(
    folder: Path, before: int | None = None, run: str | None = None, *, needed: bool = False
) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named in the log and passed over. None if there is none.

    One that belongs to another run than `run` is refused. `needed`: CheckpointError if there are some, or were, and
    none of them can be used.
    """
    damage: list[str] = []
    for step in reversed([step for step in saved_steps(folder) if before is None or step < before]):
        path = step_folder(folder, step)
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            if not os.path.lexists(path):  # the run is training, and has pruned it in this moment: newer ones came
                return newest_good(folder, before, run, needed=needed)
            damage.append(str(error))
            continue
        require_own(path, manifest, run)
        for reason in damage:
            logger.warning(f"damaged checkpoint, falling back to the previous one: {reason}")
        return path
    aside = [name for name in below(folder.parent).names(folder.name) if name.startswith(ASIDE)]
    if not needed or not (damage or aside):
        return None
    found = "; ".join(damage) or f"there are only those that were set aside: {', '.join(aside)}"
    raise CheckpointError(
        f"{folder} holds no checkpoint that can be used: {found}. Nothing was changed. To go on, restore one from a "
        f"copy; to begin again, choose another folder (`out`)"
    )


def require_own(path: Path, manifest: dict[str, Any], run: str | None) -> None:
    """Networks of equal shapes take each other's weights without a word, so a checkpoint says whose it is."""
    owner = manifest.get("run")
    if run is not None and owner != run:
        raise CheckpointError(
            f"{path} belongs to another run ({owner or 'one without an id'}; this one is {run}). Move it away to go on "
            f"with this run's own checkpoints"
        )


# What is given up is set aside, and what is no longer wanted is removed


def abandon_after(folder: Path, step: int) -> None:
    """Rename checkpoints beyond a step, which are damaged or given up, and remove what interrupted writes left."""
    remove_unfinished(folder)
    for later in saved_steps(folder):
        if later > step:
            _set_aside(step_folder(folder, later))
    if step_folder(folder, step).exists():
        _point(folder, "latest", step_folder(folder, step))


def remove_unfinished(folder: Path) -> None:
    """Remove what kills left of checkpoints that were being written or removed: only names that are written here."""
    for name in below(folder.parent).names(folder.name):
        if re.fullmatch(r"\.step-\d+\.(part|old)|\.(latest|best)\.part", name):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    remove_leftovers(folder)


def _set_aside(path: Path) -> None:
    """Rename a checkpoint. One that was set aside before stays, also if the same step is damaged again."""
    aside, count = path.with_name(f"{ASIDE}{path.name}"), 1
    while os.path.lexists(aside):
        count += 1
        aside = path.with_name(f"{ASIDE}{path.name}-{count}")
    os.rename(path, aside)


def prune(folder: Path, config: CheckpointConfig, trouble: int | None = None, best: int | None = None) -> None:
    """Keep the last K, those at multiples of keep_every, the best one, and the last one from before a trouble that
    began there."""
    steps = saved_steps(folder)
    kept = {best, None if trouble is None else last_good(steps, trouble)}
    for step in steps[: -config.keep_last]:
        if step not in kept and not (config.keep_every and step % config.keep_every == 0):
            _remove(step_folder(folder, step))


def _remove(path: Path) -> None:
    """Delete a folder so that a kill in the middle leaves no half of it under its name."""
    if path.exists():
        old = path.with_name(f".{path.name.lstrip('.')}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        shutil.rmtree(old)


# The names `latest` and `best`


def point_best(folder: Path, step: int | None) -> None:
    """Let `best` be the checkpoint of a step; without one, or where that is gone, there is no `best`."""
    if step is not None and step_folder(folder, step).exists():
        _point(folder, BEST, step_folder(folder, step))
    elif (folder / BEST).is_dir() and not (folder / BEST).is_symlink():  # a copy of the run with links followed
        _set_aside(folder / BEST)
    else:
        (folder / BEST).unlink(missing_ok=True)


def best_step(folder: Path) -> int | None:
    """The step of `best`, a link or a text file; None if there is none."""
    path = folder / BEST
    try:
        if path.is_dir() and not path.is_symlink():  # a copy of the run with links followed
            return int(verify_checkpoint(path)["step"])
        name = os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8").strip()
    except (OSError, CheckpointError):
        return None
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


def _point(folder: Path, name: str, target: Path) -> None:
    pointer, link = folder / name, folder / f".{name}.part"
    if pointer.is_dir() and not pointer.is_symlink():  # a copy of the run with links followed
        _set_aside(pointer)
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(target.name)
    except (OSError, NotImplementedError):  # a file system without symbolic links; a full disk says so again below
        write_text(pointer, f"{target.name}\n")
    else:
        os.replace(link, pointer)
