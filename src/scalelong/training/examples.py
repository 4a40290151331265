"""What one step trains on: images, times, noise and conditions, as functions of seed, step and position."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Batch, to_float
from ..diffusion.conditions import Conditions
from ..diffusion.latents import sample_latents
from ..noise import NoiseProcess
from ..randomness import noise, uniform
from ..runs.config import TrainConfig
from ..runs.model import DataShape


class Examples(NamedTuple):
    x0: Tensor
    noise: Tensor
    t: Tensor
    condition: Tensor | None

    def part(self, part: slice) -> "Examples":
        return Examples(*(None if value is None else value[part] for value in self))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class ExampleMaker:
    config: TrainConfig
    process: NoiseProcess
    shape: DataShape
    conditions: Conditions
    device: torch.device

    def __call__(self, step: int, positions: range, batch: Batch) -> Examples:
        """The images at these positions of the step's global batch, ready for the network."""
        part = slice(positions.start, positions.stop)
        t = self.process.times(self._uniform("time", step)[part]).to(self.device, non_blocking=True)
        return Examples(
            self._x0(step, positions, batch),
            noise(self.config.seed, step, positions, self.shape.image, self.device),
            t,
            self._condition(step, part, batch),
        )

    def _x0(self, step: int, positions: range, batch: Batch) -> Tensor:
        images = batch.images.to(self.device, non_blocking=True)
        if images.is_floating_point():  # the moments of latents
            return sample_latents(
                images, noise(self.config.seed, step, positions, self.shape.image, self.device, "latents")
            )
        part = slice(positions.start, positions.stop)
        return to_float(images, self._uniform("flip", step)[part] < 0.5 if self.config.images.flip else None)

    def _condition(self, step: int, part: slice, batch: Batch) -> Tensor | None:
        values = self.conditions.of(batch)
        hidden = self._uniform("condition", step)[part] < self.config.diffusion.condition_dropout
        hidden_values = self.conditions.hide(values, hidden)
        return None if hidden_values is None else hidden_values.to(self.device, non_blocking=True)

    def _uniform(self, purpose: str, step: int) -> Tensor:
        return uniform(self.config.seed, purpose, step, self.config.batch_size)
