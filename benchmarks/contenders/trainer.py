"""Our side: steps of our trainer, on random images that are in memory."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.console import TrainingProgress
from scalelong.data import ImageData, MemoryData
from scalelong.runs.config import (
    DiffusionConfig,
    HardwareConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainConfig,
)
from scalelong.runs.folder import RunFolder
from scalelong.runs.model import DataShape, RunData, build_model, uses_channels_last
from scalelong.runs.processes import make_accelerator
from scalelong.training.loop import Trainer

from ..flops import count_flops
from ..profile import profile_by_group

IMAGES = 512
"""Random images in memory, as CIFAR-10 would be."""
ENDLESS = 1_000_000


class TrainingStep:
    """All that `scalelong train` does in a step between two lines of its log."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __call__(self) -> None:
        self.trainer.optimise(False)
        self.trainer.guard.bad_step()

    def flops(self) -> float:
        # torch counts in its own thread alone, so that one core takes the whole batch here.
        cores, self.trainer.cores = self.trainer.cores, None
        try:
            return count_flops(self)
        finally:
            self.trainer.cores = cores

    def profile(self) -> dict[str, float]:
        return profile_by_group(self.trainer, self)

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.trainer.state.bare.parameters())


def training_step(**arguments: Any) -> TrainingStep:
    trainer = make_trainer(configuration(**arguments), arguments["shape"])
    trainer.begin_at(0)
    return TrainingStep(trainer)


def configuration(
    *,
    model: str,
    options: dict[str, Any],
    shape: list[int],
    batch: int,
    scaling: str = "none",
    compiled: bool = False,
    schedule: Any = "vp",
    clip: float | None = None,
    workers: int = 0,
) -> TrainConfig:
    """The authors' settings for CIFAR-10, without trackers."""
    return TrainConfig(
        data="random images",
        model=model,
        model_options=options,
        scaling=scaling,
        steps=ENDLESS,
        batch_size=batch,
        images=ImagesConfig(size=shape[-1], channels=shape[0], flip=True, workers=workers),
        diffusion=DiffusionConfig(schedule=schedule),
        optimizer=OptimizerConfig(lr=2e-4, weight_decay=0.03, betas=(0.99, 0.999), warmup=2500, clip=clip),
        hardware=HardwareConfig(compile=compiled, cpu=True),
        logging=LoggingConfig(trackers=()),
    )


def make_trainer(config: TrainConfig, shape: list[int]) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, *shape), dtype=torch.uint8, generator=generator)
    return trainer_on(config, MemoryData("random images", images))


def trainer_on(config: TrainConfig, data: ImageData) -> Trainer:
    folder = tempfile.mkdtemp(prefix="scalelong-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    accelerator = make_accelerator(config, folder)
    return Trainer(
        config, RunFolder(folder), accelerator, RunData(config, data, data), TrainingProgress(config.steps, False)
    )


def inference_parts(*, folded: bool = False, **arguments: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network and its inputs; `folded` has its constants multiplied into the weights."""
    shape, config = arguments["shape"], configuration(**arguments)
    model = build_model(config, DataShape(*shape)).eval()
    if folded:
        from scalelong.skips import fold_

        fold_(model)
    x, t = torch.randn(config.batch_size, *shape), torch.full((config.batch_size,), 500.0)
    if uses_channels_last(config, model):
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        x = x.contiguous(memory_format=torch.channels_last)
    return model, (x, t)


def inference_step(**arguments: Any) -> Callable[[], object]:
    """A forward pass without gradients."""
    model, inputs = inference_parts(**arguments)

    def step() -> None:
        with torch.inference_mode():
            model(*inputs)

    return step


def matmul(size: int) -> Callable[[], object]:
    """A product of square matrices: what the machine can do at best."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return lambda: torch.mm(a, b, out=out)
