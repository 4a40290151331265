"""What one step trains on: images, times, noise and conditions, as functions of seed, step and position."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import Batch, ImageData, to_float
from ..noise import NoiseProcess, Prediction, epsilon_losses
from ..randomness import generator, noise, uniform
from ..runs.config import TrainConfig
from ..runs.model import DataShape, Network
from .conditions import Conditions
from .latents import sample_latents


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


# The loss on images that are not trained on, with the same noise and times at every look and for every method.

BATCH = 128


@torch.no_grad()
def held_out_loss(
    network: Network,
    process: NoiseProcess,
    prediction: Prediction,
    data: ImageData,
    seed: int,
    device: torch.device,
    conditions: Conditions,
) -> float:
    """The mean error in ε. The times are spread evenly, so that few images suffice."""
    count = len(data)
    # Every image gets its own time, in an order that has nothing to do with the order of the images.
    ranks = torch.randperm(count, generator=generator(seed, "held-out times"))
    times = process.times((ranks + 0.5) / count)
    noise_source = generator(seed, "held-out noise")
    found: list[Tensor] = []
    for start in range(0, count, BATCH):
        rows = torch.arange(start, min(start + BATCH, count))
        batch = data.fetch(rows)
        images = batch.images.to(device)
        x0 = sample_latents(images) if images.is_floating_point() else to_float(images)
        noise = torch.randn(x0.shape, generator=noise_source).to(device)
        condition = conditions.of(batch)
        predict = network.given(None if condition is None else condition.to(device))
        found.append(epsilon_losses(predict, process, prediction, x0, noise, times[rows].to(device)).cpu())
    return float(torch.cat(found).double().mean())


# Which images make up a step: a new permutation every epoch, computed from the step alone.


class DataOrder:
    """The global batch of step s holds positions s·B to (s+1)·B - 1 of an endless row of shuffled epochs."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=generator(self.seed, "order", epoch))

    def epoch(self, step: int) -> float:
        """How often the data have been seen before this step."""
        return step * self.batch_size / self.count

    def indices(self, step: int, positions: range) -> Tensor:
        """The images at some positions of the step's batch."""
        found: list[Tensor] = []
        position, stop = step * self.batch_size + positions.start, step * self.batch_size + positions.stop
        while position < stop:
            epoch, offset = divmod(position, self.count)
            length = min(stop - position, self.count - offset)
            found.append(self._epoch(epoch)[offset : offset + length])
            position += length
        return torch.cat(found)

    def batches(self, steps: range, parts: Sequence[range]) -> Iterator[Tensor]:
        """The parts of each step, one after the other."""
        for step in steps:
            for part in parts:
                yield self.indices(step, part)


def split_batch(batch_size: int, processes: int, accumulation: int, process: int) -> list[range]:
    """The positions of the global batch that one process works on, in parts that are accumulated."""
    share = batch_size // processes
    part = share // accumulation
    start = process * share
    return [range(start + i * part, start + (i + 1) * part) for i in range(accumulation)]
