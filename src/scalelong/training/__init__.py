"""Training: `train(recipe("digits-tiny"), "runs/x")`, and back from a run folder with `load_run`.

loop         `train`; the order of events and the step, to be read from top to bottom
optimizers   optimisers and schedules of the rate, by name or import path
fast_adamw   the step of the fused AdamW, for small networks
state        weights, optimiser and rate, moving average, numbers that are not finite, snapshot
cores        on a CPU, each core takes its own images through the whole network
inspection   held-out loss, sample grids and scores of the averaged model
monitoring   the stability monitor of a run, and a loss that collapses
tracking     metrics and where they go
sizing       image size, network, batch and steps for a budget of time, on this machine
plan         what a run will do, before it does it (`--dry-run`)

What a run is (configuration, recipes, folder, checkpoint) stands in `scalelong.config` and `scalelong.runs`.
"""

from ..config import (
    RECIPES,
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
    recipe,
)
from ..errors import CheckpointError, NonFiniteError, RunFolderError, RunLockedError
from ..runs import Run, adopt_weights, load_run, read_metrics
from .loop import Hook, Interrupt, Trainer, TrainResult, train
from .plan import describe_run
from .sizing import Plan, size_run
from .state import Ema, TrainState
