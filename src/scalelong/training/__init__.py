"""Training: `train(recipe("digits-tiny"), "runs/x")`, and back from a run folder with `load_run`.

loop         `train`; the order of events and the step, to be read from top to bottom
state        weights, moving average, numbers that are not finite, snapshot
optimizers   optimisers and the rate over time, by name or import path
recording    metrics and where they go; held-out loss, sample grids and scores of the averaged model
monitoring   the stability monitor of a run, and a loss that collapses
hardware     signals, torch's switches, the precision of a new run, a CPU's cores
sizing       a run for a budget of time on this machine
dry_run      what a run will do and need, here and on many accelerators

What a run is (configuration, recipes, folder, checkpoint) stands in `scalelong.config` and `scalelong.runs`.
"""

from ..config import (
    RECIPES as RECIPES,
    CheckpointConfig as CheckpointConfig,
    DiffusionConfig as DiffusionConfig,
    GuardConfig as GuardConfig,
    HardwareConfig as HardwareConfig,
    ImagesConfig as ImagesConfig,
    LoggingConfig as LoggingConfig,
    OptimizerConfig as OptimizerConfig,
    TextConfig as TextConfig,
    TrainConfig as TrainConfig,
    load_config as load_config,
    recipe as recipe,
)
from ..runs import (
    Run as Run,
    adopt_weights as adopt_weights,
    load_run as load_run,
    read_metrics as read_metrics,
)
from .dry_run import describe_needs as describe_needs, describe_run as describe_run
from .hardware import Interrupt as Interrupt
from .loop import Hook as Hook, Trainer as Trainer, TrainResult as TrainResult, train as train
from .optimizers import make_optimizer as make_optimizer
from .recording import TrainingProgress as TrainingProgress
from .sizing import (
    Plan as Plan,
    fit_held_out as fit_held_out,
    glance as glance,
    held_out as held_out,
    lengthen_run as lengthen_run,
    size_run as size_run,
    step_seconds as step_seconds,
    steps_needed as steps_needed,
)
from .state import Ema as Ema, TrainState as TrainState
