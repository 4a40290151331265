"""Scale the long skips of a model in place, look at the coefficients, undo it."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    AlreadyScaledError,
    AmbiguousSkipsError,
    CancelledScalingWarning,
    FrozenGatesWarning,
    NotScaledError,
    ScaleLongError,
    UnsupportedModelError,
)
from ..finding import ExampleInputs, Patterns, SkipPlan, example_call, find_skips
from ..scaling import Scaling, SkipScaling, as_scaling
from ..tracing import isolated_run
from .actions import Attached
from .attach import acts_after_norm, follow_structure, has_scaling
from .fold import undo_compensation_
from .host import Host, host_of, require_scaled, scaled_host_of
from .record import class_name, spelled
from .reruns import call_to_keep
from .verify import verify_attached, with_batch_axes


def scale_skips_(
    model: nn.Module,
    config: Scaling | str | dict[str, Any],
    example_inputs: ExampleInputs = None,
    *,
    plan: SkipPlan | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
) -> nn.Module:
    """Scale the long skips of the model, in place. All weights stay as they are. Returns the model.

    The long skips are found by `find_skips(model, example_inputs, include=..., exclude=...)`, or given as a `plan`.
    A model that is scaled already raises AlreadyScaledError: `unscale_` it first.

    What the scaled model computes is verified on the example inputs, in evaluation and in training mode. A difference
    raises VerificationError, and the model is left as it was. `verify=False` leaves that out; `scalelong.verify(model,
    inputs)` does it for other inputs. In each forward it is counted that every skip was scaled.
    """
    config = as_scaling(config)
    host = host_of(model)
    _require_unscaled(host)
    call = None
    if host.is_native:
        plan = host.plan() if plan is None else plan
        assert plan is not None
    else:
        if plan is None or example_inputs is not None:
            call = example_call(host.model, example_inputs)
        plan = find_skips(model, example_inputs, include=include, exclude=exclude) if plan is None else plan
        if config.looks_at_data and call is not None:
            plan = with_batch_axes(host, plan, call)
    scaling = config.build(plan.sites)
    if host.model is not model and next(scaling.parameters(), None) is not None and hasattr(model, "module"):
        raise UnsupportedModelError(
            f"a {type(model).__name__} does not know parameters that are added later: scale the long skips first, then "
            f"wrap the model"
        )
    state = Attached(plan, scaling, inputs=None if call is None else call_to_keep(call))
    host.attach(state)
    if verify and call is not None:
        try:
            verify_attached(host.model, state, call)
        except ScaleLongError:
            host.detach()
            raise
    _warn_if_not_optimised(host.model, scaling)
    _warn_if_cancelled(plan, scaling)
    return model


def unscale_(model: nn.Module) -> nn.Module:
    """Undo `scale_skips_`. The model computes what it did before, bit for bit. Returns the model."""
    host = require_scaled(model)
    undo_compensation_(host)
    host.detach()
    return model


@contextmanager
def unscaled(model: nn.Module) -> Iterator[nn.Module]:
    """The model as if it had never been scaled, within a `with` block."""
    host = require_scaled(model)
    state = host.detach()
    try:
        yield model
    finally:
        host.attach(state)


@torch.no_grad()
def coefficients(model: nn.Module, *inputs: Any, reduce: bool = True, **keywords: Any) -> list[Any]:
    """κ_1 ... κ_N, outermost first: of a forward with these inputs, or without inputs of the most recent forward.

    The forward with these inputs leaves the model and the random states as they were. They may be given one by one,
    or as the tuple that `scale_skips_` takes.

    Coefficients that depend on the data are averaged to one number each; `reduce=False` gives the tensors, which
    broadcast against the skips.
    """
    scaling = scaling_of(model)
    if not inputs and not keywords:
        return _coefficients(scaling, reduce)
    host = scaled_host_of(model)
    if host.state is not None:
        follow_structure(host.model, host.state)  # the isolated run would undo it
        scaling = scaling_of(model)
    if len(inputs) == 1 and not keywords and isinstance(inputs[0], tuple):
        inputs, _ = example_call(host.model, inputs[0])
    flags = [module.training for module in model.modules()]
    with isolated_run(model, scaling):
        for module, training in zip(model.modules(), flags, strict=True):
            module.training = training
        model(*inputs, **keywords)
        return _coefficients(scaling, reduce)


def _coefficients(scaling: SkipScaling, reduce: bool) -> list[Any]:
    values = [scaling.coefficient(site.index) for site in scaling.sites]
    return Coefficients(map(_mean, values)) if reduce else values


def _mean(value: Tensor | float) -> float:
    return float(value.mean()) if isinstance(value, Tensor) else value


class Coefficients(list[float]):
    """κ_1 ... κ_N: a list that prints four significant digits."""

    def __repr__(self) -> str:
        return f"[{', '.join(repr(float(f'{value:.4g}')) for value in self)}]"


def is_scaled(model: nn.Module) -> bool:
    """Whether the long skips of the model, or of a network inside it, are scaled."""
    try:
        return scaled_host_of(model).is_scaled
    except AmbiguousSkipsError:
        return True  # several of them


def scaling_of(model: nn.Module) -> SkipScaling:
    """The module that scales the long skips of the model."""
    host = scaled_host_of(model)
    if host.scaling is None:
        raise NotScaledError(f"the long skips of this {type(host.model).__name__} are not scaled")
    return host.scaling


def plan_of(model: nn.Module) -> SkipPlan:
    """The plan by which the model is scaled."""
    plan = require_scaled(model).plan()
    assert plan is not None
    return plan


@dataclass(frozen=True, repr=False)
class ScalingSummary:
    """What was done to a model. Prints as a short text."""

    model: str
    method: str | None
    """The scaling, with its options; None for a model that is not scaled."""
    skips: tuple[str, ...] = ()
    """Where each long skip comes from and goes to, outermost first."""
    coefficients: tuple[float | None, ...] = ()
    """κ_i of the most recent forward; None where it depends on the data and no forward ran yet."""
    parameters: int = 0
    """How many parameters the scaling adds."""
    trainable: int = 0
    folded: tuple[int, ...] = ()
    """The skips whose coefficients are in the weights."""
    norms: dict[int, str] = field(default_factory=dict)
    """The merges that have a norm of their own, which the method leaves alone."""

    def __str__(self) -> str:
        if self.method is None:
            return f"{self.model}: long skips not scaled"
        added = f"{self.parameters:,} parameters added" if self.parameters else "no parameters added"
        frozen = f", {self.trainable:,} of them trainable" if self.trainable != self.parameters else ""
        lines = [f"{self.model}: {len(self.skips)} long skips scaled by {self.method}; {added}{frozen}"]
        for index, (place, kappa) in enumerate(zip(self.skips, self.coefficients, strict=True), start=1):
            value = "depends on the data: run a forward" if kappa is None else f"{kappa:.4g}"
            normed = f", normalised by {self.norms[index]}" if index in self.norms else ""
            lines.append(f"  κ_{index} = {value}  ({place}){', in the weights' if index in self.folded else normed}")
        return "\n".join(lines)

    __repr__ = __str__


def summary(model: nn.Module) -> ScalingSummary:
    """Which method scales the long skips of a model, how many, where, by how much, and what it adds."""
    host = scaled_host_of(model)
    name = class_name(host.model)
    if not host.is_scaled:
        return ScalingSummary(name, None)
    scaling, plan = scaling_of(model), plan_of(model)
    values: list[float | None] = []
    for site in scaling.sites:
        try:
            values.append(_mean(scaling.coefficient(site.index)))
        except NotScaledError:
            values.append(None)
    sizes = [(p.numel(), p.requires_grad) for p in scaling.parameters()]
    return ScalingSummary(
        model=name,
        method=spelled(scaling.config.to_dict()),
        skips=tuple(skip.ends for skip in plan),
        coefficients=tuple(values),
        parameters=sum(size for size, _ in sizes),
        trainable=sum(size for size, trains in sizes if trains),
        folded=tuple(sorted(host.folded)),
        norms=scaling.own_norms(),
    )


def _require_unscaled(host: Host) -> None:
    if host.is_scaled:
        assert host.scaling is not None
        raise AlreadyScaledError(
            f"the long skips of this {type(host.model).__name__} are scaled already ({host.scaling.config}); call "
            f"unscale_(model) first"
        )
    if host.scaling is None and isinstance(host.model, nn.Module) and has_scaling(host.model):
        raise AlreadyScaledError(
            f"a part of this {type(host.model).__name__} is scaled already; call unscale_ on it first"
        )


def _warn_if_not_optimised(host: nn.Module, scaling: SkipScaling) -> None:
    """An optimiser that was made before the gates does not train them."""
    gates = {id(parameter) for parameter in scaling.parameters()}
    if not gates:
        return
    own = {id(parameter) for parameter in host.parameters()} - gates
    for optimizer in [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]:
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if trained & own and not trained & gates:
            warnings.warn(
                f"a {type(optimizer).__name__} that was made before the gates of the long skips does not train them: "
                f'call optimizer.add_param_group({{"params": scalelong.scaling_of(model).parameters()}}), or scale the '
                f"model first",
                FrozenGatesWarning,
                stacklevel=3,
            )
            return


def _warn_if_cancelled(plan: SkipPlan, scaling: SkipScaling) -> None:
    """A norm right after the merge divides a constant out again."""
    scaled = [
        skip
        for skip in plan
        if (factors := scaling.constants(skip.index)) is not None
        and factors.skip != 1.0
        and not acts_after_norm(skip, scaling)
    ]
    cancelled = sum(skip.readers.cancelled for skip in scaled) / max(len(scaled), 1)
    if cancelled > 0.5:
        only = " Only the shortcut convolutions still see it." if all(skip.readers.bypass for skip in scaled) else ""
        warnings.warn(
            f"{scaled[0].readers.norm} right after the merges of this {plan.model} cancels a constant scaling of "
            f"{cancelled:.0%} of the skips' channels: groups that hold the skip alone divide it out.{only} See "
            f'find_skips(model); "cs:behind_norms=true" scales after it, and a learnable scaling ("ls") is not '
            f"cancelled as a whole",
            CancelledScalingWarning,
            stacklevel=3,
        )
