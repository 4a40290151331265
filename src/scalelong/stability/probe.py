"""The features of a network on one batch: what a fixed probe batch shows while the weights change."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..skips import find_skips, is_scaled, plan_of
from ..skips.examples import ExampleInputs
from ..skips.host import unwrap
from ..skips.plan import SkipPlan
from ..theory.sensitivity import evaluating
from .taps import Meter, listen


@dataclass(frozen=True)
class Features:
    """RMS and largest magnitude of every long skip (before scaling) and every block."""

    skip_rms: dict[int, float]
    block_rms: dict[str, float]
    block_max: dict[str, float]


def plan_for(model: nn.Module, example_inputs: ExampleInputs = None) -> SkipPlan:
    """The plan by which a model is scaled, or the one that is found in it."""
    return plan_of(model) if is_scaled(model) else find_skips(model, example_inputs)


def measure(model: nn.Module, plan: SkipPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Meter:
    """One forward in eval mode, without gradients and without the compiler. Nothing of the model changes."""
    host = unwrap(model)
    meter = Meter(on=True)
    handles = listen(host, plan, meter)
    try:
        with evaluating(host), torch.no_grad(), _eager():
            host(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return meter


def probe(model: nn.Module, *inputs: Any, plan: SkipPlan | None = None, **keywords: Any) -> Features:
    """The features of `model(*inputs, **keywords)`, as numbers."""
    meter = measure(model, plan or plan_for(model, inputs or keywords), inputs, keywords)
    return Features(
        skip_rms={index: float(size[0]) for index, size in meter.skips.items()},
        block_rms={name: float(size[0]) for name, size in meter.blocks.items()},
        block_max={name: float(size[1]) for name, size in meter.blocks.items()},
    )


def _eager() -> AbstractContextManager[Any]:
    # The compiler is slow to import, and where it is not there yet nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
