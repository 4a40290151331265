"""A trained run, back from its folder or from the package.

    load_run("runs/x").sample(16)
    load_trained("digits-class").sample(16, prompts=["7"])     a small network that comes with the package

A network of the package is a folder in `trained/`: the configuration and the data of its run, its scores, a card, and
the averaged weights in half precision. `unpack` makes a run folder of it, in which every command works. `python -m
research.shipped NAME` trains it again by its config.yaml and packs it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attaching import without_records
from ..config import AverageLength, TrainConfig, load_config
from ..diffusion import Autoencoder, Conditions, ImageMaker, SampleSettings, as_picture, image_grid, requests
from ..errors import CheckpointError, FolderInUseError, InvalidConfigError, RunFolderError
from ..files import cache_folder, digest, new_folder, read_json, write_bytes
from ..models import Denoiser
from ..noise import NoiseProcess
from ..scaling import FixedScaling, as_scaling
from .averages import by_length, reconstruct
from .checkpoint import (
    AVERAGES,
    EMA,
    MODEL,
    Snapshot,
    best_step,
    newest_good,
    read_tensors,
    require_own,
    saved_steps,
    step_folder,
    verify_checkpoint,
    write_checkpoint,
)
from .folder import CONFIG, DATA, RUN, RunFolder, require_no_links
from .model import DataShape, build_model, make_conditions, require_trust

logger = logging.getLogger(__name__)

ROUGH = 0.06
"""Largest error of a profile (see `averages.combine`) that is not worth a remark."""
PATIENCE = 50
"""How often to look again when a checkpoint vanishes while it is read: the run is training, and newer ones come."""


@dataclass(frozen=True)
class Run:
    """A model in eval mode with the weights of a checkpoint, and what is needed to use it."""

    folder: Path
    config: TrainConfig
    shape: DataShape
    model: nn.Module
    step: int
    weights: str
    """"ema", "raw", or "ema:10%" for an average of another length."""
    weights_sha256: str = ""
    """Checksum of the file with the weights, which may be gone: a run that trains prunes its checkpoints."""
    is_rescaled: bool = False
    """True if the long skips are scaled in a different way than in training, as `scalelong lab tune` finds."""

    @property
    def process(self) -> NoiseProcess:
        return NoiseProcess(self.config.diffusion.schedule)

    @property
    def network(self) -> Denoiser:
        """`network(x, t, condition)` gives a tensor, whatever class the model is of."""
        return Denoiser(self.model)

    @property
    def default_prompts(self) -> Sequence[str]:
        """Prompts where none are given: the classes in turn."""
        return self.shape.classes or () if self.config.diffusion.condition == "class" else ()

    @property
    def maker(self) -> ImageMaker:
        return ImageMaker(
            model=self.model,
            network=self.network,
            process=self.process,
            prediction=self.config.diffusion.prediction,
            shape=self.shape.image,
            conditions=self.conditions,
            autoencoder=self.autoencoder,
        )

    @cached_property
    def conditions(self) -> Conditions:
        """From prompts to tensors: `run.conditions.from_prompts(["3"])` gives what the network takes."""
        return make_conditions(self.config, self.shape.classes, vocabulary=RunFolder(self.folder).vocabulary())

    @cached_property
    def autoencoder(self) -> Autoencoder | None:
        """From latents to images, for a run on latents."""
        folder = self.config.images.autoencoder
        return None if folder is None else Autoencoder(folder)

    def sample(
        self,
        n: int = 16,
        *,
        seed: int = 0,
        prompts: Sequence[str] = (),
        sampler: str = "dpm++",
        steps: int = 25,
        guidance: float = 1.0,
        precision: str = "no",
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Images, uint8 (n, C, H, W). Image i has the seed `seed + i` and does not depend on n or batch_size.

        `prompts` are classes or texts, which take turns; a class-conditional model without prompts shows all classes.
        `precision` ("bf16") is that of SampleSettings.
        """
        wanted = requests(n, seed, prompts or self.default_prompts)
        settings = SampleSettings(sampler=sampler, steps=steps, guidance=guidance, precision=precision)
        return self.maker.all(wanted, settings, batch_size=batch_size, device=device)

    def grid(self, n: int = 16, *, columns: int | None = None, **options: Any) -> Any:
        """Images side by side, as a picture of Pillow: notebooks show it. `options` are those of `sample`."""
        return as_picture(image_grid(self.sample(n, **options), columns))


def load_run(
    path: str | PathLike[str],
    *,
    weights: str = "ema",
    step: int | Literal["best"] | None = None,
    trust: bool = False,
    scaling: str | None = None,
    model: nn.Module | None = None,
) -> Run:
    """The averaged (or raw) weights of the newest whole checkpoint, of the one of a step, or of the best one.

    `weights` is "ema", "raw", or "ema:10%": the average of another length (`scalelong.runs.averages`).

    A run folder may name a model of someone's own, "package.module:factory". That code is run with `trust` only.
    `scaling` replaces the constants that the run was trained with ("custom:1,0.9,0.8", see `scalelong lab tune`).
    `model` is the network to put the weights into, for a run that was given one (`train(config, model=...)`).
    """
    run = RunFolder(path)
    if not (run.path / CONFIG).exists():
        raise RunFolderError(f"{run.path} is not a run folder: it has no {CONFIG}")
    require_no_links(run.path)
    config = load_config(run.path / CONFIG)
    require_trust(config, run.path / CONFIG, trust or model is not None)
    length = _length(weights)
    if scaling is not None:
        require_constant(config.scaling)
        config = replace(config, scaling=scaling)
    if step == "best":
        step = best_step(run.checkpoints)
        if step is None:
            raise CheckpointError(f"{run.path} has no checkpoints/best; train with keep_best held-out or frechet")
    file = AVERAGES if length else EMA if weights == "ema" else MODEL
    state, manifest = _read_weights(run, step, file)
    # What the checkpoint says, not the name of its folder.
    step, sha256 = int(manifest["step"]), manifest["files"].get(file, {}).get("sha256", "")
    if length is not None:
        weights = f"ema:{length}"
        average, error, snapshots = reconstruct(run.averages, step, length, by_length(state), run.id)
        if error > ROUGH:
            logger.warning(
                f"the average of {length} at step {step} is rough: its profile is off by {error:.0%}, with {snapshots} "
                f"snapshots in {run.averages}; from 4% to 20% it is exact to about 1e-3 of the weights"
            )
        # Buffers are not averaged, and come with the average that the run always keeps.
        state = {**read_tensors(step_folder(run.checkpoints, step) / EMA), **average}
        from safetensors.torch import save

        sha256 = digest(save(state))
    model = build_model(config, run.shape(), model=model)
    try:
        with without_records():  # the configuration says how it is scaled
            model.load_state_dict(state)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"the weights of step {step} in {run.checkpoints} do not fit the model that {run.path / CONFIG} and "
            f"data.json describe; were they edited? Restore them from a copy ({said})"
        ) from error
    return Run(run.path, config, run.shape(), model.eval(), step, weights, sha256, scaling is not None)


def _length(weights: str) -> AverageLength | None:
    """The length that "ema:10%" asks for; None for "ema" and "raw"."""
    if weights in ("ema", "raw"):
        return None
    kind, colon, length = weights.partition(":")
    if kind != "ema" or not colon:
        raise InvalidConfigError(f"`weights` must be ema, raw, or ema:LENGTH such as ema:10%, got {weights!r}")
    return AverageLength.parse(length, "`weights` ema:LENGTH")


def require_constant(scaling: str) -> FixedScaling:
    """The scaling that a run was trained with, if its coefficients are numbers, so that others can stand for them."""
    config = as_scaling(scaling)
    if not isinstance(config, FixedScaling):
        raise InvalidConfigError(
            f"the run was trained with the scaling {scaling!r}, whose coefficients are learned or depend on the data: "
            f"only constant ones (none, cs, uniform, custom) can be replaced after training"
        )
    return config


def _read_weights(run: RunFolder, step: int | None, file: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the manifest of a checkpoint. If a training run prunes it under us, of the next one."""
    for _ in range(PATIENCE):
        steps = saved_steps(run.checkpoints)
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"{run.path} has no checkpoint of step {step}; there are: {there}")
        checkpoint = step_folder(run.checkpoints, step) if step is not None else None
        checkpoint = checkpoint or newest_good(run.checkpoints, run=run.id, needed=True)
        if checkpoint is None:
            raise CheckpointError(f"{run.path} has no checkpoint yet; train it first: scalelong train")
        try:
            manifest = verify_checkpoint(checkpoint)
            require_own(checkpoint, manifest, run.id)
            absent = file == AVERAGES and AVERAGES not in manifest["files"]
            return {} if absent else read_tensors(checkpoint / file), manifest
        except CheckpointError:
            if checkpoint.exists():
                raise
    raise CheckpointError(f"the checkpoints of {run.path} are pruned faster than they can be read; raise keep_last")


# Networks of the package

WEIGHTS, CARD, SCORES = "weights.safetensors", "README.md", "scores.jsonl"
NETWORKS = {
    "digits-class": "7",
    "digits-text": "a handwritten seven",
    "fashion-class": "Sneaker",
    "fashion-text": "a photograph of a sneaker",
}
"""Their names, and a prompt for each."""


def load_trained(name: str | Path, **options: Any) -> Run:
    """A trained run, by the name of a network that comes with the package (`NETWORKS`) or by its folder.

    `options` are those of `load_run`. The network's folder is made in the cache at the first use.
    """
    if str(name) in NETWORKS:
        return load_run(unpack(str(name), cache_folder("models") / str(name)), **options)
    if not Path(name).is_dir():
        known = ", ".join(NETWORKS)
        raise InvalidConfigError(f"{str(name)!r} is neither a run folder nor a network of the package: {known}")
    return load_run(name, **options)


def packed_folder(name: str) -> Path:
    """Wheels are unpacked when they are installed, so that this is a folder."""
    if name not in NETWORKS:
        raise InvalidConfigError(f"no network {name!r} comes with the package: {', '.join(NETWORKS)}")
    return Path(str(files("scalelong.runs").joinpath("trained", name)))


def unpack(name: str, target: str | Path) -> Path:
    """Make a run folder of a network, unless it is there already. Another run in its place is refused."""
    packed, target = packed_folder(name), Path(target)
    known = read_json(packed / RUN)
    if (target / RUN).exists() and read_json(target / RUN).get("id") == known["id"]:
        return target
    loaded = read_tensors(packed / WEIGHTS)
    weights = {name: value.float() if value.dtype == torch.float16 else value for name, value in loaded.items()}
    step = int(known["step"])
    try:
        with new_folder(target) as folder:
            for file in (CONFIG, DATA, RUN, CARD, SCORES):
                if (packed / file).exists():
                    write_bytes(folder / file, (packed / file).read_bytes())
            # Raw weights and the optimiser's state are not in the package: to train on, begin with --from.
            about = {"step": step, "packed": True}
            write_checkpoint(folder / "checkpoints", Snapshot(step, weights, weights, about, known["id"]))
    except FolderInUseError as error:
        raise RunFolderError(
            f"{target} holds something else than the network {name!r} of this version: move it away"
        ) from error
    return target
