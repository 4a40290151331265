"""The control of the instrument: with a rate of zero nothing learns, so features on a fixed batch must stand still."""

from dataclasses import replace
from pathlib import Path

from ..runs.config import TrainConfig
from ..stability import alarms as oscillation
from .curves import mean, read_curves
from .pool import run_all
from .runs import PlannedRun


def control_text(config: TrainConfig, out: Path, every: int | None = None, jobs: int | None = None) -> str:
    """One run with lr = 0, long enough for two windows of readings; its scores in words."""
    steps = 102 * (every or 1)
    still = replace(
        config,
        steps=steps,
        optimizer=replace(config.optimizer, lr=0.0),
        logging=replace(config.logging, samples_every=0, held_out_every=steps),
    )
    run = PlannedRun("none", config.seed, out / "control-lr0", replace(still, scaling="none"))
    if not run_all([run], every or 1, jobs):
        return "the control was interrupted"
    curves = read_curves(run.folder)
    scores = [oscillation(curve.values) for name, curve in curves.items() if name.startswith("probe_block_rms/")]
    # The mean of a window differs from its equal readings in the last digits.
    features = round(mean([score.o1 for score in scores]), 9)
    gradient = oscillation(curves["gradient_norm/all"].values)
    return (
        f"control with a rate of zero: O1 of the features is {features:.2g} (must be 0); "
        f"O1 of the gradient norm is {gradient.o1:.2g}: what batches alone do"
    )
