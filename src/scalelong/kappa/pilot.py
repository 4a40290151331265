"""Estimator C: short training runs over a grid of κ. The honest way, and the dearest; the answer says what it cost."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..scaling.constant import ConstantScaling
from ..theory.jacobian import as_tensor
from ..theory.schedules import alpha_bars
from ..theory.sensitivity import count_skips
from .choice import KappaChoice
from .network import ModelInputs, default_inputs, example_arguments

GRID = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
HELD_OUT = 256
TIE = 0.02

ModelSource = nn.Module | Callable[[], nn.Module]


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
        schedule: Any = "ddpm",
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
        self.generator = torch.Generator().manual_seed(seed)
        # The held-out noise is the same in all runs, and its times cover the schedule evenly.
        shared = torch.Generator().manual_seed(0)
        self.held_out = held_out
        self.held_out_noise = torch.randn(held_out.shape, generator=shared).to(held_out)
        self.held_out_steps = _even_steps(len(held_out), len(self.alpha_bars)).to(held_out.device)
        self.steps_done = 0

    def advance(self, steps: int) -> None:
        self.model.train()
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
        alpha_bar = self.alpha_bars[times].view(-1, *[1] * (clean.dim() - 1))
        noisy = alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise
        prediction = as_tensor(self.model(*self.inputs(noisy, times)))
        return (prediction - noise).square().mean()


def _even_steps(count: int, length: int) -> Tensor:
    """`count` times spread evenly over the schedule, in an order that has nothing to do with the images."""
    even = ((torch.arange(count) + 0.5) * length / count).long()
    return even[torch.randperm(count, generator=torch.Generator().manual_seed(1))]


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
    (a quarter at most) are held out.
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
    losses: dict[float, dict[int, list[float]]] = {kappa: {} for kappa in kappas}
    alive = kappas
    for rung in (steps // 4, steps // 2, steps):
        for kappa in alive:
            for run in runs[kappa]:
                run.advance(rung - run.steps_done)
            losses[kappa][rung] = [run.held_out_loss() for run in runs[kappa]]
        ranked = sorted(alive, key=lambda kappa: _mean(losses[kappa][rung]))
        alive = ranked[: max(2, math.ceil(len(ranked) / 2))] if rung < steps else ranked
    best = alive[0]
    final = {kappa: _mean(losses[kappa][steps]) for kappa in alive}
    tied = [kappa for kappa in alive if final[kappa] <= final[best] * (1 + TIE)]
    trained = sum(run.steps_done for group in runs.values() for run in group)
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
            f"κ = {best:g} has the lowest held-out loss after {steps} steps, {final[best]:.4g}, mean of {seeds} seeds",
            f"the range is what comes within {TIE:.0%} of it: differences below that are mostly chance",
            f"it cost {trained} training steps of {batch_size} images, {seconds:.0f} s; a single run of {steps} steps "
            f"would have cost {steps}",
            "short runs favour what learns fast at the start; a κ that pays off late is not seen",
        ),
        details={"losses": losses, "training_steps": trained, "seconds": round(seconds, 1), "final": final},
    )


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
