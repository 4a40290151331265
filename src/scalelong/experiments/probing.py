"""A fixed batch of noisy images for looking at networks: the same for every method of one seed."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..data import to_float
from ..noise import NoiseProcess
from ..randomness import generator
from ..runs.config import TrainConfig
from ..runs.model import load_images


class ProbeBatch(NamedTuple):
    x: Tensor
    """x_t of held-out images, at times spread evenly."""
    t: Tensor
    labels: Tensor | None


def noisy_probe(config: TrainConfig, count: int) -> ProbeBatch:
    data, held_out = load_images(config, lambda _: None)
    source = held_out or data
    batch = source.fetch(torch.arange(min(count, len(source))))
    x0, process = to_float(batch.images), NoiseProcess(config.diffusion.schedule)
    t = process.times((torch.arange(len(x0)) + 0.5) / len(x0))
    noise = torch.randn(x0.shape, generator=generator(config.seed, "probe"))
    labels = batch.labels if config.diffusion.condition == "class" else None
    return ProbeBatch(process.add_noise(x0, noise, t), t, labels)
