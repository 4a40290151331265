"""Carry out a plan: put the scaling on a model, and take it off again.

argument   a forward pre-hook changes a tensor among the arguments of a module
output     a forward hook changes a tensor in its result
rewrite    an expression in a function of the module is compiled again (rewriting.py)
merge      the model calls `scalelong.merge` (merging.py)
"""

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import (
    AlreadyScaledError,
    FrozenGatesWarning,
    ScalingMismatchError,
    SkipMismatchError,
    UnreachableSkipError,
    UnsupportedModelError,
)
from ..finding import STATE, Attachment, LongSkip
from ..scaling import NoScaling, SkipScaling
from .actions import (
    IN_WORDS,
    REWRITES,
    Action,
    ArgumentHook,
    Attached,
    Edit,
    ForwardCounter,
    Operand,
    OutputHook,
    Pass,
)
from .merging import EnterMerges, LeaveMerges, NamedMerges, enter_merges_
from .record import REGISTERED, erase_record_, write_record_
from .rewriting import Rewrites

Slots = list[tuple[int, Edit]]
"""Edits with their slots in the counter."""


def attached(host: nn.Module) -> Attached | None:
    return host.__dict__.get(STATE)


def attach_(host: nn.Module, state: Attached) -> None:
    """Scale all skips that are not folded. A constant 1 needs nothing. If it fails, nothing is changed."""
    kept = [skip for skip in state.plan if skip.index not in state.folded]
    state.edits = [edit for skip in kept for edit in _edits(host, skip, state.scaling)]
    learned = next(iter(state.scaling.state_dict()), None) is not None
    if learned and hasattr(host, REGISTERED):
        raise AlreadyScaledError(f"{type(host).__name__} has an attribute {REGISTERED!r} of its own: rename it first")
    state.structure = _structure(host, state.edits)
    repeats = 0 if any(skip.is_named for skip in state.plan) else state.plan.repeats
    state.counter = ForwardCounter([edit.label for edit in state.edits], repeats)
    try:
        _put_on(host, state)
    except Exception:
        _strip(host)
        raise
    if learned:
        anchor = next(host.parameters(), None)
        gates = state.registered or state.scaling
        host.add_module(REGISTERED, (gates if anchor is None else gates.to(anchor.device)).train(host.training))
        state.registered = None
    host.__dict__[STATE] = state
    if not isinstance(state.scaling.config, NoScaling):
        write_record_(host)
    forget_compiled(host)


def detach_(host: nn.Module) -> Attached:
    """Take all of it off. The model computes what it did before, bit for bit."""
    _strip(host)
    erase_record_(host)
    state: Attached = host.__dict__.pop(STATE)
    if active_scaling(host) is not None:
        state.registered = host._modules.pop(REGISTERED)
    forget_compiled(host)
    return state


def has_scaling(model: nn.Module) -> bool:
    """Whether any part of the model carries our hooks."""
    return any(
        STATE in module.__dict__ or REWRITES in module.__dict__ or any(True for _ in _own_hooks(module))
        for module in model.modules()
    )


def forget_compiled(model: nn.Module) -> None:
    """Compiled code does not look at new hooks. What was compiled of this model, or of its classes, is compiled again.

    The guards of compiled code name the classes of the modules in it by their ids.
    """
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None or not frames.input_codes.seen:
        return
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code

    modules = list(model.modules())
    own = {type(module) for module in modules if not type(module).__module__.startswith("torch.")}
    if not own or any(module._compiled_call_impl is not None for module in modules):
        own = {type(module) for module in modules}
    names = [str(id(cls)) for cls in own]
    for code in filter(None, [seen() for seen in frames.input_codes.seen]):
        guards = "".join(str(entry.guard_manager) for entry in _debug_get_cache_entry_list(code))
        if any(name in guards for name in names):
            reset_code(code)


def acts_after_norm(skip: LongSkip, scaling: SkipScaling) -> bool:
    """Whether the skip is scaled where the layers after a normalisation read it."""
    return bool(skip.readers.norm) and getattr(scaling.config, "behind_norms", False)


def operand(value: Any, place: Attachment) -> Tensor | None:
    """The operand among arguments or in a result; None if the module is not called as it was planned."""
    try:
        for step in place.path:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return None
    if not isinstance(value, Tensor) or value.dim() <= place.axis or value.shape[place.axis] != place.channels:
        return None
    return value.narrow(place.axis, place.start, place.length) if place.is_slice else value


def weights_reading(layer: Any, start: int, length: int) -> list[Tensor]:
    """The weights of a layer that multiply these input channels, as views."""
    weight: Tensor = layer.weight
    if isinstance(layer, nn.Linear):
        return [weight[:, start : start + length]]
    if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return [weight[start : start + length]]
    # A grouped convolution sees in each group only its own share of the input channels.
    inside, rows = weight.shape[1], weight.shape[0] // layer.groups
    views = []
    for group in range(layer.groups):
        first, last = max(start - group * inside, 0), min(start + length - group * inside, inside)
        if first < last:
            views.append(weight[group * rows : (group + 1) * rows, first:last])
    return views


# What has to be done for a skip.


def _edits(host: nn.Module, skip: LongSkip, scaling: SkipScaling) -> Iterator[Edit]:
    constants = scaling.constants(skip.index)
    if constants is not None and constants.skip != 1.0 and acts_after_norm(skip, scaling):
        yield from _edits_after_norm(host, skip, constants.skip)
        return
    for operand, factor in _wanted(scaling, skip.index):
        places = {"skip": skip.places.skip, "main": skip.places.main, "merged": skip.places.merged}
        # A constant commutes with crops, pads and factors of the model. A method that looks at the data does not.
        place = skip.places.exact or skip.places.skip if operand == "skip" and factor is None else places[operand]
        if place is None:
            reason = skip.places.obstacle or "it is not given to a module or by one, nor can its merge be rewritten"
            raise UnreachableSkipError(
                f"{IN_WORDS[operand]}long skip {skip.index} ({skip.ends}, merged at {skip.merge.location}) cannot be "
                f"scaled: {reason}. Do that merge in a module of its own, called once per forward, or leave this skip "
                f"out with exclude={skip.merge.location!r}"
            )
        axis = skip.site.channel_axis
        if factor is None and operand != "skip" and place.axis != axis % len(skip.shape):
            raise UnreachableSkipError(
                f"{IN_WORDS[operand]}long skip {skip.index} ({skip.ends}) has its channels on axis {place.axis} where "
                f"it can be scaled ({place}), and the skip on axis {axis}: {type(scaling.config).__name__} cannot be "
                f"used there"
            )
        _module(host, place.module)
        yield Edit(skip, place, factor, operand)


def _wanted(scaling: SkipScaling, index: int) -> list[tuple[Operand, float | None]]:
    """The operands of merge i that are changed, each with its factor."""
    constants = scaling.constants(index)
    if constants is not None:
        factors: list[tuple[Operand, float | None]] = [("skip", constants.skip), ("main", constants.main)]
        return [(operand, factor) for operand, factor in factors if factor != 1.0]
    if scaling.scales_merged:
        return [("merged", None)]
    changed: list[tuple[Operand, bool]] = [("skip", scaling.scales_skip(index)), ("main", scaling.scales_main(index))]
    return [(operand, None) for operand, is_changed in changed if is_changed]


def _edits_after_norm(host: nn.Module, skip: LongSkip, factor: float) -> Iterator[Edit]:
    if not skip.readers.behind_norm:
        raise UnreachableSkipError(
            f"long skip {skip.index} ({skip.ends}, merged at {skip.merge.location}) cannot be scaled after its "
            f"{skip.readers.norm}: other operations than convolutions, norms and activations read it. Use "
            f"behind_norms=False, or leave this skip out with exclude={skip.merge.location!r}"
        )
    for target in skip.readers.behind_norm:
        layer: Any = _module(host, target.module)
        layer = getattr(layer, "base_layer", layer)  # inside an adapter of PEFT
        linear = isinstance(layer, nn.Linear)
        place = Attachment(
            kind="concat argument",
            module=target.module,
            path=(0, 0),
            axis=-1 if linear else 1,
            start=target.start,
            length=target.length,
            channels=layer.in_features if linear else layer.in_channels,
        )
        yield Edit(skip, place, factor, after_norm=True)


def _module(host: nn.Module, name: str) -> nn.Module:
    try:
        return host.get_submodule(name)
    except AttributeError as error:
        raise ScalingMismatchError(
            f"the plan belongs to a different model: {type(host).__name__} has no {name!r}"
        ) from error


def _structure(host: nn.Module, edits: list[Edit]) -> list[tuple[nn.Module, str, nn.Module]]:
    """All modules on the way to those that are changed, as far as they are there."""
    found: dict[tuple[int, str], tuple[nn.Module, str, nn.Module]] = {}
    for name in dict.fromkeys(edit.attachment.module for edit in edits):
        parent = host
        for part in name.split(".") if name else ():
            child = parent._modules.get(part)
            if child is None:
                break
            found[id(parent), part] = (parent, part, child)
            parent = child
    return list(found.values())


# On and off.


def _put_on(host: nn.Module, state: Attached) -> None:
    hooks: defaultdict[tuple[str, str], defaultdict[Any, Slots]] = defaultdict(lambda: defaultdict(list))
    rewrites: defaultdict[str, Slots] = defaultdict(list)
    named: Slots = []
    for slot, edit in enumerate(state.edits):
        place = edit.attachment
        if place.side:
            hooks[place.module, place.side][place.path].append((slot, edit))
        elif place.kind == "rewrite":
            rewrites[place.module].append((slot, edit))
        elif place.kind == "merge":
            named.append((slot, edit))
        else:
            raise UnreachableSkipError(
                f"a plan with the place {place.kind!r} cannot be carried out on a different model"
            )
    for (name, side), paths in hooks.items():
        hook = ArgumentHook(state) if side == "argument" else OutputHook(state)
        hook.edits = [(path, Action(same, state)) for path, same in paths.items()]
        _register(host.get_submodule(name), hook)
    for name, same in rewrites.items():
        module = host.get_submodule(name)
        Rewrites(module, _by_function(same, state), state.counter).put_on(module)
    if named:
        actions: dict[tuple[int, str], Action] = {
            (edit.skip.index, edit.operand): Action([(slot, edit)], state) for slot, edit in named
        }
        enter_merges_(host, NamedMerges(actions, state.counter), {skip.merge.module for skip in state.plan})
    if state.edits:
        host.register_forward_pre_hook(EnterHook(state), prepend=True)
        host.register_forward_hook(LeaveHook(state))


def _register(module: nn.Module, hook: ArgumentHook) -> None:
    if isinstance(hook, OutputHook):
        module.register_forward_hook(hook)
    else:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _by_function(edits: Slots, state: Attached) -> dict[Any, dict[Any, list[Action | Pass]]]:
    """The actions of one module's rewritten functions: by function, expression, and execution of the expression."""
    places: defaultdict[tuple[Any, Any], defaultdict[int, Slots]] = defaultdict(lambda: defaultdict(list))
    runs: dict[tuple[Any, Any], tuple[int, int]] = {}
    for slot, edit in edits:
        source = edit.attachment.source
        assert source is not None
        place = (source.method, source.owner, source.digest), (source.position, source.operand)
        places[place][source.execution].append((slot, edit))
        runs[place] = (source.executions, source.line)
    found: defaultdict[Any, dict[Any, list[Action | Pass]]] = defaultdict(dict)
    for (function, site), same in places.items():
        total, line = runs[function, site]
        skipped = f"the merge in line {line} (its execution {{}} of {total}, which is not scaled)"
        found[function][site] = [
            Action(same[n], state) if n in same else Pass(skipped.format(n + 1), state.counter) for n in range(total)
        ]
    return found


def _strip(host: nn.Module) -> None:
    for module in host.modules():
        if REWRITES in module.__dict__:
            module.__dict__[REWRITES].take_off(module)
        for hooks, with_kwargs, key in list(_own_hooks(module)):
            del hooks[key]
            with_kwargs.pop(key, None)
        # Code that clears the hooks of a module leaves their flags.
        for key in module._forward_pre_hooks_with_kwargs.keys() - module._forward_pre_hooks.keys():
            del module._forward_pre_hooks_with_kwargs[key]


def _own_hooks(module: nn.Module) -> Iterator[tuple[dict[int, Any], dict[int, bool], int]]:
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, hook in hooks.items():
            if isinstance(hook, ArgumentHook | EnterHook | LeaveHook | EnterMerges | LeaveMerges):
                yield hooks, with_kwargs, key


# The forward of the model as a whole.


class EnterHook:
    """A forward pre-hook of the model: begins to count."""

    def __init__(self, state: Attached) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        gates = None
        if not torch.compiler.is_compiling() and not self.state.counter.mode.is_off:
            if getattr(module, "_is_replica", False):
                gates = _gates_of_replica(module, self.state)
            else:
                follow_structure(module, self.state)
        self.state.counter.begin(gates)


class LeaveHook:
    """A forward hook of the model: all edits must have acted."""

    def __init__(self, state: Attached) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        self.state.counter.end()


def _gates_of_replica(replica: nn.Module, state: Attached) -> SkipScaling | None:
    """torch.nn.DataParallel copies the model for each device. Its hooks are those of the original."""
    if any(edit.attachment.source is not None for edit in state.edits):
        raise UnsupportedModelError(
            "a merge of this model is rewritten, and replicas of torch.nn.DataParallel would run the rewritten "
            "function with the weights of the original model. Use DistributedDataParallel"
        )
    return active_scaling(replica)


def follow_structure(host: nn.Module, state: Attached) -> None:
    """Adapters put modules in the place of those that are scaled. Other exchanges are refused."""
    scaling = active_scaling(host)
    if scaling is not None and scaling is not state.scaling:
        state.scaling = scaling
    if not state.adapted and "peft_config" in vars(host):
        state.adapted = True
        _warn_if_frozen(host, state.scaling)
    changed = [
        (before, now) for parent, name, before in state.structure if (now := parent._modules.get(name)) is not before
    ]
    if not changed:
        return
    for before, now in changed:
        if now is not None and (_inner(now) is before or _inner(before) is now):
            # An adapter reads what its layer reads, and adds to what it gives: scale the two of them as one.
            for hooks, with_kwargs, key in list(_own_hooks(before)):
                if isinstance(hooks[key], ArgumentHook):
                    _register(now, hooks.pop(key))
                    with_kwargs.pop(key, None)
        elif now is None or not _is_wrapper_of_torch(now, before):
            raise SkipMismatchError(
                f"modules of this {type(host).__name__} that are scaled were replaced or reordered: unscale_ the model "
                f"and scale it again"
            )
    state.structure = _structure(host, state.edits)


def active_scaling(host: nn.Module) -> SkipScaling | None:
    """The gates that are registered on the model. With modules_to_save, PEFT trains a copy of them for each adapter."""
    found: Any = host._modules.get(REGISTERED)
    if hasattr(found, "modules_to_save"):
        active = [name for name in found.active_adapters if name in found.modules_to_save]
        found = found.modules_to_save[active[0]] if active and not found.disable_adapters else found.original_module
    return found if isinstance(found, SkipScaling) else None


def _warn_if_frozen(host: nn.Module, scaling: SkipScaling) -> None:
    gates = list(scaling.parameters())
    trains = any(parameter.requires_grad for parameter in host.parameters())
    if gates and trains and not any(parameter.requires_grad for parameter in gates):
        warnings.warn(
            f"PEFT has frozen the learned gates of the long skips, as all weights of the base model. To train and save "
            f'them with the adapter, pass modules_to_save=["{REGISTERED}"] to its configuration',
            FrozenGatesWarning,
            stacklevel=2,
        )


def _inner(module: nn.Module) -> Any:
    """The layer inside an adapter of PEFT."""
    return getattr(module, "base_layer", None)


def _is_wrapper_of_torch(one: nn.Module, other: nn.Module) -> bool:
    """torch.compile, FSDP and activation checkpointing call the module that they hold, with its hooks."""
    return type(one).__module__.startswith(("torch._dynamo", "torch.distributed")) and other in one.modules()
