"""A small class-conditional run, trained for a moment, that the tests of sampling share."""

from pathlib import Path

import pytest

from scalelong.config import DiffusionConfig, ImagesConfig, LoggingConfig, OptimizerConfig, TrainConfig
from scalelong.training import train

TINY_UVIT = {"patch_size": 2, "dim": 32, "depth": 2, "heads": 2}


def tiny_config(**changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "data": "digits",
        "model": "uvit",
        "model_options": TINY_UVIT,
        "scaling": "cs",
        "steps": 12,
        "batch_size": 16,
        "images": ImagesConfig(size=8, channels=1),
        "diffusion": DiffusionConfig(condition="class"),
        "optimizer": OptimizerConfig(lr=1e-3, ema_rate=0.5),
        "logging": LoggingConfig(trackers=(), samples_every=0),
    }
    return TrainConfig(**{**values, **changes})  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="session")
def class_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    train(tiny_config(), folder)
    return folder
