"""Training: `train(recipe("digits-tiny"), "runs/x")`, and back from a run folder with `load_run`."""

from ..errors import CheckpointError, NonFiniteError, RunFolderError, RunLockedError
from .api import TrainResult, train
from .config import (
    CheckpointConfig,
    DiffusionConfig,
    GuardConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TextConfig,
    TrainConfig,
)
from .config_io import load_config
from .ema import Ema
from .load import Run, load_run
from .loop import Hook
from .recipes import RECIPES, recipe
from .run_folder import read_metrics
from .state import TrainState

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
