"""Carry out a plan: put the scaling on a model, and take it off again. One class for each kind of place.

    Argument   a forward pre-hook changes a tensor among the arguments of a module
    Output     a forward hook changes a tensor in its result
    Rewrite    an expression in a function of the module is compiled again

Each of them takes an operand of the merge as a whole, or as a slice of the concatenation.
"""

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

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
from ..finding import STATE, Attachment, EditSite, LongSkip, SkipPlan, find_function
from ..scaling import Constants, NoScaling, SkipScaling
from .actions import (
    OFF,
    Action,
    ArgumentHook,
    ForwardCounter,
    Gate,
    GateSlices,
    Multiply,
    MultiplySlices,
    OrderHook,
    OutputHook,
    Pass,
    ScaleMerged,
    ScalingSwitch,
)
from .invocations import REWRITES
from .record import describe, erase_record_, spelled, write_record_
from .rewriting import is_rewritten, restore_, rewrite_

REGISTERED = "skip_scaling"
_SCRIPT = "__prepare_scriptable__"
"""What torch.jit.script calls first, if a module has it."""
_REPR = "extra_repr"
"""What torch adds to the text of a module."""


@dataclass
class Attached:
    """What a scaled model remembers."""

    plan: SkipPlan
    scaling: SkipScaling
    folded: set[int] = field(default_factory=set)
    """The skips whose constants are in the weights already."""
    adapted: bool = False
    """Whether PEFT was seen on the model."""
    inputs: Any = None
    """What inputs to verify with look like (`reruns.remembered`). Pickles leave them out."""
    switch: ScalingSwitch = field(default_factory=ScalingSwitch)
    counter: ForwardCounter = field(init=False)
    edits: "list[Edit]" = field(default_factory=list)
    """What was changed, in the order of the slots of the counter."""
    registered: nn.Module | None = None
    """While it is detached: what stood for the gates in the model, which PEFT may have wrapped or copied."""
    structure: "list[tuple[nn.Module, str, nn.Module]]" = field(default_factory=list)
    """The modules that were changed and those around them: (parent, name, child)."""

    def __post_init__(self) -> None:
        self.counter = ForwardCounter((), 1, self.switch)

    def description(self) -> dict[str, Any]:
        """For the state dict of the model."""
        return describe(self.scaling, self.plan, self.folded)

    @contextmanager
    def paused(self, host: nn.Module) -> Iterator[None]:
        """The model without its scaling. Rewritten methods are taken off, so that the source of the model is seen."""
        rewritten = [m for m in host.modules() if is_rewritten(m)]
        places = [(module, module.__dict__[REWRITES]) for module in rewritten]
        for module in rewritten:
            restore_(module)
        try:
            with self.switch.set_to(OFF):
                yield
        finally:
            for module, rewrites in places:
                module.__dict__.update({**rewrites.installed, REWRITES: rewrites})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": None}


Operand = Literal["skip", "main", "merged"]
"""What is changed: one operand of the merge, or the concatenation of both."""
_IN_WORDS: dict[Operand, str] = {"skip": "", "main": "the main path of ", "merged": "the concatenation of "}


@dataclass(frozen=True)
class Edit:
    """One operand of one merge, and what to do with it: multiply by a constant, or (None) what the method says."""

    skip: LongSkip
    attachment: Attachment
    factor: float | None
    operand: Operand = "skip"
    behind_norm: bool = False

    @property
    def main(self) -> bool:
        return self.operand == "main"

    @property
    def label(self) -> str:
        return f"{_IN_WORDS[self.operand]}long skip {self.skip.index} ({self.skip.ends})"


def attached(host: nn.Module) -> Attached | None:
    return host.__dict__.get(STATE)


def attach_(host: nn.Module, state: Attached) -> None:
    """Scale all skips that are not folded. A constant 1 needs nothing. Raises before anything is changed."""
    kept = [skip for skip in state.plan if skip.index not in state.folded]
    edits = [edit for skip in kept for edit in _edits(host, skip, state.scaling)]
    for edit in edits:
        require_module(host, edit.attachment.module)
    learned = next(iter(state.scaling.state_dict()), None) is not None
    if learned and hasattr(host, REGISTERED):
        raise AlreadyScaledError(f"{type(host).__name__} has an attribute {REGISTERED!r} of its own: rename it first")
    state.edits = edits
    state.structure = structure_of(host, edits)
    state.counter = ForwardCounter([edit.label for edit in edits], state.plan.repeats, state.switch)
    try:
        for kind in dict.fromkeys(kind_of(edit.attachment) for edit in edits):
            same = [(slot, edit) for slot, edit in enumerate(edits) if kind_of(edit.attachment) is kind]
            kind.attach(host, same, state)
        if edits:
            host.register_forward_pre_hook(EnterHook(state), prepend=True, with_kwargs=True)
            host.register_forward_hook(LeaveHook(state.counter))
    except Exception:
        _strip(host)
        raise
    if learned:
        anchor = next(host.parameters(), None)
        gates = state.registered or state.scaling
        host.add_module(REGISTERED, (gates if anchor is None else gates.to(anchor.device)).train(host.training))
        state.registered = None
    host.__dict__[STATE] = state
    host.__dict__[_SCRIPT] = refuse_script
    if not isinstance(state.scaling.config, NoScaling):
        write_record_(host, state)
        said = f"(long skips): {len(state.plan)} scaled by {spelled(state.scaling.config.to_dict())}"
        host.__dict__.setdefault(_REPR, SaysScaled(said, type(host).extra_repr(host)))
    reset_compiler()


def detach_(host: nn.Module) -> Attached:
    """Take all of it off. The model computes what it did before, bit for bit."""
    _strip(host)
    erase_record_(host)
    host.__dict__.pop(_SCRIPT, None)
    if isinstance(host.__dict__.get(_REPR), SaysScaled):
        del host.__dict__[_REPR]
    state: Attached = host.__dict__.pop(STATE)
    if active_scaling(host) is not None:
        state.registered = host._modules.pop(REGISTERED)
    reset_compiler()
    return state


class SaysScaled:
    """The `extra_repr` of a scaled model: whoever prints it reads how it is scaled."""

    def __init__(self, said: str, before: str) -> None:
        self.text = "\n".join(filter(None, (before, said)))

    def __call__(self) -> str:
        return self.text


def refuse_script() -> None:
    """torch.jit.script reads the source of a model, and fails somewhere in our hooks."""
    raise UnsupportedModelError(
        "torch.jit.script cannot read the hooks of a model with scaled long skips. Call scalelong.fold_(model) first: "
        "constant coefficients go into the weights, and where all of them do, nothing is attached any more. Otherwise "
        "use torch.export.export, or torch.jit.trace with check_trace=False"
    )


def has_scaling(model: nn.Module) -> bool:
    """Whether any part of the model carries our hooks."""
    return any(
        STATE in module.__dict__ or is_rewritten(module) or any(True for _ in _own_hooks(module))
        for module in model.modules()
    )


def reset_compiler() -> None:
    """Compiled code does not look at new hooks, and which of it runs the model is not known: all is compiled again.

    Nothing happens where nothing was compiled since the last time.
    """
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.input_codes.seen:
        torch.compiler.reset()


def acts_behind_norm(skip: LongSkip, scaling: SkipScaling) -> bool:
    """Whether the skip is scaled where the layers behind a normalisation read it."""
    return bool(skip.readers.norm) and getattr(scaling.config, "behind_norms", False)


# The forward of the model as a whole.


class EnterHook:
    """A forward pre-hook of the model: begins to count."""

    def __init__(self, state: Attached) -> None:
        self.state = state

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if not torch.compiler.is_compiling() and not self.state.switch.mode.is_off:
            follow_structure(module, self.state)
        self.state.counter.begin()


def follow_structure(host: nn.Module, state: Attached) -> None:
    """Adapters put modules in the place of those that are scaled. Other exchanges are refused."""
    if getattr(host, "_is_replica", False):
        # A copy of the model for another device. Its hooks are those of the original, and so are their gates.
        if next(state.scaling.parameters(), None) is not None:
            raise UnsupportedModelError(
                "replicas of torch.nn.DataParallel would use the gates of the original model, on its device. Use "
                "DistributedDataParallel for learned scalings; constant ones work with both"
            )
        return
    scaling = active_scaling(host)
    if scaling is not None and scaling is not state.scaling:
        state.scaling = scaling
    if not state.adapted and "peft_config" in vars(host):
        state.adapted = True
        if any(parameter.requires_grad for parameter in host.parameters()):
            _warn_if_frozen(state.scaling)
    changed = [
        (before, now) for parent, name, before in state.structure if (now := parent._modules.get(name)) is not before
    ]
    if not changed:
        return
    for before, now in changed:
        if now is not None and _is_around(now, before):
            _move_hooks(before, now)
        elif now is None or not _is_wrapper_of_torch(now, before):
            raise SkipMismatchError(
                f"modules of this {type(host).__name__} that are scaled were replaced or reordered: unscale_ the model "
                f"and scale it again"
            )
    state.structure = structure_of(host, state.edits)


def active_scaling(host: nn.Module) -> SkipScaling | None:
    """The gates that are registered on the model. With modules_to_save, PEFT trains a copy of them for each adapter."""
    found: Any = host._modules.get(REGISTERED)
    if hasattr(found, "modules_to_save"):
        active = [name for name in found.active_adapters if name in found.modules_to_save]
        found = found.modules_to_save[active[0]] if active and not found.disable_adapters else found.original_module
    return found if isinstance(found, SkipScaling) else None


def _warn_if_frozen(scaling: SkipScaling) -> None:
    parameters = list(scaling.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        warnings.warn(
            f"PEFT has frozen the learned gates of the long skips, as all weights of the base model. To train and save "
            f'them with the adapter, pass modules_to_save=["{REGISTERED}"] to its configuration',
            FrozenGatesWarning,
            stacklevel=2,
        )


def _is_around(one: nn.Module, other: nn.Module) -> bool:
    """Whether one of them is an adapter of PEFT around the other: put on, or taken off again."""
    return getattr(one, "base_layer", None) is other or getattr(other, "base_layer", None) is one


def _is_wrapper_of_torch(one: nn.Module, other: nn.Module) -> bool:
    """torch.compile, FSDP and activation checkpointing call the module that they hold, with its hooks."""
    return type(one).__module__.startswith(("torch._dynamo", "torch.distributed")) and other in one.modules()


def _move_hooks(source: nn.Module, target: nn.Module) -> None:
    """An adapter reads what its layer reads, and adds to what it gives: scale the two of them as one."""
    for hooks, with_kwargs, key in list(_own_hooks(source)):
        hook = hooks[key]
        if isinstance(hook, ArgumentHook | OutputHook):
            del hooks[key]
            with_kwargs.pop(key, None)
            (Argument if isinstance(hook, ArgumentHook) else Output).register(target, hook)


class LeaveHook:
    """A forward hook of the model: all edits must have acted."""

    def __init__(self, counter: ForwardCounter) -> None:
        self.counter = counter

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        self.counter.end()


# Kinds of places.


class Argument:
    """A tensor among the arguments of a module: (positional, keywords)."""

    hook = ArgumentHook

    @classmethod
    def attach(cls, host: nn.Module, edits: list[tuple[int, Edit]], state: Attached) -> None:
        places: defaultdict[tuple[str, Any], list[tuple[int, Edit]]] = defaultdict(list)
        for slot, edit in edits:
            places[edit.attachment.module, edit.attachment.path].append((slot, edit))
        hooks: dict[str, Any] = {}
        for (name, path), same in places.items():
            hook = hooks.setdefault(name, cls.hook(state.switch))
            hook.edits.append((path, _action(same, state)))
        for name, hook in hooks.items():
            cls.register(host.get_submodule(name), hook)

    @staticmethod
    def register(module: nn.Module, hook: Any, prepend: bool = False) -> Any:
        return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)

    @staticmethod
    def read(place: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:  # noqa: ARG004
        return operand((args, kwargs), place)


class Output(Argument):
    """A tensor in the result of a module."""

    hook = OutputHook

    @staticmethod
    def register(module: nn.Module, hook: Any, prepend: bool = False) -> Any:
        return module.register_forward_hook(hook, prepend=prepend)

    @staticmethod
    def read(place: Attachment, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:  # noqa: ARG004
        return operand(output, place)


class Rewrite:
    """An expression in a function of a module."""

    @staticmethod
    def attach(host: nn.Module, edits: list[tuple[int, Edit]], state: Attached) -> None:
        places: defaultdict[str, defaultdict[tuple[str, str, str], defaultdict[EditSite, list[tuple[int, Edit]]]]]
        places = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for slot, edit in edits:
            source = edit.attachment.source
            assert source is not None
            function = (source.method, source.owner, source.digest)
            find_function(host.get_submodule(edit.attachment.module), *function)
            places[edit.attachment.module][function][source.position, source.operand].append((slot, edit))
        for name, functions in places.items():
            actions = {
                function: {site: Rewrite._by_execution(same, state) for site, same in sites.items()}
                for function, sites in functions.items()
            }
            rewrite_(host.get_submodule(name), actions, state.switch)

    @staticmethod
    def _by_execution(edits: list[tuple[int, Edit]], state: Attached) -> list[Action | None]:
        executions: defaultdict[int, list[tuple[int, Edit]]] = defaultdict(list)
        total, line = 0, 0
        for slot, edit in edits:
            source = edit.attachment.source
            assert source is not None
            executions[source.execution].append((slot, edit))
            total, line = source.executions, source.line
        actions: list[Action | None] = []
        for n in range(total):
            if n in executions:
                actions.append(_action(executions[n], state))
            else:
                unscaled = Pass(f"the merge in line {line} (its execution {n + 1} of {total}, which is not scaled)")
                unscaled.counter, unscaled.slots = state.counter, (state.counter.add(unscaled.label),)
                actions.append(unscaled)
        return actions


_KINDS: dict[str, Any] = {
    "argument": Argument,
    "concat argument": Argument,
    "output": Output,
    "concat output": Output,
    "rewrite": Rewrite,
}


def kind_of(place: Attachment) -> Any:
    """The class for a place of a plan."""
    if place.kind not in _KINDS:
        raise UnreachableSkipError(f"a plan with the place {place.kind!r} cannot be carried out on another model")
    return _KINDS[place.kind]


def operand(value: Any, place: Attachment) -> Tensor | None:
    """The operand among arguments or in a result; None if the module is called in another way than was planned."""
    try:
        for step in place.path:
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return None
    if not isinstance(value, Tensor) or value.dim() <= place.axis or value.shape[place.axis] != place.channels:
        return None
    return value.narrow(place.axis, place.start, place.length) if place.is_slice else value


# What has to be done for a skip.


def _edits(host: nn.Module, skip: LongSkip, scaling: SkipScaling) -> Iterator[Edit]:
    constants = scaling.constants(skip.index)
    if constants is not None and constants.skip != 1.0 and acts_behind_norm(skip, scaling):
        yield from _edits_behind_norm(host, skip, constants.skip)
        return
    for operand, factor in _wanted(scaling, skip.index, constants):
        places = {"skip": skip.places.skip, "main": skip.places.main, "merged": skip.places.merged}
        # A constant commutes with crops, pads and factors of the model. A method that looks at the data does not.
        place = skip.places.exact or skip.places.skip if operand == "skip" and factor is None else places[operand]
        if place is None:
            reason = skip.places.obstacle or "it is not given to a module or by one, nor can its merge be rewritten"
            raise UnreachableSkipError(
                f"{_IN_WORDS[operand]}long skip {skip.index} ({skip.ends}, merged at {skip.merge.location}) cannot be "
                f"scaled: {reason}. Do that merge in a module of its own, called once per forward, or leave this skip "
                f"out with exclude={skip.merge.location!r}"
            )
        axis = skip.site.channel_axis
        if factor is None and operand != "skip" and place.axis != axis % len(skip.shape):
            raise UnreachableSkipError(
                f"{_IN_WORDS[operand]}long skip {skip.index} ({skip.ends}) has its channels on axis {place.axis} where "
                f"it can be scaled ({place}), and the skip on axis {axis}: {type(scaling.config).__name__} cannot be "
                f"used there"
            )
        yield Edit(skip, place, factor, operand)


def _wanted(scaling: SkipScaling, index: int, constants: Constants | None) -> list[tuple[Operand, float | None]]:
    """The operands of merge i that are changed, each with its factor."""
    if constants is not None:
        factors: list[tuple[Operand, float | None]] = [("skip", constants.skip), ("main", constants.main)]
        return [(operand, factor) for operand, factor in factors if factor != 1.0]
    if scaling.scales_merged:
        return [("merged", None)]
    changed: list[tuple[Operand, bool]] = [("skip", scaling.scales_skip(index)), ("main", scaling.scales_main(index))]
    return [(operand, None) for operand, is_changed in changed if is_changed]


def _edits_behind_norm(host: nn.Module, skip: LongSkip, factor: float) -> Iterator[Edit]:
    if not skip.readers.behind_norm:
        raise UnreachableSkipError(
            f"long skip {skip.index} ({skip.ends}, merged at {skip.merge.location}) cannot be scaled behind its "
            f"{skip.readers.norm}: other operations than convolutions, norms and activations read it. Use "
            f"behind_norms=False, or leave this skip out with exclude={skip.merge.location!r}"
        )
    for target in skip.readers.behind_norm:
        require_module(host, target.module)
        layer: Any = host.get_submodule(target.module)
        layer = getattr(layer, "base_layer", layer)  # behind an adapter of PEFT
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
        yield Edit(skip, place, factor, behind_norm=True)


def structure_of(host: nn.Module, edits: list[Edit]) -> list[tuple[nn.Module, str, nn.Module]]:
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


def require_module(host: nn.Module, name: str) -> None:
    try:
        host.get_submodule(name)
    except AttributeError as error:
        raise ScalingMismatchError(
            f"the plan belongs to a different model: {type(host).__name__} has no {name!r}"
        ) from error


def _action(edits: list[tuple[int, Edit]], state: Attached) -> Action:
    """One action for all edits of one tensor: the two operands of a concatenation share a multiplication."""
    first = edits[0][1]
    place, index = first.attachment, first.skip.index
    size = (first.label, place.axis, place.channels)
    parts = [(edit.attachment.start, edit.attachment.length) for _, edit in edits]
    action: Action
    if first.operand == "merged":
        action = ScaleMerged(*size, state, index, place.start)
    elif first.factor is None:
        if place.is_slice:
            slices = [(*part, edit.main) for part, (_, edit) in zip(parts, edits, strict=True)]
            action = GateSlices(*size, slices, state, index)
        else:
            action = Gate(*size, state, index, first.main)
    elif place.is_slice:
        factors = [(*part, edit.factor or 0.0) for part, (_, edit) in zip(parts, edits, strict=True)]
        action = MultiplySlices(*size, factors)
    else:
        action = Multiply(*size, first.factor)
    action.counter, action.slots = state.counter, tuple(slot for slot, _ in edits)
    return action


def _strip(host: nn.Module) -> None:
    for module in host.modules():
        if is_rewritten(module):
            restore_(module)
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
            if isinstance(hook, ArgumentHook | OutputHook | OrderHook | EnterHook | LeaveHook):
                yield hooks, with_kwargs, key
