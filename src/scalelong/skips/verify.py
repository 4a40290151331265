"""Prove that a scaled model computes what it should.

The model runs twice on the same inputs with the same random numbers. In the first run its scaling is off, and a
dispatch mode counts the operations and multiplies the recorded operand of each recorded merge: the reference. It shares
nothing with hooks and rewritten functions. In the second run the edits themselves act. Both runs note what every layer
gets and gives, because a new network often ends in a layer of zeros that hides everything. Each edit has a factor of
its own, so that one which does not act, or acts on something else, shows.

    reference   unscaled model, cat(x, f_i · skip_i) by the mode
    found       scaled model, every edit multiplies by its f_i

Methods that look at the data are then compared once more as they are, with the gate at the merge. All of this leaves no
trace: random states, buffers, training flags, attributes and gradients are as before.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import SkipMismatchError, VerificationError
from ..scaling.base import SkipScaling, SkipSite
from ..scaling.constant import NoScaling
from ..tracing import Merge, Trace
from .actions import Witness, running_backward
from .attach import Attached, Edit, attached, detach_
from .candidates import Candidate, candidates
from .examples import without_subclass
from .host import Host
from .plan import LongSkip, SkipPlan
from .reruns import (
    BUSY,
    WAY_OUT,
    Call,
    Change,
    Changes,
    Observer,
    awake,
    copied,
    distance,
    first_difference,
    lively,
    modes_of,
    observed_run,
    quietly,
    run_scaled,
    tensors_in,
    traced,
)

_EXACT_KINDS = 32
"""So many kinds of inputs are told apart by their exact sizes. Beyond these, sizes of a magnitude are alike."""


def verify_attached(host: nn.Module, state: Attached, call: Call) -> None:
    """Verify a scaling that was just attached, in evaluation and in training mode, on example inputs."""
    if not state.edits or not _can_run(host, call):
        return
    call = ([*lively(call[0])], {name: lively(value) for name, value in call[1].items()})  # pyright: ignore
    for training in (False, True):
        modes = modes_of(host, training)
        trace = traced(host, state, call, modes)
        # Some models cannot be trained on such inputs, as BatchNorm cannot on one value per channel.
        if trace is not None:
            _verify(host, state, call, modes, trace)
            state.seen.add(_kind(training, call))


def on_forward(host: nn.Module, state: Attached, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Verify a forward with a new kind of inputs, before it runs: another path may be taken at another size."""
    if getattr(BUSY, "on", False) or state.tally.factors is not None:
        return
    call = (args, kwargs)
    kind = _kind(host.training, call)
    if kind in state.seen or (len(state.seen) >= _EXACT_KINDS and _rough(kind) in state.seen):
        return
    if not _can_run(host, call) or running_backward() != -1:
        return
    modes = [module.training for module in host.modules()]
    trace = traced(host, state, call, modes)
    if trace is None:
        return  # the forward itself will say what is wrong
    try:
        _verify(host, state, call, modes, trace)
    except VerificationError as error:
        if state.seen:
            raise SkipMismatchError(f"these inputs take another path than the one that was planned: {error}") from error
        if attached(host) is state:
            detach_(host)
        raise
    state.seen.add(kind)
    if len(state.seen) >= _EXACT_KINDS:
        state.seen.add(_rough(kind))


# One comparison.


def _verify(host: nn.Module, state: Attached, call: Call, modes: list[bool], trace: Trace) -> None:
    places = _places(trace, state)
    factors = {slot: 0.4 + 0.5 * (0.618034 * (slot + 1) % 1) for slot in range(len(state.edits))}
    difference = _compare_factors(host, state, call, modes, places, factors)
    if difference is not None:
        raise _blame(host, state, call, modes, places, factors, difference)
    if not state.tally.after:
        _add_witnesses(host, state, trace, call, modes)
    learned = [slot for slot, edit in enumerate(state.edits) if edit.factor is None]
    if not learned or any(places[slot].axis != state.edits[slot].attachment.axis for slot in learned):
        return
    changes = {slot: _as_method(state, state.edits[slot]) for slot in learned}
    # New gates are flat: a gate that looks at the wrong data shows only when it looks at all.
    with awake(state.scaling):
        wanted = observed_run(host, state, call, modes, {}, _changes(places, changes))
        found = run_scaled(host, state, call, modes, None)
    for index in dict.fromkeys(state.edits[slot].skip.index for slot in learned):
        far = distance(found.coefficients[index], wanted.coefficients[index])
        if far is not None:
            raise VerificationError(
                f"the coefficient of long skip {index} differs by {far:.1e} from that of the tensor that enters its "
                f"merge: what lies between ({state.plan[index].attachment}) does not commute with "
                f"{type(state.scaling.config).__name__}. {WAY_OUT}"
            )
    far = first_difference(found.outputs, wanted.outputs)
    if far is not None:
        raise VerificationError(
            f"the scaled {type(host).__name__} differs by {far:.1e} from one whose skips are scaled at their merges. "
            f"{WAY_OUT}"
        )


def _add_witnesses(host: nn.Module, state: Attached, trace: Trace, call: Call, modes: list[bool]) -> None:
    """Know the executions of an expression in a loop by the layers that run between them."""
    looped = [n for n, edit in enumerate(state.edits) if (s := edit.attachment.source) is not None and s.executions > 1]
    if not looped:
        return
    places = {(state.edits[n].skip.location, state.edits[n].skip.merged_in) for n in looped}
    names = set()
    for merge in trace.merges:
        if (merge.site.text, merge.call.name) in places:
            before = [c for c in trace.calls if c.name and c.end <= merge.node and trace.call_count[c.name] == 1]
            names |= {max(before, key=lambda c: (c.end, c.start)).name} if before else set()
    for name in names:
        host.get_submodule(name).register_forward_hook(Witness(state.tally, name))
    with state.tally.learning(range(len(state.tally.labels))):
        run_scaled(host, state, call, modes, dict.fromkeys(range(len(state.edits)), 1.0))


def _compare_factors(
    host: nn.Module, state: Attached, call: Call, modes: list[bool], places: "list[_Place]", factors: dict[int, float]
) -> float | None:
    constants = {slot: _times(factor) for slot, factor in factors.items()}
    wanted = observed_run(host, state, call, modes, {}, _changes(places, constants))
    found = run_scaled(host, state, call, modes, {slot: factors.get(slot, 1.0) for slot in range(len(state.edits))})
    far = first_difference(found.readings, wanted.readings)
    return far if far is not None else first_difference(found.outputs, wanted.outputs)


def _blame(
    host: nn.Module,
    state: Attached,
    call: Call,
    modes: list[bool],
    places: "list[_Place]",
    factors: dict[int, float],
    difference: float,
) -> VerificationError:
    """Which skip is at fault: each by itself."""
    plain, again = (observed_run(host, state, call, modes, {}) for _ in range(2))
    if first_difference(again.readings, plain.readings) is not None:
        return VerificationError(
            f"{type(host).__name__} gives different results for the same inputs and random seed, so its scaling cannot "
            f"be verified. Nothing was changed. Make its randomness follow torch's seed, or pass verify=False"
        )
    faults = []
    for slot, edit in enumerate(state.edits[:64]):
        if _compare_factors(host, state, call, modes, places, {slot: factors[slot]}) is None:
            continue
        alone = observed_run(
            host, state, call, modes, {n: factors[n] if n == slot else 1.0 for n in range(len(state.edits))}
        )
        idle = first_difference(alone.readings, plain.readings) is None
        what = "has no effect" if idle else "changes something else, or not this alone"
        faults.append(f"scaling {edit.label} as {edit.attachment} {what} (merged at {edit.skip.location})")
    mode = "in training mode, " if any(modes) else ""
    listed = "; ".join(faults[:4]) or f"the skips together differ by {difference:.1e}"
    return VerificationError(f"{mode}{listed}. {WAY_OUT}")


def _as_method(state: Attached, edit: Edit) -> Change:
    scale = state.scaling.scale_main if edit.main else state.scaling.scale
    return lambda tensor: scale(tensor, edit.skip.index)


def _times(factor: float) -> Change:
    return lambda tensor: tensor * factor


# Where the merges of a plan are in the forward at hand.


@dataclass(frozen=True)
class _Place:
    """Operations, by name and number in the forward, with the position of a tensor among their arguments."""

    operations: tuple[tuple[str, int, int], ...] = ()
    axis: int = -1
    module: str = ""
    """Behind a norm: the convolution that reads the skip."""
    start: int = 0
    length: int = 0
    channels: int = 0


def _places(trace: Trace, state: Attached) -> list[_Place]:
    by_merge: defaultdict[int, list[Candidate]] = defaultdict(list)
    for candidate in candidates(trace):
        by_merge[candidate.merge.node].append(candidate)
    edited = {edit.skip.index for edit in state.edits if not edit.behind_norm}
    merges = {skip.index: _merges(trace, skip, state.plan.repeats, skip.index in edited) for skip in state.plan}
    starts = [_start(skip, merges[skip.index], by_merge) for skip in state.plan]
    _require_same_order(state, starts)
    return [_place(edit, merges[edit.skip.index]) for edit in state.edits]


def _merges(trace: Trace, skip: LongSkip, repeats: int, needed: bool) -> list[Merge]:
    """The merge of a skip, in each run of the network."""
    place = (skip.location, skip.merged_in, skip.merge)
    here = [merge for merge in trace.merges if (merge.site.text, merge.call.name, merge.kind) == place]
    per_run = len(here) // repeats
    numbers = [skip.occurrence + run * per_run for run in range(repeats)]
    if here and len(here) % repeats == 0 and numbers[-1] < len(here):
        return [here[number] for number in numbers]
    if not needed:
        return []
    raise VerificationError(
        f"the merge of long skip {skip.index} is number {skip.occurrence + 1} of those at {skip.location} in the plan, "
        f"and {len(here)} run there now"
    )


def _start(skip: LongSkip, merges: list[Merge], by_merge: dict[int, list[Candidate]]) -> int:
    """Where the skip leaves the main path; -1 if that is not known."""
    starts = []
    for merge in merges:
        here = by_merge.get(merge.node, [])
        same = [candidate for candidate in here if candidate.operand == skip.operand]
        if here and not same:
            raise VerificationError(
                f"the operands of long skip {skip.index} have changed places at {skip.location}: the skip was operand "
                f"{skip.operand + 1}, and is {here[0].operand + 1} here"
            )
        starts += [candidate.start for candidate in same[:1]]
    return starts[0] if starts else -1


def _require_same_order(state: Attached, starts: list[int]) -> None:
    """The skips come from where they did. Names of modules will not do: in training, dropout makes the feature."""
    ordered = sorted(set(starts))
    order = [ordered.index(start) for start in starts]
    if state.order is None:
        state.order = order
    if order != state.order:
        moved = [index for index, (a, b) in enumerate(zip(order, state.order, strict=True), start=1) if a != b]
        raise VerificationError(
            f"long skips {', '.join(map(str, moved))} come from other places of the network than before: the merges "
            f"take the features in another order"
        )


def _place(edit: Edit, merges: list[Merge]) -> _Place:
    place, skip = edit.attachment, edit.skip
    if edit.behind_norm:
        return _Place(module=place.module, start=place.start, length=place.length, channels=place.channels)
    wanted = skip.main_operand if edit.main else skip.operand
    axis = skip.site.channel_axis if merges[0].axis is None else merges[0].axis
    shape = merges[0].shapes[wanted]
    return _Place(tuple(_operation(merge, wanted) for merge in merges), axis % len(shape))


def _operation(merge: Merge, operand: int) -> tuple[str, int, int]:
    part = merge.parts[operand]
    return part.name, part.ordinal, part.position


def _changes(places: list[_Place], by_slot: dict[int, Change]) -> Changes:
    changes = Changes()
    for slot, change in by_slot.items():
        place = places[slot]
        if place.module:
            changes.modules[place.module].append(_on_channels(place, change))
        for name, number, position in place.operations:
            changes.operations[name, number].append((position, change))
    return changes


def _on_channels(place: _Place, change: Change) -> Change:
    def changed(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != place.channels:
            return tensor  # an adapter runs layers of its own inside the layer
        # A copy has the layout in memory of the tensor, which a concatenation may not have: dropout behind the layer
        # draws its numbers in the order of the memory.
        result = tensor.clone()
        result.narrow(1, place.start, place.length).copy_(change(tensor.narrow(1, place.start, place.length)))
        return result

    return changed


# Kinds of inputs: what may decide which path a forward takes.


def _kind(training: bool, call: Call) -> Any:
    return (
        training,
        tuple(_described(value) for value in call[0]),
        tuple((name, _described(value)) for name, value in call[1].items()),
    )


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape[1:])  # any batch size
    if isinstance(value, dict):
        return tuple((name, _described(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_described(item) for item in value)
    # A small number may choose a path. A large one is rather a timestep.
    chooses = isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= 16)
    return repr(value) if chooses else type(value)


def _rough(kind: Any) -> Any:
    """Sizes by their magnitude and by the power of two that divides them."""
    if isinstance(kind, tuple):
        return tuple(_rough(item) for item in kind)
    if type(kind) is int:
        return "size", kind.bit_length(), kind & -kind
    return kind


def _can_run(host: nn.Module, call: Call) -> bool:
    """Whether the model can be run again beside the forward that is under way."""
    transformed = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or transformed is not None:
        return False
    if threading.current_thread() is not threading.main_thread() or getattr(host, "_is_replica", False):
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    plain = (Tensor, nn.Parameter)
    tensors = [*host.parameters(), *host.buffers(), *map(without_subclass, tensors_in(call))]
    if any(type(tensor) not in plain or tensor.is_meta for tensor in tensors):
        return False  # meta, fake and sharded tensors
    state = attached(host)
    if state is not None and any(skip.operand < 0 for skip in state.plan):
        return False  # a plan of an older version, which does not say which operand is the skip
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    shares = any(isinstance(module, nn.SyncBatchNorm) for module in host.modules())
    return not (distributed and shares)


# Other proofs by running: which axis holds the batch, and that undoing and folding leave the function as it is.


class _Capture(SkipScaling):
    """Keeps the skips as they come, and changes nothing."""

    def __init__(self, sites: Sequence[SkipSite]) -> None:
        super().__init__(NoScaling(), sites)
        self.skips: dict[int, Tensor] = {}

    def scale(self, skip: Tensor, index: int) -> Tensor:
        self.skips[index] = skip.detach().clone()
        return skip

    def coefficient(self, index: int) -> float:  # noqa: ARG002
        return 1.0


def with_batch_axes(host: Host, plan: SkipPlan, call: Call) -> SkipPlan:
    """The plan, with the axis of each skip along which the images of a batch lie: measured by changing one image."""
    if not _can_run(host.model, call) or any(skip.attachment is None for skip in plan):
        return plan
    args, kwargs, batch = _as_batch(call)
    capture = _Capture(plan.sites)
    state = Attached(plan, capture)
    host.attach(state)
    try:
        modes = modes_of(host.model, False)
        seen = []
        for inputs in ((args, kwargs), _with_another_image((args, kwargs), batch)):
            with quietly(host.model, state, modes, None):
                given, named = copied(inputs)
                host.model(*given, **named)
                seen.append(dict(capture.skips))
    except Exception:
        # Not every model takes two images where it was shown one: its skips are taken as they usually lie.
        return plan
    finally:
        host.detach()
    skips = []
    for skip in plan:
        before, after = (found.get(skip.index) for found in seen)
        axis = skip.site.batch_axis if before is None or after is None else _batch_axis(before, after, batch, skip)
        skips.append(skip.replace(site=replace(skip.site, batch_axis=axis)))
    return replace(plan, skips=tuple(skips))


def _batch_axis(before: Tensor, after: Tensor, batch: int, skip: LongSkip) -> int | None:
    """The axis along which only the share of one image has changed."""
    changed = before != after
    channel = skip.site.channel_axis % before.dim()
    for axis in range(before.dim()):
        if axis == channel or before.shape[axis] % batch:
            continue
        touched = changed.movedim(axis, 0).reshape(before.shape[axis], -1).any(1)
        if int(touched.sum()) * batch == before.shape[axis]:
            return axis
    return None if bool(changed.any()) else 0


def _as_batch(call: Call) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """The inputs with at least two images."""
    sizes = [t.shape[0] for t in pytree.tree_leaves(call) if isinstance(t, Tensor) and t.dim() > 1]
    batch = sizes[0] if sizes else 1
    if batch != 1:
        return (*call, batch)

    def doubled(value: Any) -> Any:
        return torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() and len(value) == 1 else value

    args, kwargs = pytree.tree_map(doubled, (tuple(call[0]), dict(call[1])))
    return args, kwargs, 2


def _with_another_image(call: Call, batch: int) -> Call:
    generator = torch.Generator().manual_seed(1)

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2 or len(value) != batch:
            return value
        other = value.clone()
        other[0] = torch.randn(value[0].shape, generator=generator).to(value)
        return other

    return pytree.tree_map(changed, call)


@contextmanager
def verify_detached(host: Host, *, enabled: bool) -> Iterator[None]:
    """The model must compute the same, bit for bit, as it did with its scaling off."""
    state = attached(host.model) if not host.is_native else None
    call = state.inputs if state is not None else None
    before = None
    if enabled and state is not None and call is not None and _can_run(host.model, call):
        modes = modes_of(host.model, False)
        with suppress(Exception):
            before = observed_run(host.model, state, call, modes, {})
    yield
    if before is None or state is None or call is None:
        return
    after = observed_run(host.model, state, call, modes_of(host.model, False), {})
    same = len(after.readings) == len(before.readings) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip([*after.readings, *after.outputs], [*before.readings, *before.outputs], strict=True)
    )
    if not same:
        raise VerificationError(
            f"the unscaled {type(host.model).__name__} differs from the model without its scaling: something else was "
            f"changed in the meantime"
        )


def function_of(
    host: Host, call: Call, factors: dict[int, float] | None, without: Sequence[nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """What the model computes: its outputs, and the results of its layers but these."""
    state = attached(host.model)
    assert state is not None
    weights = {layer.weight.data_ptr() for layer in without if isinstance(layer.weight, Tensor)}
    observer = Observer(Changes(), results_without=weights)
    result = observed_run(host.model, state, call, modes_of(host.model, False), factors, observer=observer)
    return result.outputs, result.readings


def is_same_function(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(first_difference(found, wanted) is None for found, wanted in zip(other, one, strict=True))


def can_verify(host: Host, call: Call | None) -> bool:
    return call is not None and _can_run(host.model, call)


# For others that compare forwards.


def verifying() -> bool:
    """Whether the forward that runs in this thread is one of ours."""
    return getattr(BUSY, "on", False)


def changing_operand(merge: Merge, operand: int, change: Change) -> TorchDispatchMode:
    """A mode in which one operand of a recorded merge is changed, whatever module or function takes it."""
    name, number, position = _operation(merge, operand)
    changes = Changes()
    changes.operations[name, number].append((position, change))
    return Observer(changes)


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float | None:
    """How far apart they are, relative to the largest value; None if that is rounding."""
    return first_difference(found, wanted)
