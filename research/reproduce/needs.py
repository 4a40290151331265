"""What would decide a claim: the seeds that it takes at this scale, and the GPU hours of the paper's own.

    seeds_needed(spread=0.05, effect=0.04)     # 12: for an effect of 4 % where seeds differ by 5 %
    print(paper_cost(ITEMS["fig5"].arms("paper"), seeds=3))

Seeds follow from the spread that was seen, GPU hours from the floating-point operations of one step, which are counted
on the meta device: nobody has to run anything to know what it would take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from scalelong.config import TrainConfig
from scalelong.runs.model import DataShape, build_model, example_forward

from ..statistics import student_quantile
from .settings import Arm, planned

# Seeds: how many would have told an effect of the paper's size from none

CONFIDENCE, POWER = 0.9, 0.8
MOST_SEEDS = 1000
"""Beyond this, more seeds are not the answer."""


def seeds_needed(spread: float, effect: float, confidence: float = CONFIDENCE) -> int | None:
    """The smallest number of seeds that tells an effect from none with a power of 80 %; None if 1,000 do not.

    `spread` is the standard deviation between seeds. The interval of the mean (Student's t, two-sided) must then leave
    out zero if the effect is there, or leave out the effect if it is not.
    """
    if spread == 0:
        return 2
    low, high = 1, 2
    while _power(high, spread, effect, confidence) < POWER:
        low, high = high, 2 * high
        if low > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _power(middle, spread, effect, confidence) < POWER else (low, middle)
    return high if high <= MOST_SEEDS else None


def _power(seeds: int, spread: float, effect: float, confidence: float) -> float:
    """P(T > t) of the noncentral t, by the normal that is nearest to it (Abramowitz and Stegun, 26.7.10)."""
    freedom, shift = seeds - 1, abs(effect) * math.sqrt(seeds) / spread
    if freedom < 1:
        return 0.0
    t = student_quantile(freedom, (1 + confidence) / 2)
    return NormalDist().cdf((shift - t * (1 - 1 / (4 * freedom))) / math.sqrt(1 + t * t / (2 * freedom)))


# GPU hours of the paper's scale

SUSTAINED = 50e12
"""Floating-point operations a second of the GPU that hours are told for: a sixth of the peak of an A100 in bfloat16."""
BACKWARD = 2
"""Forwards that a backward is worth."""


@dataclass(frozen=True)
class PaperCost:
    """Of all runs of an item at the paper's scale. Print it."""

    runs: int
    steps: int
    operations: float

    @property
    def gpu_hours(self) -> float:
        return self.operations / SUSTAINED / 3600

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.steps:,} steps, {self.operations:.2g} floating-point operations: about "
            f"{hours_text(self.gpu_hours)} GPU hours at {SUSTAINED / 1e12:g} TFLOP/s (counted, not measured; without "
            f"samples and scores)"
        )


def paper_cost(arms: Sequence[Arm], seeds: int) -> PaperCost:
    """Arms that agree are one run."""
    runs = planned(arms, seeds, Path("."))
    steps = sum(run.config.steps for run in runs)
    done = sum(run.config.steps * run.config.batch_size * operations_per_image(run.config) for run in runs)
    return PaperCost(len(runs), steps, done)


def hours_text(hours: float) -> str:
    return f"{hours:.2g}" if hours < 10 else f"{float(f'{hours:.2g}'):,.0f}"


def operations_per_image(config: TrainConfig) -> float:
    """Of a training step: a forward, counted, and a backward. Scaling of the skips costs nothing beside it."""
    shape = shape_of(config)
    return (1 + BACKWARD) * _forward(_Network(config, shape))


class _Network:
    """A configuration and its data, equal to others with the same network."""

    def __init__(self, config: TrainConfig, shape: DataShape) -> None:
        self.config, self.shape = config, shape
        self.key = repr((config.model, sorted(config.model_options.items()), shape, config.diffusion.condition))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Network) and self.key == other.key


@cache
def _forward(network: _Network) -> float:
    with torch.device("meta"):
        model = build_model(replace(network.config, scaling="none"), network.shape)
        inputs: Any = example_forward(model, network.config, network.shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    count = next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim() > 1)
    return counter.get_total_flops() / count


def shape_of(config: TrainConfig) -> DataShape:
    """Of the data that a recipe asks for, which need not be here; autoencoders of latents divide by eight."""
    size = config.images.size or 32
    if config.images.autoencoder:
        return DataShape(4, size // 8, size // 8)
    classes = tuple(map(str, range(1000))) if config.diffusion.condition == "class" else None
    return DataShape(config.images.channels or 3, size, size, classes)
