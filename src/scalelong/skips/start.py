"""Start the merges of a new model as the addition of Eq. (3), before the first step of training."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotFreshError, UnsupportedModelError
from ..scaling.base import UNSCALED, Constants
from ..scaling.baselines import MERGE_STARTS, require_merge_start, start_merge_
from .api import is_scaled, scaling_of
from .examples import ExampleInputs
from .find import find_skips
from .host import host_of
from .plan import FoldTarget, LongSkip, SkipPlan

STARTS = MERGE_STARTS[1:]
_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class StartReport:
    """The layers that were started, by long skip (i), and the skips that were left alone, with the reason."""

    started: dict[int, tuple[str, ...]] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"started: {index}: {', '.join(names)}" for index, names in self.started.items()]
        return "\n".join(lines + [f"kept: {index}: {reason}" for index, reason in self.kept.items()])


def start_merges_(
    model: nn.Module,
    start: str = "additive",
    example_inputs: ExampleInputs = None,
    *,
    plan: SkipPlan | None = None,
    fresh: bool = False,
) -> StartReport:
    """Overwrite the random weights of the layers that take a concatenation as it is, in place (see `MERGE_STARTS`).

    Only for a model that was never trained. That is checked: the weights must lie as torch's default initialisation
    leaves them; `fresh=True` says that they are new although they were initialised in another way.
    "normalised" looks at the scaling of the model, so scale first. Where a norm takes the concatenation (diffusers'
    residual blocks), it is the shortcut that is started.
    """
    require_merge_start(start, STARTS)
    chosen_host = host_of(model)
    host = chosen_host.model
    if chosen_host.is_native:
        raise UnsupportedModelError(
            f"{type(host).__name__} starts its merges itself: build it with merge_start={start!r}"
        )
    plan = find_skips(model, example_inputs) if plan is None else plan
    layers = {skip.index: _layers(host, skip, start) for skip in plan}
    kept = {index: found for index, found in layers.items() if isinstance(found, str)}
    chosen = {index: found for index, found in layers.items() if not isinstance(found, str)}
    if not chosen:
        raise UnsupportedModelError(
            f"no merge of this {type(host).__name__} can start as an addition:\n{StartReport(kept=kept)}"
        )
    for targets in chosen.values():
        for target in targets:
            if not fresh:
                _require_fresh(host.get_submodule(target.module), target.module)
    for index, targets in chosen.items():
        for target in targets:
            _start(host.get_submodule(target.module), target, start, _factors(model, index))
    return StartReport({index: tuple(target.module for target in found) for index, found in chosen.items()}, kept)


def _layers(host: nn.Module, skip: LongSkip, start: str) -> tuple[FoldTarget, ...] | str:
    """The layers to start, or why there are none."""
    if not skip.readers:
        return "no linear layer or convolution takes the concatenation as it is" if skip.merge == "cat" else "it adds"
    for target in skip.readers:
        obstacle = _obstacle(host.get_submodule(target.module), target, start)
        if obstacle:
            return f"{target.module} {obstacle}"
    return skip.readers


def _obstacle(layer: Any, target: FoldTarget, start: str) -> str:
    if not isinstance(layer, _PLAIN) or getattr(layer, "groups", 1) != 1:
        return "is a transposed or grouped convolution"
    if any(size % 2 == 0 for size in layer.weight.shape[2:]):
        return "has a kernel without a middle"
    wanted = {"main path": target.main_length} | ({} if start == "identity" else {"skip": target.length})
    for name, width in wanted.items():
        if width != layer.weight.shape[0]:
            return f"has {layer.weight.shape[0]} outputs, but the {name} has {width} channels"
    return ""


def _require_fresh(layer: Any, name: str) -> None:
    """torch draws weights evenly from ±1/√fan_in. A single step of training pushes some of them over this edge."""
    weight: Tensor = layer.weight.detach()
    edge = 1 / math.sqrt(weight[0].numel())
    largest, deviation = float(weight.abs().max()), float(weight.double().std())
    expected = edge / math.sqrt(3)
    # Five standard errors of the deviation of so many even draws, whose fourth moment is 9/5 of the squared second.
    tolerance = 5 * math.sqrt(0.2 / weight.numel())
    if largest > edge * 1.000001 or abs(deviation / expected - 1) > tolerance:
        raise NotFreshError(
            f"the weight of {name} is not as torch initialises it: it should lie within ±{edge:.4g} with a deviation "
            f"of {expected:.4g}, and has a largest value of {largest:.4g} and a deviation of {deviation:.4g}. Its "
            f"values would be overwritten, which is for models that were never trained; if it is new and was "
            f"initialised in another way, pass fresh=True"
        )


def _factors(model: nn.Module, index: int) -> Constants:
    return (scaling_of(model).constants(index) if is_scaled(model) else None) or UNSCALED


@torch.no_grad()
def _start(layer: Any, target: FoldTarget, start: str, factors: Constants) -> None:
    main = layer.weight[:, target.main_start : target.main_start + target.main_length]
    skip = layer.weight[:, target.start : target.start + target.length]
    start_merge_(main, skip, start, factors)
    if layer.bias is not None:
        layer.bias.zero_()
