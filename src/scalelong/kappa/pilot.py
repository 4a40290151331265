"""Estimator C: κ by short training runs; and `choose_kappa`: κ by any of the three estimators."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..models.call import output_tensor
from ..noise import SCHEDULE, alpha_bars, even_fractions, mix
from ..scaling.constant import ConstantScaling
from ..skips import scale_skips_
from ..theory.moments import image_moments
from ..theory.sensitivity import count_skips
from .estimators import (
    KappaChoice,
    ModelInputs,
    choose_from_moments,
    choose_from_network,
    default_inputs,
    example_arguments,
)


class PilotRun:
    """One short training run that can be advanced step by step: AdamW on Eq. (2), with a linear warm-up.

    Everything random comes from `seed`, so that runs with equal seeds see equal images, times and noise, and their
    losses differ by what is compared alone.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        held_out: Tensor,
        *,
        schedule: Any = SCHEDULE,
        seed: int = 0,
        batch_size: int = 32,
        learning_rate: float = 1e-3,
        warmup: int = 50,
        inputs: ModelInputs = default_inputs,
    ) -> None:
        self.model, self.images, self.batch_size, self.warmup, self.inputs = model, images, batch_size, warmup, inputs
        self.alpha_bars = alpha_bars(schedule).to(images.device, torch.float32)
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)
        # The held-out noise is the same in all runs, and its times cover the schedule evenly.
        shared = torch.Generator().manual_seed(0)
        self.held_out = held_out
        self.held_out_noise = torch.randn(held_out.shape, generator=shared).to(held_out)
        even = even_fractions(len(held_out), torch.Generator().manual_seed(1))
        self.held_out_steps = (even * len(self.alpha_bars)).long().to(held_out.device)
        self.steps_done = 0

    def advance(self, steps: int) -> None:
        self.model.train()
        with torch.random.fork_rng():
            # For dropout: equal in runs with equal seeds, and nothing to the caller's own random numbers.
            torch.manual_seed(self.seed + self.steps_done)
            self._train(steps)

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            chosen = torch.randint(len(self.images), (self.batch_size,), generator=self.generator)
            times = torch.randint(len(self.alpha_bars), (self.batch_size,), generator=self.generator)
            clean = self.images[chosen.to(self.images.device)]
            noise = torch.randn(clean.shape, generator=self.generator).to(clean)
            loss = self._loss(clean, noise, times.to(clean.device))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.steps_done += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * min(1.0, self.steps_done / max(self.warmup, 1))
            self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Eq. (2) per dimension on images that were not trained on; infinite where the run has diverged."""
        self.model.eval()
        losses = [
            self._loss(self.held_out[part], self.held_out_noise[part], self.held_out_steps[part]) * len(part)
            for part in torch.arange(len(self.held_out), device=self.held_out.device).split(128)
        ]
        loss = float(sum(losses)) / len(self.held_out)
        return loss if math.isfinite(loss) else math.inf

    def _loss(self, clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        alpha_bar = self.alpha_bars[times]
        noisy = mix(clean, noise, alpha_bar.sqrt(), (1 - alpha_bar).sqrt())
        prediction = output_tensor(self.model(*self.inputs(noisy, times)))
        return (prediction - noise).square().mean()


# Estimator C: short training runs over a grid of κ. The honest way, and the most expensive; the answer says what it
# cost.

GRID = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
HELD_OUT = 256
TIE = 0.02

ModelSource = nn.Module | Callable[[], nn.Module]


def choose_by_pilot(
    model: ModelSource,
    data: Tensor,
    schedule: Any = SCHEDULE,
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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = copy.deepcopy(source) if isinstance(source, nn.Module) else source()
    if kappa != 1.0:
        scale_skips_(model, ConstantScaling(kappa), example_inputs=example_arguments(data, schedule, inputs))
    return model


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# `choose_kappa`: κ by any of the three estimators

METHODS = ("data", "network", "pilot")

# This many images are gathered from a callable that gives batches.
GATHERED = 2048

Data = Tensor | Callable[[], Tensor] | Sequence[Tensor]


def choose_kappa(
    model: ModelSource | None = None,
    data: Data | None = None,
    schedule: Any = SCHEDULE,
    method: str = "data",
    *,
    skips: int | None = None,
    inputs: ModelInputs = default_inputs,
    **pilot: Any,
) -> KappaChoice:
    """κ for constant scaling, κ_i = κ^(i-1) (Eq. 8), with its range and the reasons in words.

    `method`: "data" needs the number of long skips (`skips`, or a model to count them in) and is best given `data`;
    "network" needs a model and data; "pilot" trains, and needs a model (better: a function that builds one) and data.
    `data`: images (n, C, H, W) as the network sees them, usually in [-1, 1], or a function that gives such batches.
    `schedule`: "vp", "ddpm", "cosine", "sd", the values ᾱ_t, or a diffusers scheduler.
    `inputs(x_t, t)` gives the arguments of the model, for models that are not called as model(x_t, t).
    Other options (`grid`, `steps`, `seeds`, `learning_rate`, `batch_size`) go to the pilot.
    """
    if method not in METHODS:
        raise InvalidConfigError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if pilot and method != "pilot":
        raise InvalidConfigError(f"the options {', '.join(sorted(pilot))} belong to method='pilot'")
    images = None if data is None else _images(data)
    if method == "data":
        return choose_from_moments(_skips(skips, model, images, schedule, inputs), images, schedule)
    if model is None or images is None:
        raise InvalidConfigError(f"method={method!r} needs both a model and data")
    if method == "network":
        return choose_from_network(_built(model), images, schedule, inputs)
    return choose_by_pilot(model, images, schedule, inputs=inputs, **pilot)


def _images(data: Data) -> Tensor:
    if callable(data):
        batches = []
        while sum(map(len, batches)) < GATHERED:
            batches.append(data())
        images = torch.cat(batches)
    else:
        images = data if isinstance(data, Tensor) else torch.stack(list(data))
    image_moments(images[:1])  # says what is wrong with images that are not images
    if not bool(torch.isfinite(images).all()):
        raise InvalidConfigError("the data contains values that are not finite: remove them")
    return images


def _skips(
    skips: int | None, model: ModelSource | None, images: Tensor | None, schedule: Any, inputs: ModelInputs
) -> int:
    if skips is not None:
        return skips
    if model is None:
        raise InvalidConfigError("method='data' needs the number of long skips: pass skips=N, or a model")
    arguments = () if images is None else example_arguments(images, schedule, inputs)
    return count_skips(_built(model), arguments)


def _built(model: ModelSource) -> nn.Module:
    return model if isinstance(model, nn.Module) else model()
