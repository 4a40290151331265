"""From a batch of any data set to what a network is called with: (x_t, t, condition).

One maker serves training steps, the held-out loss, and the fixed batches on which networks are examined. It knows bytes
and latents, labels and texts. Everything random is a function of the seed, the purpose and the step, so that all
methods see the same, a resumed run sees what it would have seen, and any number of processes see together what one
would.

    maker = InputMaker(process, conditions, shape, seed=0)
    examples = maker.for_step(step, range(64), batch)       # x_0, ε, t and condition of a training step
    x_t, t, condition = maker.probe(data, 16)               # the same batch for every method of a seed
    model(**maker.probe(data, 16).arguments(model))
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data import Batch, ImageData, to_float
from ..models import Denoiser, call_arguments
from ..noise import NoiseProcess, Prediction, epsilon_losses, even_fractions, level_names, noise_levels
from ..randomness import generator, noise, uniform
from .conditions import Conditions
from .latents import sample_latents

HELD_OUT_CHUNK = 128
"""Images of a pass of the held-out loss. Noise is drawn chunk by chunk: a different size gives a different loss."""


class Examples(NamedTuple):
    """What a loss is computed from: clean images, noise, times and conditions, one row per image."""

    x0: Tensor
    noise: Tensor
    t: Tensor
    condition: Tensor | None


class NoisyInputs(NamedTuple):
    """What a network is called with."""

    x: Tensor
    """x_t."""
    t: Tensor
    condition: Tensor | None

    def arguments(self, model: nn.Module) -> dict[str, Tensor]:
        """The same by the names that the model has for them: `model(**inputs.arguments(model))`."""
        return call_arguments(model, *self)


@dataclass(frozen=True)
class InputMaker:
    """Images, times, noise and conditions of one run.

    `shape` is that of one x_0, (C, H, W): for latents theirs, not that of the images that they stand for.
    `batch_size` counts all processes. `flip` mirrors every other image, and `condition_dropout` is the share of
    conditions that are dropped for classifier-free guidance; both at training steps alone.
    """

    process: NoiseProcess
    conditions: Conditions
    shape: tuple[int, int, int]
    seed: int = 0
    batch_size: int = 1
    flip: bool = False
    condition_dropout: float = 0.0
    device: torch.device | str = "cpu"

    def for_step(self, step: int, positions: range, batch: Batch) -> Examples:
        """The images at these positions of the step's global batch, ready for the loss."""
        part = slice(positions.start, positions.stop)
        images = batch.images.to(self.device, non_blocking=True)
        if images.is_floating_point():  # the moments of latents
            x0 = sample_latents(images, noise(self.seed, step, positions, self.shape, self.device, "latents"))
        else:
            x0 = to_float(images, self._uniform("flip", step)[part] < 0.5 if self.flip else None)
        dropped = self._uniform("condition", step)[part] < self.condition_dropout
        condition = self.conditions.drop(self.conditions.from_batch(batch), dropped)
        return Examples(
            x0,
            noise(self.seed, step, positions, self.shape, self.device),
            self.process.times(self._uniform("time", step)[part]).to(self.device, non_blocking=True),
            None if condition is None else condition.to(self.device, non_blocking=True),
        )

    def held_out(self, data: ImageData) -> Iterator[Examples]:
        """All images of a data set, with the same noise and times at every call and for every method.

        The times are spread evenly, so that few images suffice, in an order that has nothing to do with the images.
        """
        count = len(data)
        times = self.process.times(even_fractions(count, generator(self.seed, "held-out times")))
        noise_source = generator(self.seed, "held-out noise")
        for rows in torch.arange(count).split(HELD_OUT_CHUNK):
            batch = data.fetch(rows)
            x0 = self._clean(batch)
            yield Examples(
                x0,
                torch.randn(x0.shape, generator=noise_source).to(self.device),
                times[rows].to(self.device),
                self._condition(batch),
            )

    def probe(self, data: ImageData, count: int) -> NoisyInputs:
        """x_t of the first images, at times spread evenly: one fixed batch for looking at networks."""
        batch = data.fetch(torch.arange(min(count, len(data))))
        x0 = self._clean(batch)
        t = self.process.times(even_fractions(len(x0))).to(self.device)
        probe_noise = torch.randn(x0.shape, generator=generator(self.seed, "probe")).to(self.device)
        return NoisyInputs(self.process.add_noise(x0, probe_noise, t), t, self._condition(batch))

    def clean(self, data: ImageData, count: int) -> Tensor:
        """x_0 of the first images, as the network would see them without noise: for moments of the data."""
        return self._clean(data.fetch(torch.arange(min(count, len(data)))))

    def _clean(self, batch: Batch) -> Tensor:
        images = batch.images.to(self.device)
        return sample_latents(images) if images.is_floating_point() else to_float(images)

    def _condition(self, batch: Batch) -> Tensor | None:
        condition = self.conditions.from_batch(batch)
        return None if condition is None else condition.to(self.device)

    def _uniform(self, purpose: str, step: int) -> Tensor:
        return uniform(self.seed, purpose, step, self.batch_size)


@torch.no_grad()
def held_out_losses(
    network: Denoiser, maker: InputMaker, prediction: Prediction, data: ImageData
) -> tuple[Tensor, Tensor]:
    """Error in ε and noise level of each image that is not trained on: comparable whatever networks predict."""
    losses, levels = [], []
    for x0, drawn, t, condition in maker.held_out(data):
        losses.append(epsilon_losses(network.given(condition), maker.process, prediction, x0, drawn, t).cpu())
        levels.append(noise_levels(maker.process, t).cpu())
    return torch.cat(losses).double(), torch.cat(levels)


def held_out_loss(network: Denoiser, maker: InputMaker, prediction: Prediction, data: ImageData) -> float:
    """The mean error in ε on images that are not trained on."""
    return float(held_out_losses(network, maker, prediction, data)[0].mean())


def by_level(losses: Tensor, levels: Tensor) -> dict[str, float]:
    """The mean loss of each noise level that has images, by the bounds of its log-SNR."""
    names = level_names()
    return {names[level]: float(losses[levels == level].mean()) for level in sorted(set(levels.tolist()))}


# Which images make up a step: a new permutation every epoch, computed from the step alone


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
