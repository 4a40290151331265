"""What one step trains on: images, times, noise and labels, as functions of seed, step and position."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Batch, to_float
from ..diffusion import NoiseProcess
from .config import TrainConfig
from .model_factory import DataShape
from .randomness import noise, uniform


class Examples(NamedTuple):
    x0: Tensor
    noise: Tensor
    t: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class ExampleMaker:
    config: TrainConfig
    process: NoiseProcess
    shape: DataShape
    device: torch.device

    def __call__(self, step: int, positions: range, batch: Batch) -> Examples:
        """The images at these positions of the step's global batch, ready for the network."""
        part = slice(positions.start, positions.stop)
        flip = self._uniform("flip", step)[part] < 0.5 if self.config.images.flip else None
        x0 = to_float(batch.images.to(self.device, non_blocking=True), flip)
        t = self.process.times(self._uniform("time", step)[part]).to(self.device, non_blocking=True)
        return Examples(
            x0,
            noise(self.config.seed, step, positions, self.shape.image, self.device),
            t,
            self._labels(step, part, batch),
        )

    def _labels(self, step: int, part: slice, batch: Batch) -> Tensor | None:
        if self.config.diffusion.condition == "none" or batch.labels is None or self.shape.classes is None:
            return None
        hidden = self._uniform("condition", step)[part] < self.config.diffusion.condition_dropout
        null = len(self.shape.classes)
        return torch.where(hidden, null, batch.labels).to(self.device, non_blocking=True)

    def _uniform(self, purpose: str, step: int) -> Tensor:
        return uniform(self.config.seed, purpose, step, self.config.batch_size)
