"""Scale the long skips of a model in place, look at the coefficients, and undo it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    AlreadyScaledError,
    CancelledScalingWarning,
    InvalidConfigError,
    NotScaledError,
    UnsupportedModelError,
)
from ..scaling.base import Scaling, SkipScaling, as_scaling
from ..scaling.constant import NoScaling
from .attach import Attached, acts_behind_norm, attach_, attached, detach_, forget_compiled, has_scaling
from .examples import ExampleInputs
from .find import Patterns, find_skips
from .host import SkipHost, unwrap
from .plan import SkipPlan


def scale_skips_(
    model: nn.Module,
    config: Scaling | str | dict[str, Any],
    example_inputs: ExampleInputs = None,
    *,
    plan: SkipPlan | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> nn.Module:
    """Scale the long skips of the model, in place. All weights stay as they are. Returns the model.

    The long skips are found by `find_skips(model, example_inputs, include=..., exclude=...)`, or given as a `plan`.
    A model that is scaled already raises AlreadyScaledError: `unscale_` it first.
    """
    config = as_scaling(config)
    host = unwrap(model)
    if is_scaled(model):
        raise AlreadyScaledError(
            f"the long skips of this {type(host).__name__} are scaled already ({scaling_of(model).config}); call "
            f"unscale_(model) first"
        )
    if isinstance(host, nn.Module) and attached(host) is None and has_scaling(host):
        raise AlreadyScaledError(f"a part of this {type(host).__name__} is scaled already; call unscale_ on it first")
    if isinstance(host, SkipHost):
        if plan is not None and plan.sites != host.skip_sites():
            raise InvalidConfigError(f"the plan is for another model than this {type(host).__name__}")
        _set_native(host, config.build(host.skip_sites()))
        return model
    if plan is None:
        plan = find_skips(model, example_inputs, include=include, exclude=exclude)
    scaling = config.build(plan.sites)
    if host is not model and next(scaling.parameters(), None) is not None and hasattr(model, "module"):
        raise UnsupportedModelError(
            f"a {type(model).__name__} does not know parameters that are added later: scale the long skips first, then "
            f"wrap the model"
        )
    if attached(host) is not None:
        detach_(host)
    attach_(host, Attached(plan, scaling))
    _warn_if_cancelled(plan, scaling)
    return model


def unscale_(model: nn.Module) -> nn.Module:
    """Undo `scale_skips_`. The model computes what it did before, bit for bit. Returns the model."""
    from .fold import undo_compensation_

    host = _scaled_host(model)
    undo_compensation_(host)
    if isinstance(host, SkipHost):
        _set_native(host, NoScaling().build(host.skip_sites()))
    else:
        detach_(host)
    return model


@contextmanager
def unscaled(model: nn.Module) -> Iterator[nn.Module]:
    """The model as if it had never been scaled, within a `with` block."""
    host = _scaled_host(model)
    if isinstance(host, SkipHost):
        scaling = host.skip_scaling
        _set_native(host, NoScaling().build(host.skip_sites()))
        try:
            yield model
        finally:
            _set_native(host, scaling)
        return
    state = detach_(host)
    try:
        yield model
    finally:
        attach_(host, state)


@torch.no_grad()
def coefficients(model: nn.Module, *inputs: Any, reduce: bool = True, **keywords: Any) -> list[Any]:
    """κ_1 ... κ_N, outermost first: of a forward with these inputs, or without inputs of the most recent forward.

    Coefficients that depend on the data are averaged to one number each; `reduce=False` gives the tensors, which
    broadcast against the skips.
    """
    scaling = scaling_of(model)
    if inputs or keywords:
        model(*inputs, **keywords)
    values = [scaling.coefficient(site.index) for site in scaling.sites]
    if not reduce:
        return values
    return [float(value.mean()) if isinstance(value, Tensor) else value for value in values]


def is_scaled(model: nn.Module) -> bool:
    host = unwrap(model)
    if isinstance(host, SkipHost):
        return not isinstance(host.skip_scaling.config, NoScaling)
    state = attached(host) if isinstance(host, nn.Module) else None
    return state is not None and not isinstance(state.scaling.config, NoScaling)


def scaling_of(model: nn.Module) -> SkipScaling:
    """The module that scales the long skips of the model."""
    host = unwrap(model)
    if isinstance(host, SkipHost):
        return host.skip_scaling
    state = attached(host)
    if state is None:
        raise NotScaledError(f"the long skips of this {type(host).__name__} are not scaled")
    return state.scaling


def plan_of(model: nn.Module) -> SkipPlan:
    """The plan by which the model is scaled."""
    host = _scaled_host(model)
    state = attached(host)
    return state.plan if state is not None else find_skips(host)


def _scaled_host(model: nn.Module) -> Any:
    host = unwrap(model)
    if not is_scaled(model):
        raise NotScaledError(f"the long skips of this {type(host).__name__} are not scaled")
    return host


def _set_native(host: SkipHost, scaling: SkipScaling) -> None:
    if isinstance(host, nn.Module):
        anchor = next(host.parameters(), None)
        host.skip_scaling = scaling.to(anchor.device).train(host.training) if anchor is not None else scaling
    forget_compiled()


def _warn_if_cancelled(plan: SkipPlan, scaling: SkipScaling) -> None:
    constants = {skip.index: scaling.constants(skip.index) for skip in plan}
    scaled = [
        skip
        for skip in plan
        if (factors := constants[skip.index]) is not None
        and factors.skip != 1.0
        and not acts_behind_norm(skip, scaling)
    ]
    cancelled = sum(skip.cancelled for skip in scaled) / len(scaled) if scaled else 0.0
    if cancelled > 0.5:
        only = " Only the shortcut convolutions still see it." if all(skip.bypass for skip in scaled) else ""
        warnings.warn(
            f"{scaled[0].norm} right behind the merges of this {plan.model} cancels a constant scaling of "
            f"{cancelled:.0%} of the skips' channels: groups that hold the skip alone divide it out.{only} See "
            f'find_skips(model); "cs:behind_norms=true" scales behind it, and a learnable scaling ("ls") is not '
            f"cancelled as a whole",
            CancelledScalingWarning,
            stacklevel=3,
        )
