"""A run that takes a second."""

from dataclasses import replace

import pytest

from scalelong.config import (
    CheckpointConfig,
    DiffusionConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainConfig,
)
from scalelong.runs import read_checkpoint
from scalelong.training import train

TINY = TrainConfig(
    data="digits",
    model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
    steps=12,
    batch_size=8,
    hardware=HardwareConfig(precision="fp32"),
    optimizer=OptimizerConfig(lr=1e-2, warmup=3, clip=1.0, ema_rate=0.9),
    checkpoints=CheckpointConfig(save_every=4),
    logging=LoggingConfig(log_every=2, trackers=(), samples_every=0),
)


@pytest.fixture(scope="session")
def tiny() -> TrainConfig:
    return TINY


@pytest.fixture(scope="session")
def full_tiny() -> TrainConfig:
    """With everything on: labels, flips, held-out loss, samples."""
    return replace(
        TINY,
        images=ImagesConfig(flip=True, held_out=50),
        diffusion=DiffusionConfig(condition="class", condition_dropout=0.2),
        logging=replace(TINY.logging, samples_every=6, samples=4, sampler_steps=2, held_out_every=5),
    )


@pytest.fixture(scope="session")
def final_state():
    """Everything in the latest checkpoint of a run."""

    def read(folder):
        return read_checkpoint((folder / "checkpoints" / "latest").resolve())

    return read


class CrashError(Exception):
    """Stands for whatever ends a run without warning."""


@pytest.fixture(scope="session")
def crash_at():
    """Train, and crash after a step."""

    def run(config, folder, step):
        def hook(state):
            if state.step == step:
                raise CrashError

        with pytest.raises(CrashError):
            train(config, folder, hooks=[hook])

    return run
