"""Scale the long skips of a model in place, look at the coefficients, undo it, save it and load it."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    AlreadyScaledError,
    CancelledScalingWarning,
    NotScaledError,
    ScaleLongError,
    ScalingMismatchError,
    UnsupportedModelError,
)
from ..files import write_bytes
from ..scaling.base import Scaling, SkipScaling, as_scaling
from .attach import REGISTERED, Attached, acts_behind_norm
from .examples import ExampleInputs, example_call
from .find import Patterns, find_skips
from .fold import undo_compensation_
from .host import Host, has_scaled_part, host_of, is_scaled_host, require_scaled, scaled_host_of
from .plan import SkipPlan
from .verify import on_forward, verify_attached, verify_detached, with_batch_axes

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

    What the scaled model computes is verified on the example inputs, in evaluation and in training mode, and at the
    first forward with inputs of another kind (`scalelong.skips.verify`). A difference raises VerificationError, and the
    model is left as it was. `verify=False` leaves that out. In each forward it is checked that every skip was scaled.
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
    state = Attached(plan, scaling, verifier=on_forward if verify else None, inputs=call)
    host.attach(state)
    if verify and call is not None:
        try:
            verify_attached(host.model, state, call)
        except ScaleLongError:
            host.detach()
            raise
    _warn_if_cancelled(plan, scaling)
    return model


def unscale_(model: nn.Module, *, verify: bool = True) -> nn.Module:
    """Undo `scale_skips_`. The model computes what it did before, bit for bit. Returns the model.

    That is verified where the inputs of `scale_skips_` are still known; `verify=False` leaves it out.
    """
    host = require_scaled(model)
    undo_compensation_(host)
    with verify_detached(host, enabled=verify):
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
    return is_scaled_host(scaled_host_of(model))


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


# Save and load the scaling of a model alone: a safetensors file with configuration and plan in its header.

FORMAT = 2


def save_scaling(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the scaling of the model, learned gates included, without the model's own weights."""
    from safetensors.torch import save

    plan, scaling = plan_of(model), scaling_of(model)
    host = scaled_host_of(model)
    description = {
        "format": FORMAT,
        "scaling": scaling.config.to_dict(),
        "plan": plan.to_dict(),
        "folded": sorted(host.folded),
        "host": {"class": type(host.model).__name__, "weights": _weights(host.model)},
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in scaling.state_dict().items()}
    content = save(tensors, metadata={"scalelong": json.dumps(description)})
    write_bytes(path, content)


def load_scaling_(model: nn.Module, path: str | PathLike[str]) -> nn.Module:
    """Scale the model as the file says. A model that is not built like the saved one is refused."""
    description, tensors = _read(os.fspath(path))
    host = host_of(model)
    plan = SkipPlan.from_dict(description["plan"])
    own = host.plan() if host.is_native else None
    if own is not None:
        _compare_sites(plan, own)
    _compare_hosts(description["host"], {"class": type(host.model).__name__, "weights": _weights(host.model)})
    config = as_scaling(description["scaling"])
    _compare_tensors(tensors, config.build(plan.sites).state_dict())
    scale_skips_(model, config, plan=plan)
    scaling_of(model).load_state_dict(tensors)
    if description["folded"]:
        host.finish_folding(set(description["folded"]), kept=True)
    return model


def _read(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
        description = json.loads(metadata["scalelong"])
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
        raise ScalingMismatchError(f"{path} was not written by save_scaling: {error}") from error
    if description.get("format") != FORMAT:
        raise ScalingMismatchError(f"{path} has format {description.get('format')}, this version reads {FORMAT}")
    return description, tensors


def _weights(host: nn.Module) -> dict[str, list[int]]:
    """The structure of a model: its parameters and their shapes."""
    named = host.named_parameters()
    return {name: list(p.shape) for name, p in named if not name.startswith(f"{REGISTERED}.")}


def _compare_hosts(saved: dict[str, Any], found: dict[str, Any]) -> None:
    if saved["class"] != found["class"]:
        raise ScalingMismatchError(f"the file scales a {saved['class']}, this model is a {found['class']}")
    theirs, ours = saved["weights"], found["weights"]
    different = [
        f"{name} is {theirs.get(name, 'absent')} in the file and {ours.get(name, 'absent')} here"
        for name in dict.fromkeys((*theirs, *ours))
        if theirs.get(name) != ours.get(name)
    ]
    if different:
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        raise ScalingMismatchError(f"the file scales a model of another shape: {'; '.join(different[:3])}{more}")


def _compare_tensors(saved: dict[str, Any], built: dict[str, Any]) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in built.items()}
    if theirs != ours:
        raise ScalingMismatchError(f"the file's tensors {theirs} are not those of its scaling, {ours}")


def _compare_sites(saved: SkipPlan, found: SkipPlan) -> None:
    if len(saved) != len(found):
        raise ScalingMismatchError(f"the file scales {len(saved)} long skips and this model has {len(found)}")
    for theirs, ours in zip(saved.sites, found.sites, strict=True):
        old = asdict(theirs)
        if theirs != ours:
            different = {key: (old[key], value) for key, value in asdict(ours).items() if old[key] != value}
            raise ScalingMismatchError(f"long skip {ours.index} differs (in the file, in this model): {different}")
