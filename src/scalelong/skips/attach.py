"""Carry out a plan: put the scaling on a model, and take it off again."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import AlreadyScaledError, ScalingMismatchError, UnreachableSkipError
from ..scaling.base import SkipScaling
from .actions import Action, ArgumentHook, Gate, GateSlice, Multiply, MultiplySlices, OutputHook
from .plan import Attachment, LongSkip, SkipPlan
from .source import Spot, is_rewritten, require_restorable, require_same_source, restore_, rewrite_

REGISTERED = "skip_scaling"
_STATE = "_scalelong"


@dataclass
class Attached:
    """What a scaled model remembers."""

    plan: SkipPlan
    scaling: SkipScaling
    folded: set[int] = field(default_factory=set)
    """The skips whose constants are in the weights already."""


@dataclass(frozen=True)
class _Edit:
    """One operand of one merge, and what to do with it: multiply by a constant, or (None) what the method says."""

    skip: LongSkip
    attachment: Attachment
    factor: float | None


def attached(host: nn.Module) -> Attached | None:
    return host.__dict__.get(_STATE)


def attach_(host: nn.Module, state: Attached) -> None:
    """Add hooks for all skips that are not folded. A constant 1 needs none. Raises before anything is changed."""
    kept = [skip for skip in state.plan if skip.index not in state.folded]
    edits = [edit for skip in kept for edit in _edits(host, skip, state.scaling)]
    for edit in edits:
        _require_module(host, edit.attachment.module)
    learned = next(iter(state.scaling.state_dict()), None) is not None
    if learned and hasattr(host, REGISTERED):
        raise AlreadyScaledError(f"{type(host).__name__} has an attribute {REGISTERED!r} of its own: rename it first")
    try:
        _rewrite(host, [edit for edit in edits if edit.attachment.source is not None], state.scaling)
        _add_hooks(host, [edit for edit in edits if edit.attachment.source is None], state.scaling)
    except Exception:
        _strip(host)
        raise
    if learned:
        anchor = next(host.parameters(), None)
        scaling = state.scaling if anchor is None else state.scaling.to(anchor.device)
        host.add_module(REGISTERED, scaling.train(host.training))
    host.__dict__[_STATE] = state
    forget_compiled()


def detach_(host: nn.Module) -> Attached:
    """Take all hooks off. The model computes what it did before, bit for bit."""
    _strip(host)
    state: Attached = host.__dict__.pop(_STATE)
    if host._modules.get(REGISTERED) is state.scaling:
        del host._modules[REGISTERED]
    forget_compiled()
    return state


@contextmanager
def paused(host: nn.Module) -> Iterator[None]:
    """The model without its scaling, if it has any."""
    state = detach_(host) if attached(host) is not None else None
    try:
        yield
    finally:
        if state is not None:
            attach_(host, state)


def has_scaling(model: nn.Module) -> bool:
    """Whether any part of the model carries our hooks."""
    return any(
        _STATE in module.__dict__
        or is_rewritten(module)
        or any(isinstance(hook, ArgumentHook) for hook in module._forward_pre_hooks.values())
        or any(isinstance(hook, OutputHook) for hook in module._forward_hooks.values())
        for module in model.modules()
    )


def forget_compiled() -> None:
    """A model that was compiled and run before would go on without looking at new hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def acts_behind_norm(skip: LongSkip, scaling: SkipScaling) -> bool:
    """Whether the skip is scaled where the layers behind a normalisation read it."""
    return bool(skip.norm) and getattr(scaling.config, "behind_norms", False)


def _edits(host: nn.Module, skip: LongSkip, scaling: SkipScaling) -> Iterator[_Edit]:
    constants = scaling.constants(skip.index)
    if constants is not None and constants.skip != 1.0 and acts_behind_norm(skip, scaling):
        yield from _edits_behind_norm(host, skip, constants.skip)
        return
    wanted: list[tuple[str, Attachment | None, float | None]] = [("skip", skip.attachment, None)]
    if constants is not None:
        factors = (("skip", skip.attachment, constants.skip), ("main path", skip.main, constants.main))
        wanted = [entry for entry in factors if entry[2] != 1.0]
    for operand, attachment, factor in wanted:
        if attachment is None:
            reason = skip.obstacle or "it is neither argument nor result of a module, nor can its merge be rewritten"
            raise UnreachableSkipError(
                f"the {operand} of long skip {skip.index} ({skip.producer} to {skip.consumer or 'the model'}, merged "
                f"at {skip.location}) cannot be scaled: {reason}. Do that merge in a module of its own, called once "
                f"per forward, or leave this skip out with exclude={skip.location!r}"
            )
        yield _Edit(skip, attachment, factor)


def _edits_behind_norm(host: nn.Module, skip: LongSkip, factor: float) -> Iterator[_Edit]:
    if not skip.beyond:
        raise UnreachableSkipError(
            f"long skip {skip.index} ({skip.producer} to {skip.consumer or 'the model'}, merged at {skip.location}) "
            f"cannot be scaled behind its {skip.norm}: other operations than convolutions, norms and activations read "
            f"it. Use behind_norms=False, or leave this skip out with exclude={skip.location!r}"
        )
    for target in skip.beyond:
        _require_module(host, target.module)
        layer: Any = host.get_submodule(target.module)
        place = Attachment(
            kind="concat argument",
            module=target.module,
            path=(0, 0),
            start=target.start,
            length=target.length,
            channels=layer.in_channels,
        )
        yield _Edit(skip, place, factor)


def _require_module(host: nn.Module, name: str) -> None:
    try:
        host.get_submodule(name)
    except AttributeError as error:
        raise ScalingMismatchError(f"the plan is for another model: {type(host).__name__} has no {name!r}") from error


def _add_hooks(host: nn.Module, edits: list[_Edit], scaling: SkipScaling) -> None:
    places: defaultdict[tuple[str, str, tuple[int | str, ...]], list[_Edit]] = defaultdict(list)
    for edit in edits:
        side = "argument" if edit.attachment.kind.endswith("argument") else "output"
        places[side, edit.attachment.module, edit.attachment.path].append(edit)
    hooks: dict[tuple[str, str], ArgumentHook | OutputHook] = {}
    for (side, name, path), same in places.items():
        if (side, name) not in hooks:
            hooks[side, name] = ArgumentHook() if side == "argument" else OutputHook()
        hooks[side, name].edits.append((path, _action(same, scaling)))
    for (_, name), hook in hooks.items():
        module = host.get_submodule(name)
        if isinstance(hook, ArgumentHook):
            module.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            module.register_forward_hook(hook)


def _rewrite(host: nn.Module, edits: list[_Edit], scaling: SkipScaling) -> None:
    places: defaultdict[str, defaultdict[str, defaultdict[Spot, list[_Edit]]]]
    places = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for edit in edits:
        source = edit.attachment.source
        assert source is not None
        require_same_source(host.get_submodule(edit.attachment.module), source.method, source.digest)
        places[edit.attachment.module][source.method][source.position, source.operand].append(edit)
    for name, methods in places.items():
        spots = {method: tuple(found) for method, found in methods.items()}
        actions = {
            method: [_by_execution(same, scaling) for same in found.values()] for method, found in methods.items()
        }
        rewrite_(host.get_submodule(name), spots, actions)


def _by_execution(edits: list[_Edit], scaling: SkipScaling) -> list[Action | None]:
    executions: defaultdict[int, list[_Edit]] = defaultdict(list)
    total = 0
    for edit in edits:
        assert edit.attachment.source is not None
        executions[edit.attachment.source.execution].append(edit)
        total = edit.attachment.source.executions
    return [_action(executions[n], scaling) if n in executions else None for n in range(total)]


def _action(edits: list[_Edit], scaling: SkipScaling) -> Action:
    """One action for all edits of one tensor: the two operands of a concatenation share a multiplication."""
    place, skip, factor = edits[0].attachment, edits[0].skip, edits[0].factor
    label = f"long skip {skip.index} ({skip.producer or 'the model'} to {skip.consumer or 'the model'})"
    is_slice = place.length < place.channels
    if factor is None:
        if is_slice:
            return GateSlice(label, place.axis, place.channels, place.start, place.length, scaling, skip.index)
        return Gate(label, place.axis, place.channels, scaling, skip.index)
    if not is_slice:
        return Multiply(label, place.axis, place.channels, factor)
    factors = [(edit.attachment.start, edit.attachment.length, edit.factor or 0.0) for edit in edits]
    return MultiplySlices(label, place.axis, place.channels, factors)


def _strip(host: nn.Module) -> None:
    rewritten = [module for module in host.modules() if is_rewritten(module)]
    for module in rewritten:
        require_restorable(module)
    for module in rewritten:
        restore_(module)
    for module in host.modules():
        _remove(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, ArgumentHook)
        _remove(module._forward_hooks, module._forward_hooks_with_kwargs, OutputHook)


def _remove(hooks: dict[int, Any], with_kwargs: dict[int, bool], kind: type) -> None:
    for key in [key for key, hook in hooks.items() if isinstance(hook, kind)]:
        del hooks[key]
        with_kwargs.pop(key, None)
