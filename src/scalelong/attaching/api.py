"""Scale the long skips of a model in place, look at the coefficients, undo it."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..console import html_table
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
from .attach import Attached, acts_behind_norm, attached, follow_structure
from .fold import undo_compensation_
from .host import Host, has_scaled_part, host_of, is_scaled_host, require_scaled, scaled_host_of
from .record import class_name, spelled
from .reruns import remembered
from .verify import verify_attached, with_batch_axes

# Scale the long skips of a model in place, look at the coefficients, and undo it.


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
    if host.is_native:
        native = host.plan() if plan is None else plan
        assert native is not None
        host.attach(Attached(native, config.build(native.sites)))
        return model
    call = None
    if plan is None:
        plan = find_skips(model, example_inputs, include=include, exclude=exclude)
        call = example_call(host.model, example_inputs)
    elif example_inputs is not None:
        call = example_call(host.model, example_inputs)
    if config.looks_at_data and call is not None:
        plan = with_batch_axes(host, plan, call)
    scaling = config.build(plan.sites)
    if host.model is not model and next(scaling.parameters(), None) is not None and hasattr(model, "module"):
        raise UnsupportedModelError(
            f"a {type(model).__name__} does not know parameters that are added later: scale the long skips first, then "
            f"wrap the model"
        )
    state = Attached(plan, scaling, inputs=None if call is None else remembered(call))
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
    with require_scaled(model).paused():
        yield model


@torch.no_grad()
def coefficients(model: nn.Module, *inputs: Any, reduce: bool = True, **keywords: Any) -> list[Any]:
    """κ_1 ... κ_N, outermost first: of a forward with these inputs, or without inputs of the most recent forward.

    The forward with these inputs leaves the model and the random states as they were.

    Coefficients that depend on the data are averaged to one number each; `reduce=False` gives the tensors, which
    broadcast against the skips.
    """
    scaling = scaling_of(model)
    if not inputs and not keywords:
        return _coefficients(scaling, reduce)
    state = attached(scaled_host_of(model).model)
    if state is not None:
        follow_structure(scaled_host_of(model).model, state)  # the isolated run would undo it
        scaling = scaling_of(model)
    flags = [module.training for module in model.modules()]
    with isolated_run(model, scaling):
        for module, training in zip(model.modules(), flags, strict=True):
            module.training = training
        model(*inputs, **keywords)
        return _coefficients(scaling, reduce)


def _coefficients(scaling: SkipScaling, reduce: bool) -> list[Any]:
    values = [scaling.coefficient(site.index) for site in scaling.sites]
    if not reduce:
        return values
    return Coefficients(float(value.mean()) if isinstance(value, Tensor) else value for value in values)


class Coefficients(list[float]):
    """κ_1 ... κ_N: a list that prints four significant digits, and is a table in notebooks."""

    def __repr__(self) -> str:
        return f"[{', '.join(repr(float(f'{value:.4g}')) for value in self)}]"

    def _repr_html_(self) -> str:
        return html_table([{"i": index, "κ_i": value} for index, value in enumerate(self, start=1)])


def is_scaled(model: nn.Module) -> bool:
    """Whether the long skips of the model, or of a network inside it, are scaled."""
    try:
        return is_scaled_host(scaled_host_of(model))
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
    if not is_scaled_host(host):
        return ScalingSummary(name, None)
    scaling, plan = scaling_of(model), plan_of(model)
    values: list[float | None] = []
    for site in scaling.sites:
        try:
            kappa = scaling.coefficient(site.index)
        except NotScaledError:
            kappa = None
        values.append(float(kappa.mean()) if isinstance(kappa, Tensor) else kappa)
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
    if is_scaled_host(host):
        assert host.scaling is not None
        raise AlreadyScaledError(
            f"the long skips of this {type(host.model).__name__} are scaled already ({host.scaling.config}); call "
            f"unscale_(model) first"
        )
    if isinstance(host.model, nn.Module) and has_scaled_part(host):
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
    constants = {skip.index: scaling.constants(skip.index) for skip in plan}
    scaled = [
        skip
        for skip in plan
        if (factors := constants[skip.index]) is not None
        and factors.skip != 1.0
        and not acts_behind_norm(skip, scaling)
    ]
    cancelled = sum(skip.readers.cancelled for skip in scaled) / len(scaled) if scaled else 0.0
    if cancelled > 0.5:
        only = " Only the shortcut convolutions still see it." if all(skip.readers.bypass for skip in scaled) else ""
        warnings.warn(
            f"{scaled[0].readers.norm} right behind the merges of this {plan.model} cancels a constant scaling of "
            f"{cancelled:.0%} of the skips' channels: groups that hold the skip alone divide it out.{only} See "
            f'find_skips(model); "cs:behind_norms=true" scales behind it, and a learnable scaling ("ls") is not '
            f"cancelled as a whole",
            CancelledScalingWarning,
            stacklevel=3,
        )
