"""Runs of a range one by one, and as a stack: what `rate_range` itself does with them, in one process in turns."""

import time
from functools import partial
from typing import Any

import torch

from scalelong.models import UViT
from scalelong.stability import DenoisingStep
from scalelong.stability.range import Task, checked_task

from . import ALONE, TOGETHER
from .races import Races

RATE = 1e-3
FEWEST = 3


def make_task(*, batch: int, runs: int, steps: int, **size: Any) -> Task:
    """`runs` seeds of one network on random images."""
    shape = (batch, size["channels"], size["image_size"], size["image_size"])

    def prepare(_: int, source: torch.Generator):
        x = torch.randn(shape, generator=source)
        return (x, 999 * torch.rand(batch, generator=source), None), lambda output: (output - x).square().mean()

    task = checked_task(
        lambda _: UViT(**size), DenoisingStep(prepare), rates=[RATE], methods=["none"], seeds=runs, steps=steps
    )
    return task.prepared(None, 1e6)[0]


class SweepRace:
    """A call trains all runs in both ways: seconds of a step of one run, with building and judging it."""

    def __init__(self, *, steps: int, **arguments: Any) -> None:
        self.steps, self.task = steps, make_task(**arguments, steps=steps)
        keys = tuple(self.task.keys)
        self.parts = {ALONE: [(key,) for key in keys], TOGETHER: [keys]}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.parts}
        self.difference = 0.0

    def __call__(self) -> None:
        order = list(self.parts.items())
        losses = {}
        for name, parts in order if len(self.seconds[ALONE]) % 2 == 0 else reversed(order):
            began = time.process_time()
            runs = [run for part in parts for run in self.task.work(part)]
            self.seconds[name].append((time.process_time() - began) / self.steps / len(runs))
            losses[name] = torch.tensor([run.last for run in runs])
        self.difference = max(self.difference, float((losses[TOGETHER] / losses[ALONE] - 1).abs().max()))

    def about(self) -> dict[str, Any]:
        return {}


class SweepRaces(Races):
    def __init__(self, *, races: list[dict[str, Any]], rounds: int, seconds: float, steps: int) -> None:
        made = [partial(SweepRace, steps=steps, **race) for race in races]
        super().__init__(made, rounds=rounds, fewest=FEWEST, seconds=seconds)
