"""Small trained networks that come with the package, so that sampling, evaluation and export can be tried at once.

    run = load_trained("digits-class")                    a trained run, as `load_run` gives it
    scalelong sample --model digits-class "7"             its folder is runs/digits-class from then on

A network is a folder in `trained/`: the configuration and the data of its run, its scores, a card that says all of it
in words, and the averaged weights in half precision. `unpack` makes a run folder of it, in which every command works.
`NETWORKS` says how each was trained; `scalelong models make NAME` trains it again and packs it.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ..config import TextConfig, TrainConfig, recipe
from ..errors import CheckpointError, FolderInUseError, InvalidConfigError, RunFolderError
from ..files import cache_folder, new_folder, read_json, write_bytes, write_text
from .checkpoint import EMA, Snapshot, saved_steps, step_folder, write_checkpoint
from .folder import CONFIG, DATA, RUN
from .load import Run, load_run

WEIGHTS, CARD, SCORES = "weights.safetensors", "README.md", "scores.jsonl"


# How they were trained: seconds to minutes on one core


def _digits() -> TrainConfig:
    base = recipe("digits-class-tiny")
    return replace(
        base,
        model_options={**base.model_options, "dim": 64, "depth": 2},
        steps=3000,
        optimizer=replace(base.optimizer, lr=2e-3, decay="cosine", ema_rate=0.999),
        checkpoints=replace(base.checkpoints, save_every=2000),
        logging=replace(base.logging, trackers=()),
        hardware=replace(base.hardware, precision="fp32"),
    )


def _garments() -> TrainConfig:
    base = recipe("fashion-tiny")
    return replace(
        base,
        data="garments",
        # Patches of 4x4: grainier than of 2x2, and a quarter of the work.
        model_options={**base.model_options, "patch_size": 4, "dim": 80, "depth": 2},
        steps=2500,
        scaling="cs",
        images=replace(base.images, held_out=200, flip=False),
        diffusion=replace(base.diffusion, condition="class"),
        optimizer=replace(base.optimizer, lr=2e-3, decay="cosine", ema_rate=0.999),
        checkpoints=replace(base.checkpoints, save_every=2000),
        logging=replace(base.logging, trackers=()),
        hardware=replace(base.hardware, precision="fp32"),
    )


def _by_text(config: TrainConfig, length: int) -> TrainConfig:
    return replace(
        config,
        data=f"captioned-{config.data}",
        diffusion=replace(config.diffusion, condition="text"),
        text=TextConfig(text_encoder="words", text_length=length, text_dim=32),
    )


NETWORKS: dict[str, Callable[[], TrainConfig]] = {
    "digits-class": _digits,
    "digits-text": lambda: _by_text(_digits(), 5),
    "fashion-class": _garments,
    "fashion-text": lambda: _by_text(_garments(), 6),
}

EXAMPLES = {"digits-class": "7", "digits-text": "a handwritten seven"}
EXAMPLES |= {"fashion-class": "Sneaker", "fashion-text": "a photograph of a sneaker"}
"""A prompt for each."""


# From the package


def load_trained(name: str | Path, **options: Any) -> Run:
    """A trained run, by the name of a network that comes with the package (`NETWORKS`) or by its folder.

    `options` are those of `load_run`. The network's folder is made in the cache at the first use.
    """
    if str(name) not in NETWORKS:
        if not Path(name).is_dir():
            raise InvalidConfigError(
                f"{str(name)!r} is neither a run folder nor a network that comes with the package; those are: "
                f"{', '.join(NETWORKS)} (scalelong models)"
            )
        return load_run(name, **options)
    return load_run(unpack(str(name), cache_folder("models") / str(name)), **options)


def shipped_names() -> list[str]:
    """The networks that are in this installation."""
    return [name for name in NETWORKS if (packed_folder(name) / WEIGHTS).is_file()]


def packed_folder(name: str) -> Path:
    """Wheels are unpacked when they are installed, so that this is a folder."""
    return Path(str(files("scalelong.runs").joinpath("trained", name)))


def require_shipped(name: str) -> None:
    if name not in NETWORKS:
        raise InvalidConfigError(f"no network {name!r} comes with the package (--model): {', '.join(NETWORKS)}")
    if name not in shipped_names():
        raise InvalidConfigError(
            f"the network {name!r} is not in this installation: `scalelong models make {name}` trains it, in minutes"
        )


def unpack(name: str, target: str | Path) -> Path:
    """Make a run folder of a network, unless it is there already. Another run in its place is refused."""
    require_shipped(name)
    target = Path(target)
    packed = packed_folder(name)
    known = read_json(packed / RUN)
    if (target / RUN).exists() and read_json(target / RUN).get("id") == known["id"]:
        return target
    try:
        with new_folder(target) as folder:
            _fill(packed, folder, known["id"], int(known["step"]))
    except FolderInUseError as error:
        raise RunFolderError(
            f"{target} holds something else than the network {name!r} of this version: move it away, or work in "
            f"another folder"
        ) from error
    return target


def _fill(packed: Path, folder: Path, run: str, step: int) -> None:
    from safetensors.torch import load_file

    for name in (CONFIG, DATA, RUN, CARD, SCORES):
        if (packed / name).exists():
            write_bytes(folder / name, (packed / name).read_bytes())
    weights = {name: _widened(value) for name, value in load_file(packed / WEIGHTS).items()}
    # Raw weights and the optimiser's state stay behind: whoever wants to train on begins with --from.
    write_checkpoint(folder / "checkpoints", Snapshot(step, weights, weights, {"step": step, "packed": True}, run))


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype == torch.float16 else value


# Into the package


def pack(run_folder: str | Path, target: str | Path) -> Path:
    """A run as a network of the package: averaged weights in half precision, without what training alone needs."""
    from safetensors.torch import load_file, save_file

    source, target = Path(run_folder), Path(target)
    steps = saved_steps(source / "checkpoints")
    if not steps:
        raise CheckpointError(f"{source} has no checkpoint: train it first")
    weights = load_file(step_folder(source / "checkpoints", steps[-1]) / EMA)
    if target.exists():
        shutil.rmtree(target)
    with new_folder(target) as folder:
        for name in (CONFIG, DATA):
            write_bytes(folder / name, (source / name).read_bytes())
        write_text(folder / RUN, json.dumps({"id": read_json(source / RUN)["id"], "step": steps[-1]}))
        halved = {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}
        save_file({name: value.contiguous() for name, value in halved.items()}, folder / WEIGHTS)
        (folder / WEIGHTS).chmod(0o644)
    return target
