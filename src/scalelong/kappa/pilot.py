"""Estimator C: short training runs over a grid of κ. The honest way, and the dearest; the answer says what it cost."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..scaling.constant import ConstantScaling
from ..theory.sensitivity import count_skips
from .choice import KappaChoice
from .network import ModelInputs, default_inputs, example_arguments
from .run import PilotRun

GRID = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
HELD_OUT = 256
TIE = 0.02

ModelSource = nn.Module | Callable[[], nn.Module]


def choose_by_pilot(
    model: ModelSource,
    data: Tensor,
    schedule: Any = "ddpm",
    *,
    inputs: ModelInputs = default_inputs,
    grid: Sequence[float] = GRID,
    steps: int = 400,
    seeds: int = 2,
    learning_rate: float = 1e-3,
    batch_size: int = 32,
) -> KappaChoice:
    """Estimator C: train copies of the model under each κ of the grid, and take the best held-out loss.

    `model` is a network, whose weights all runs start from, or a function that builds one (called under each seed).
    After a quarter and after half of the steps the worse half of the grid is dropped. The first 256 images of the data
    (a quarter at most) are held out. All runs are in memory together.
    """
    kappas = sorted({float(kappa) for kappa in grid}, reverse=True)
    if len(kappas) < 2 or len(data) < 8 or steps < 4 or seeds < 1:
        raise InvalidConfigError(
            f"a pilot needs at least 2 values of κ, 8 images, 4 steps and 1 seed; got {len(kappas)}, {len(data)}, "
            f"{steps} and {seeds}"
        )
    started = time.perf_counter()
    count = min(HELD_OUT, len(data) // 4)
    runs = {
        kappa: [
            PilotRun(
                _scaled(model, kappa, data, schedule, inputs, seed),
                data[count:],
                data[:count],
                schedule=schedule,
                seed=seed,
                batch_size=batch_size,
                learning_rate=learning_rate,
                warmup=steps // 8,
                inputs=inputs,
            )
            for seed in range(seeds)
        ]
        for kappa in kappas
    }
    race = _race(runs, steps)
    final = {kappa: _mean(race.losses[kappa][steps]) for kappa in race.ranked}
    best = race.ranked[0]
    tied = [kappa for kappa in race.ranked if final[kappa] <= final[best] * (1 + TIE)]
    seconds = time.perf_counter() - started
    if not math.isfinite(final[best]):
        raise InvalidConfigError("every pilot run has diverged; use a smaller learning_rate")
    return KappaChoice(
        kappa=best,
        low=min(tied),
        high=max(tied),
        method="pilot",
        skips=count_skips(runs[best][0].model, example_arguments(data, schedule, inputs)),
        reasons=(
            f"κ = {best:g} has the lowest held-out loss after {steps} steps, {final[best]:.4g} ({seeds} seed(s))",
            f"the range is what comes within {TIE:.0%} of it: differences below that are mostly chance",
            f"it cost {race.trained} training steps of {batch_size} images, {seconds:.0f} s; one run is {steps}",
            "short runs favour what learns fast at the start; a κ that pays off late is not seen",
        ),
        details={"losses": race.losses, "training_steps": race.trained, "seconds": round(seconds, 1), "final": final},
    )


class Race(NamedTuple):
    losses: dict[float, dict[int, list[float]]]
    """By κ and step: the held-out loss of each seed, for as long as κ was in the race."""
    ranked: list[float]
    """Those that came to the end, the best first."""
    trained: int
    """Training steps of all runs together."""


def _race(runs: Mapping[float, Sequence[PilotRun]], steps: int) -> Race:
    """Advance all runs; after a quarter and after half of the steps, drop the worse half."""
    losses: dict[float, dict[int, list[float]]] = {kappa: {} for kappa in runs}
    alive, trained, done = list(runs), 0, 0
    for rung in (steps // 4, steps // 2, steps):
        for kappa in alive:
            for run in runs[kappa]:
                run.advance(rung - done)
                trained += rung - done
            losses[kappa][rung] = [run.held_out_loss() for run in runs[kappa]]
        done = rung
        alive = sorted(alive, key=lambda kappa: _mean(losses[kappa][rung]))
        if rung < steps:
            alive = alive[: max(2, math.ceil(len(alive) / 2))]
    return Race(losses, alive, trained)


def _scaled(
    source: ModelSource, kappa: float, data: Tensor, schedule: Any, inputs: ModelInputs, seed: int
) -> nn.Module:
    """A model of its own for one run: equal seeds, equal weights."""
    from ..skips import scale_skips_

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
    if kappa != 1.0:
        scale_skips_(model, ConstantScaling(kappa), example_inputs=example_arguments(data, schedule, inputs))
    return model


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
