"""The diagnosis of a recipe: its model as it starts, on its own data."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..data import to_float
from ..files import write_text
from ..runs.config import TrainConfig
from ..runs.folder import shape_of
from ..runs.load import Run
from ..runs.model import build_model, load_images
from ..stability.diagnosis import Diagnosis, diagnose
from .probing import noisy_probe

DIAGNOSIS = "diagnosis.json"
BATCH = 16
IMAGES = 512
"""Images that the choice of κ looks at."""


def diagnose_config(config: TrainConfig) -> Diagnosis:
    """Before training: the initial weights of this configuration, without scaling."""
    data, _ = load_images(config, lambda _: None)
    return _diagnose(build_model(replace(config, scaling="none"), shape_of(data)), config)


def diagnose_run(run: Run) -> Diagnosis:
    """During or after training: the weights of a run."""
    return _diagnose(run.model, run.config)


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> Path:
    """The report of this folder shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / DIAGNOSIS, diagnosis.to_json())
    return folder / DIAGNOSIS


def _diagnose(model: nn.Module, config: TrainConfig) -> Diagnosis:
    x, t, labels = noisy_probe(config, BATCH)
    data, _ = load_images(config, lambda _: None)
    images = to_float(data.fetch(torch.arange(min(IMAGES, len(data)))).images)
    batch = (x, t) if labels is None else (x, t, labels)
    return diagnose(model, batch, images=images, schedule=config.diffusion.schedule)
