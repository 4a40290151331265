"""A trained run, back from its folder: `load_run("runs/x").sample(16)`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attaching import without_records
from ..config import AverageLength, TrainConfig, load_config
from ..diffusion import Autoencoder, Conditions, ImageMaker, SampleSettings, as_picture, image_grid, requests
from ..errors import CheckpointError, InvalidConfigError, RunFolderError
from ..files import digest, in_words
from ..models import Denoiser
from ..noise import NoiseProcess
from ..scaling import FixedScaling, as_scaling
from .adapters import merge_adapters_
from .averages import by_length, reconstruct
from .checkpoint import (
    AVERAGES,
    EMA,
    MODEL,
    PATIENCE,
    best_step,
    require_own,
    saved_steps,
    step_folder,
    usable_checkpoint,
    verify,
)
from .folder import CONFIG, RunFolder, require_no_links
from .model import DataShape, Log, build_model, make_conditions, require_trust

logger = logging.getLogger(__name__)

ROUGH = 0.06
"""Largest error of a profile (see `averages.Combination`) that is not worth a remark."""


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
    """Of the file that the weights come from. The file may be gone: a run that trains prunes its checkpoints."""
    is_rescaled: bool = False
    """Whether the long skips are scaled in another way than they were trained with, as `scalelong lab tune` finds."""

    @property
    def process(self) -> NoiseProcess:
        return NoiseProcess(self.config.diffusion.schedule)

    @property
    def network(self) -> Denoiser:
        """`network(x, t, condition)` gives a tensor, whatever class the model is of."""
        return Denoiser(self.model)

    @property
    def default_prompts(self) -> Sequence[str]:
        """What to draw without a prompt: the classes in turn."""
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
        """What turns samples into images, for a run on latents."""
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
    log: Log = logger.warning,
) -> Run:
    """The averaged (or raw) weights of the newest whole checkpoint, of the one of a step, or of the best one.

    `weights` is "ema", "raw", or "ema:10%": the average of another length (`scalelong.runs.averages`).

    A run folder may name a model of someone's own, "package.module:factory". That code is run with `trust` only.
    `scaling` replaces the constants that the run was trained with ("custom:1,0.9,0.8", see `scalelong lab tune`).
    `model` is the network to put the weights into, for a run that was given one (`train(config, model=...)`).
    `log` gets a line for each damaged checkpoint that is passed over.
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
    file = EMA if weights == "ema" else MODEL
    if step == "best":
        step = best_step(run.checkpoints)
        if step is None:
            raise CheckpointError(f"{run.path} has no checkpoints/best; train with --keep-best held-out or frechet")
    state, manifest = _read_weights(run, step, AVERAGES if length else file, log)
    sha256 = manifest["files"].get(AVERAGES if length else file, {}).get("sha256", "")
    if length is not None:
        weights = f"ema:{length}"
        state, sha256 = _other_average(run, int(manifest["step"]), length, by_length(state), log)
    model = build_model(config, run.shape(), model=model)
    try:
        with without_records():  # the configuration says how it is scaled
            model.load_state_dict(state)
    except RuntimeError as error:
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"the weights of step {manifest['step']} in {run.checkpoints} do not fit the model that "
            f"{run.path / CONFIG} and data.json describe; were they edited? Restore them from a copy ({said})"
        ) from error
    if config.lora:
        merge_adapters_(model)
    # What the checkpoint says, not the name of its folder.
    step = int(manifest["step"])
    return Run(run.path, config, run.shape(), model.eval(), step, weights, sha256, scaling is not None)


def _length(weights: str) -> AverageLength | None:
    """The length that "ema:10%" asks for; None for "ema" and "raw"."""
    if weights in ("ema", "raw"):
        return None
    kind, colon, length = weights.partition(":")
    if kind != "ema" or not colon:
        raise InvalidConfigError(f"--weights must be ema, raw, or ema:LENGTH such as ema:10%, got {weights!r}")
    return AverageLength.parse(length, "--weights ema:LENGTH")


def _other_average(
    run: RunFolder, step: int, length: AverageLength, kept: dict[str, dict[str, Tensor]], log: Log
) -> tuple[dict[str, Tensor], str]:
    """All weights of a checkpoint with the average of another length, and their checksum."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    found = reconstruct(run.averages, step, length, kept, run.id)
    if found.error > ROUGH:
        log(
            f"the average of {length} at step {step} is rough: its profile is off by {found.error:.0%}, with "
            f"{found.snapshots} snapshots in {run.averages}; from 4% to 20% it is exact to about 1e-3 of the weights"
        )
    # Buffers are not averaged, and come with the average that the run always keeps.
    file = step_folder(run.checkpoints, step) / EMA
    try:
        state = {**load_file(file), **found.weights}
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({in_words(error)}); restore it from a copy") from error
    return state, digest(save(state))


def require_constant(scaling: str) -> FixedScaling:
    """The scaling that a run was trained with, if its coefficients are numbers, so that others can stand for them."""
    config = as_scaling(scaling)
    if not isinstance(config, FixedScaling):
        raise InvalidConfigError(
            f"the run was trained with the scaling {scaling!r}, whose coefficients are learned or depend on the data: "
            f"only constant ones (none, cs, uniform, custom) can be replaced after training"
        )
    return config


def _read_weights(run: RunFolder, step: int | None, file: str, log: Log) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and the manifest of a checkpoint. If a training run prunes it under us, of the next one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for _ in range(PATIENCE):
        if step is None:
            checkpoint = usable_checkpoint(run.checkpoints, log, run.id)
            if checkpoint is None:
                raise CheckpointError(f"{run.path} has no checkpoint yet; train it first: scalelong train")
        else:
            checkpoint = step_folder(run.checkpoints, step)
            if not checkpoint.exists():
                there = ", ".join(map(str, saved_steps(run.checkpoints))) or "none"
                raise CheckpointError(f"{run.path} has no checkpoint of step {step} (--checkpoint); there are: {there}")
        try:
            manifest = verify(checkpoint)
            require_own(checkpoint, manifest, run.id)
            if file == AVERAGES and AVERAGES not in manifest["files"]:
                return {}, manifest
            return load_file(checkpoint / file), manifest
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's C++ opens it once more
            if checkpoint.exists():
                raise (
                    error
                    if isinstance(error, CheckpointError)
                    else CheckpointError(
                        f"{checkpoint / file} cannot be read ({in_words(error)}); restore it from a copy"
                    )
                ) from error
    raise CheckpointError(f"the checkpoints of {run.path} are pruned faster than they can be read; raise --keep-last")
