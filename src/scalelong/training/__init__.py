"""Training: `train(recipe("digits-tiny"), "runs/x")`, and back from a run folder with `load_run`."""

from ..errors import CheckpointError, NonFiniteError, RunFolderError, RunLockedError
from ..runs.config import (
    CheckpointConfig,
    DiffusionConfig,
    GuardConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TextConfig,
    TrainConfig,
    load_config,
)
from ..runs.folder import read_metrics
from ..runs.load import Run, load_run
from ..runs.recipes import RECIPES, recipe
from .loop import Hook, TrainResult, train
from .state import Ema, TrainState

__all__ = [
    "RECIPES",
    "CheckpointConfig",
    "CheckpointError",
    "DiffusionConfig",
    "Ema",
    "GuardConfig",
    "HardwareConfig",
    "Hook",
    "ImagesConfig",
    "LoggingConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "Run",
    "RunFolderError",
    "RunLockedError",
    "TextConfig",
    "TrainConfig",
    "TrainResult",
    "TrainState",
    "load_config",
    "load_run",
    "read_metrics",
    "recipe",
    "train",
]
