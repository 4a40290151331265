"""Starts of a new model, before the first step of training.

`start_merges_` overwrites the weights of the merges, so that they begin as the addition of Eq. (3). `start_skips_`
multiplies the coefficients κ_i of a scaling into the weights that read each long skip, and leaves nothing else behind.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..console import text_table
from ..errors import AlreadyScaledError, InvalidConfigError, NotFreshError, ScaleLongError, UnsupportedModelError
from ..finding import ExampleInputs, FoldTarget, LongSkip, Patterns, SkipHost, SkipPlan, find_skips, unwrap
from ..scaling import (
    MERGE_STARTS,
    UNSCALED,
    Constants,
    Scaling,
    SkipScaling,
    as_scaling,
    require_merge_start,
    start_merge_,
)
from .api import is_scaled, scaling_of
from .attach import acts_behind_norm, has_scaling
from .fold import layer_obstacle
from .host import host_of, multiply_weights_

logger = logging.getLogger(__name__)

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
    if not skip.readers.direct:
        return (
            "no linear layer or convolution takes the concatenation as it is" if skip.merge.kind == "cat" else "it adds"
        )
    for target in skip.readers.direct:
        obstacle = _obstacle(host.get_submodule(target.module), target, start)
        if obstacle:
            return f"{target.module} {obstacle}"
    return skip.readers.direct


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


# The scaling as a start: the coefficients go into the weights, and the model is trained as a plain one.
#
# The bounds of section 3 (features, gradients, robustness) are expectations over random weights: they speak of the
# network before its first step. A network whose weights hold κ_i is, at that step, the same function as one whose long
# skips are scaled by κ_i. From then on κ_i is a weight like any other, free to grow.


class UnfoldableSkipsError(ScaleLongError, ValueError):
    """Long skips whose coefficients cannot be multiplied into weights exactly. `reasons` has them by i."""

    def __init__(self, message: str, reasons: dict[int, str]) -> None:
        super().__init__(message)
        self.reasons = reasons


@dataclass(frozen=True)
class SkipStart:
    """What `start_skips_` did: per long skip (i) its coefficient κ_i and the layers whose weights hold it now."""

    scaling: str
    factors: dict[int, float] = field(default_factory=dict)
    layers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Empty where κ_i is 1: nothing was to be done."""
    main: dict[int, float] = field(default_factory=dict)
    """Factors of the main path, for methods that have any."""
    norms: dict[int, str] = field(default_factory=dict)
    """The norm that reads the merge, where κ_i is in the weights after it."""

    def __str__(self) -> str:
        rows = [
            {
                "i": index,
                "κ_i": f"{factor:.4g}",
                **({"main path": f"{self.main[index]:.4g}"} if self.main else {}),
                "in the weights of": ", ".join(self.layers[index]) or "-",
                **({"after": self.norms.get(index, "-")} if self.norms else {}),
            }
            for index, factor in self.factors.items()
        ]
        return f"{self.scaling} as a start, outermost first\n{text_table(rows)}"


def start_skips_(
    model: nn.Module,
    config: Scaling | str | dict[str, Any] = "cs",
    example_inputs: ExampleInputs = None,
    *,
    plan: SkipPlan | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> SkipStart:
    """Multiply the coefficients of a constant scaling into the weights that read each long skip, in place.

    Call it once, after building the model and before the first step of training: a second call squares κ_i. Nothing
    is attached, nothing has to be saved, and the model has the keys that it had. At the start it computes what
    `scale_skips_(model, config)` computes. The long skips are found or given as in `scale_skips_`.

    The function is that of the attached scaling, the run is not: to Adam an attached κ_i is also a rate of κ_i times
    the others' for the weights behind skip i (docs/theory.md). A rate that was tuned with one of the two is to be tried
    again with the other.

    Where a norm reads the merge (GroupNorm in UNets, LayerNorm in HunyuanDiT and Skip-DiT), it would divide κ_i out or
    change it. There κ_i goes into the layers after the norm, as `ConstantScaling(behind_norms=True)` does when it is
    attached; the result names these norms, and the log says so. Where skips are added, κ_i goes into the layer that
    makes the skip, if nothing else reads it.

    All long skips or none: if one of them cannot be folded exactly, UnfoldableSkipsError says why and what to do
    instead, and no weight has changed.
    """
    config, host = as_scaling(config), unwrap(model)
    if is_scaled(model) or (isinstance(host, nn.Module) and has_scaling(host)):
        raise AlreadyScaledError(
            f"the long skips of this {type(host).__name__} are scaled already, and a start would scale them twice: "
            f"unscale_(model) first, or fold_(model) to put the constants that it has into the weights"
        )
    if plan is not None and isinstance(host, SkipHost) and plan.sites != host.skip_sites():
        raise InvalidConfigError(f"the plan is for another model than this {type(host).__name__}")
    plan = find_skips(model, example_inputs, include=include, exclude=exclude) if plan is None else plan
    scaling = config.build(plan.sites)
    reasons = {skip.index: reason for skip in plan if (reason := _unfoldable(host, skip, scaling))}
    if reasons:
        raise _refusal(host, plan, scaling, reasons)
    factors: dict[int, Constants] = {}
    layers: dict[int, tuple[str, ...]] = {}
    for skip in plan:
        found = scaling.constants(skip.index)
        assert found is not None  # otherwise there were reasons
        factors[skip.index] = found
        layers[skip.index] = () if found == UNSCALED else _fold(host, skip, scaling, found)
    main = {index: found.main for index, found in factors.items()}
    norms = {i: plan[i].readers.where for i in layers if layers[i] and _is_after_norm(plan[i], scaling)}
    if norms and not getattr(config, "behind_norms", False):
        logger.info("κ of long skips %s is in the weights after their norms", ", ".join(map(str, norms)))
    return SkipStart(
        str(config),
        {index: found.skip for index, found in factors.items()},
        layers,
        main if any(value != 1.0 for value in main.values()) else {},
        norms,
    )


def _is_after_norm(skip: LongSkip, scaling: SkipScaling) -> bool:
    return acts_behind_norm(skip, scaling) or bool(skip.readers.norm and skip.readers.behind_norm)


def _targets(skip: LongSkip, scaling: SkipScaling) -> tuple[FoldTarget, ...]:
    """The layers whose weights take κ_i: after the norm that reads the merge, if one does."""
    return skip.readers.behind_norm if _is_after_norm(skip, scaling) else skip.readers.fold


def _unfoldable(host: Any, skip: LongSkip, scaling: SkipScaling) -> str:
    """Why κ_i cannot go into the weights; empty if it can."""
    constants = scaling.constants(skip.index)
    if constants is None:
        return scaling.config.unfoldable
    if constants == UNSCALED:
        return ""
    if isinstance(host, SkipHost):
        weights = [(skip.consumer, parameter) for parameter in host.parameters()] if isinstance(host, nn.Module) else []
    else:
        targets = _targets(skip, scaling)
        if not targets:
            return skip.readers.unfoldable or "no layer takes it as it is"
        if constants.main != 1.0 and any(target.output for target in targets):
            return "its main path cannot be folded"
        weights = [(target.module, _weight(host, target)) for target in targets]
        obstacles = [
            layer_obstacle(host, target)
            for target, (_, weight) in zip(targets, weights, strict=True)
            if weight is not None
        ]
        if any(obstacles):
            return next(filter(None, obstacles))
    for name, weight in weights:
        if weight is None:
            return f"{name} is not the layer that the plan names"
        if weight.is_meta:
            return f"{name} is on the meta device and has no weights yet"
    return ""


def _weight(host: nn.Module, target: FoldTarget) -> Tensor | None:
    """The weight of a target, None if the model is not the one of the plan."""
    try:
        weight = getattr(host.get_submodule(target.module), "weight", None)
    except AttributeError:
        return None
    return weight if isinstance(weight, Tensor) and weight.dim() >= 2 else None


def _fold(host: Any, skip: LongSkip, scaling: SkipScaling, factors: Constants) -> tuple[str, ...]:
    if isinstance(host, SkipHost):
        host.fold_skip(skip.index, factors)
        return (skip.consumer or "the model",)
    targets = _targets(skip, scaling)
    for target in targets:
        multiply_weights_(host.get_submodule(target.module), target, factors)
    return tuple(target.module for target in targets)


def _refusal(host: Any, plan: SkipPlan, scaling: SkipScaling, reasons: dict[int, str]) -> UnfoldableSkipsError:
    lines = [
        f"  long skip {i} ({plan[i].producer} to {plan[i].consumer or 'the model'}): {reasons[i]}" for i in reasons
    ]
    shown = [*lines[:4], f"  and {len(lines) - 4} more"] if len(lines) > 5 else lines
    if any(scaling.constants(i) is None for i in reasons):
        advice = 'a start needs constants, such as "cs"; for learned or data-dependent coefficients use scale_skips_'
    else:
        advice = "attach the scaling with scale_skips_, or leave these skips out with exclude="
    return UnfoldableSkipsError(
        f"{len(reasons)} of {len(plan)} long skips of this {type(host).__name__} cannot be started by their weights, "
        f"so nothing was changed:\n" + "\n".join(shown) + f"\n{advice}",
        reasons,
    )
