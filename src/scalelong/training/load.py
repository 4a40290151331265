"""A trained run, back from its folder."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

from torch import nn

from ..diffusion import NoiseProcess
from .checkpoint import EMA, MODEL, newest_good, step_folder, verify
from .config import TrainConfig
from .config_io import load_config
from .errors import CheckpointError, RunFolderError
from .model_factory import DataShape, Network, build_model
from .run_folder import CONFIG, RunFolder


@dataclass(frozen=True)
class Run:
    """A model in eval mode with the weights of a checkpoint, and what is needed to use it."""

    folder: Path
    config: TrainConfig
    shape: DataShape
    model: nn.Module
    step: int
    weights: Literal["ema", "raw"]

    @property
    def process(self) -> NoiseProcess:
        return NoiseProcess(self.config.diffusion.schedule)

    @property
    def network(self) -> Network:
        """`network(x, t, labels)` gives a tensor, whatever class the model is of."""
        return Network(self.model, self.model)


def load_run(path: str | PathLike[str], *, weights: Literal["ema", "raw"] = "ema", step: int | None = None) -> Run:
    """The averaged (or raw) weights of the newest whole checkpoint, or of the one of a step."""
    from safetensors.torch import load_file

    run = RunFolder(path)
    if not (run.path / CONFIG).exists():
        raise RunFolderError(f"{run.path} is not a run folder: it has no {CONFIG}")
    config = load_config(run.path / CONFIG)
    if step is None:
        checkpoint = newest_good(run.checkpoints, print)
        if checkpoint is None:
            raise CheckpointError(f"{run.path} has no checkpoint that is whole")
    else:
        checkpoint = step_folder(run.checkpoints, step)
        verify(checkpoint)
    model = build_model(config, run.shape())
    model.load_state_dict(load_file(checkpoint / (EMA if weights == "ema" else MODEL)))
    step = int(checkpoint.name.removeprefix("step-"))
    return Run(run.path, config, run.shape(), model.eval(), step, weights)
