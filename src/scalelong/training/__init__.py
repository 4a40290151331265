"""Training: `train(recipe("digits-tiny"), "runs/x")`, and back from a run folder with `load_run`.

loop         `train`; the order of events and the step, to be read from top to bottom
optimizers   optimisers and schedules of the rate, by name or import path
state        weights, optimiser and rate, moving average, guard, snapshot
cores        on a CPU, each core takes its own images through the whole network
inspection   held-out loss, sample grids and scores of the averaged model
monitoring   the stability monitor of a run, and a loss that collapses
tracking     metrics and where they go
sizing       image size, network, batch and steps for a budget of time, on this machine
plan         what a run will do, before it does it (`--dry-run`)

What a run is (configuration, recipes, folder, checkpoint) stands in `scalelong.runs`; its names are importable from
here.
"""

from ..errors import CheckpointError, NonFiniteError, RunFolderError, RunLockedError
from ..runs import (
    RECIPES,
    CheckpointConfig,
    DiffusionConfig,
    GuardConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    Run,
    TextConfig,
    TrainConfig,
    adopt_weights,
    load_config,
    load_run,
    read_metrics,
    recipe,
)
from .loop import Hook, Interrupt, Trainer, TrainResult, train
from .plan import describe_run
from .sizing import Plan, size_run
from .state import Ema, TrainState
