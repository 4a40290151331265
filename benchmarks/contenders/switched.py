"""One process with several contenders that share their memory and go in lockstep."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.models import SkipMerge
from scalelong.runs.config import TrainConfig
from scalelong.runs.model import DataShape
from scalelong.stability import StabilityMonitor
from scalelong.training import loop
from scalelong.training.loop import Trainer

from ..lockstep import Cut, Lockstep
from ..profile import cost, differing, operations, table_of
from .ours import TrainingStep, configuration, inference_parts, make_network, make_trainer, monitor_of

# Networks and trainers that work on the very same memory, so that none of them has better places than another.


@torch.no_grad()
def share_weights_(model: nn.Module, base: nn.Module) -> None:
    """Weights that both have with the same values become the base's memory."""
    known = dict(base.named_parameters())
    for name, weight in model.named_parameters():
        if name in known and torch.equal(weight, known[name]):
            weight.data = known[name].data


@contextmanager
def networks_share(base: Trainer) -> Iterator[None]:
    """Trainers made within have the weights of this one. They must be shared before anything is made of them."""
    build = loop.build_model

    def sharing(config: TrainConfig, shape: DataShape) -> nn.Module:
        model = build(config, shape)
        share_weights_(model, base.state.bare)
        return model

    loop.build_model = sharing
    try:
        yield
    finally:
        loop.build_model = build


def share_state_(trainer: Trainer, base: Trainer) -> None:
    """AdamW's moments and the averages of the weights that are shared."""
    known = dict(base.state.bare.named_parameters())
    averages = dict(zip(base.state.ema.names, base.state.ema.averages, strict=True))
    for name, weight in trainer.state.bare.named_parameters():
        if name in known and weight.data_ptr() == known[name].data_ptr():
            trainer.state.optimizer.state[weight] = base.state.optimizer.state[known[name]]
            trainer.state.ema.averages[trainer.state.ema.names.index(name)] = averages[name]


# One process with several contenders that share their memory and go in lockstep.

UNCUT = (nn.Linear, nn.LayerNorm, SkipMerge)
"""Layers that a fused block takes for itself only if no hook is attached to them."""
OPTIMISER = (-3, -2, -1)
"""The slices before, in and after the optimiser's step. They always count: operations on lists of tensors do not tell
how many there are, and a learned gate adds some."""
EMPTY = (nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Dropout)


class Switched:
    """The first contender is the baseline. A call is a round: one step of each, slice by slice."""

    def __init__(
        self,
        steps: Mapping[str, Callable[[], object]],
        lockstep: Lockstep,
        always: Sequence[int] = (),
        monitors: Sequence[StabilityMonitor] = (),
    ) -> None:
        self.steps, self.lockstep, self.monitors = dict(steps), lockstep, monitors
        lockstep.steps = self.steps
        self.always = always
        """Slices, counted from the end, that are compared even if they call the same operations."""
        self.rounds: list[dict[str, list[float]]] = []
        self.parts: set[int] = set()
        # A network that is scaled from outside verifies itself at its first forward; the others have no such slices.
        for step in self.steps.values():
            step()

    def __call__(self) -> None:
        self.rounds.append(self.lockstep.round())

    def compare_operations(self) -> list[str]:
        """Find the slices in which any contender differs from the baseline. Returns those that differ in none."""
        called = {name: operations(step, self.lockstep) for name, step in self.steps.items()}
        baseline = next(iter(called.values()))
        found = {name: differing(baseline, slices) for name, slices in called.items()}
        self.parts = set[int]().union(*found.values(), (len(baseline) + number for number in self.always))
        return [name for name, slices in found.items() if not slices]

    def close(self) -> None:
        """Monitors hook all optimisers of a process until they are closed."""
        for monitor in self.monitors:
            monitor.close()

    def forget(self) -> None:
        """What was measured so far was the warm-up."""
        self.rounds = []

    def found(self) -> dict[str, Any]:
        """Seconds of each step in each round, and the costs over the baseline with their intervals."""
        slices = table_of(self.rounds)
        baseline = next(iter(slices.values()))
        everything = torch.ones(baseline.shape[1], dtype=torch.bool)
        parts = torch.tensor([number in self.parts for number in range(baseline.shape[1])])
        middles = baseline.median(0).values
        return {
            "seconds": {name: values.sum(1).tolist() for name, values in slices.items()},
            "whole": {name: vars(cost(values, baseline, everything)) for name, values in slices.items()},
            "parts": {name: vars(cost(values, baseline, parts)) for name, values in slices.items()},
            "share": float(middles[parts].sum() / middles.sum()),
        }


def training(*, methods: dict[str, str], **arguments: Any) -> Switched:
    """Steps of our trainer under each method."""
    lockstep = Lockstep({})
    trainers = sharing_trainers(list(methods.values()), arguments)
    steps = dict(zip(methods, (cut_step(trainer, trainers[0], lockstep) for trainer in trainers), strict=True))
    return Switched(steps, lockstep, always=OPTIMISER)


def sharing_trainers(methods: Sequence[str], arguments: dict[str, Any]) -> list[Trainer]:
    base = make_trainer(configuration(**arguments, scaling=methods[0]), arguments["shape"])
    with networks_share(base):
        others = [make_trainer(configuration(**arguments, scaling=each), arguments["shape"]) for each in methods[1:]]
    for other in others:
        share_state_(other, base)
    for trainer in (base, *others):
        trainer.begin_at(0)
    return [base, *others]


def cut_step(trainer: Trainer, base: Trainer, lockstep: Lockstep) -> TrainingStep:
    """The last three slices are `OPTIMISER`."""
    cut_network(trainer.state.bare, base.state.bare, lockstep.cut)
    optimizer = trainer.state.prepared_optimizer
    step = optimizer.step

    def cut_around() -> None:
        lockstep.cut()
        step()
        lockstep.cut()

    optimizer.step = cut_around
    return TrainingStep(trainer)


def inference(*, methods: dict[str, dict[str, Any]], **arguments: Any) -> Switched:
    """Forwards without gradients under each method: "scaling", and "folded" or not."""
    made = {name: inference_parts(**arguments, **method) for name, method in methods.items()}
    return _forwards(made)


def attached(*, network: str, methods: dict[str, dict[str, Any]], batch: int) -> Switched:
    """Forwards of a network that is scaled from outside, or not: "scaling", and "folded" or not."""
    return _forwards({name: make_network(network, batch=batch, **method) for name, method in methods.items()})


def _forwards(made: Mapping[str, tuple[nn.Module, tuple[Tensor, ...]]]) -> Switched:
    lockstep = Lockstep({})
    base, inputs = next(iter(made.values()))
    for model, _ in made.values():
        share_weights_(model, base)
        cut_network(model, base, lockstep.cut)

    def forward(model: nn.Module) -> Callable[[], None]:
        def step() -> None:
            with torch.inference_mode():
                model(*inputs)

        return step

    return Switched({name: forward(model) for name, (model, _) in made.items()}, lockstep)


def monitored(*, readings: dict[str, int | None], **arguments: Any) -> Switched:
    """Steps with a stability monitor that reads every `readings[name]` steps, or without one (None)."""
    lockstep = Lockstep({})
    trainers = sharing_trainers(["none"] * len(readings), arguments)
    steps: dict[str, Callable[[], object]] = {}
    monitors: list[StabilityMonitor] = []
    for trainer, (name, every) in zip(trainers, readings.items(), strict=True):
        # Before the cuts, so that what it reads at a module is in the slice that ends there.
        monitor = None if every is None else monitor_of(trainer, every, arguments["shape"])
        step = cut_step(trainer, trainers[0], lockstep)
        steps[name] = step if monitor is None else _with_monitor(step, monitor, lockstep)
        monitors += [] if monitor is None else [monitor]
    return Switched(steps, lockstep, always=OPTIMISER, monitors=monitors)


def _with_monitor(step: TrainingStep, monitor: StabilityMonitor, lockstep: Lockstep) -> Callable[[], None]:
    def monitored() -> None:
        step()
        with lockstep.in_one_piece():
            monitor.step(step.trainer.window.values[1])

    return monitored


def cut_network(model: nn.Module, base: nn.Module, cut: Cut) -> None:
    """Cut forward and backward behind the modules that the base has as well."""
    places = {name for name, module in base.named_modules() if name and type(module) not in (*UNCUT, *EMPTY)}

    def behind(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
        cut()
        if isinstance(output, Tensor) and output.grad_fn is not None:  # a weight would keep the hook for ever
            output.register_hook(lambda _: cut())

    for name, module in model.named_modules():
        if name in places and not name.startswith("skip_scaling"):
            module.register_forward_hook(behind)
