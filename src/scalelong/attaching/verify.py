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

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedModelError, VerificationError
from ..finding import Candidate, ExampleInputs, LongSkip, SkipPlan, candidates, example_call, without_subclass
from ..scaling import NoScaling, SkipScaling, SkipSite
from ..tracing import Merge, Trace
from .actions import OFF, REAL, UNSEEN, Mode, OrderHook
from .attach import Attached, Edit, attached
from .host import Host, require_scaled
from .reruns import (
    WAY_OUT,
    Call,
    Change,
    Changes,
    Observer,
    Reruns,
    Result,
    copied,
    distance,
    first_difference,
    rerunning,
    tensors_in,
    with_random_gates,
    without_zeros,
)

logger = logging.getLogger(__name__)


def verify(model: nn.Module, example_inputs: ExampleInputs = None) -> None:
    """Prove on these inputs that the scaled model computes what it should, in evaluation and in training mode.

    `scale_skips_` does so on its example inputs. Call it for inputs of another size or kind, or after the model was
    changed. A difference raises VerificationError. The model is left as it was, random states included.
    """
    host = require_scaled(model)
    state = attached(host.model)
    if state is None:
        return  # the model scales its skips itself
    call = example_call(host.model, example_inputs)
    reason = _obstacle(host.model, state.plan, call)
    if reason:
        raise UnsupportedModelError(f"this {type(host.model).__name__} cannot be verified: {reason}")
    verify_attached(host.model, state, call, at_half_size=False)


def verify_attached(host: nn.Module, state: Attached, call: Call, *, at_half_size: bool = True) -> None:
    """Verify a scaling in evaluation and in training mode, where the model can run on these inputs."""
    if not state.edits or _obstacle(host, state.plan, call):
        return
    call = ([*without_zeros(call[0])], {name: without_zeros(value) for name, value in call[1].items()})  # pyright: ignore
    after: set[str] = set()
    with rerunning(host, state) as runs:
        order = None
        for training in (False, True):
            modes = runs.modes(training)
            trace = runs.trace(call, modes)
            # Some models cannot be trained on such inputs, as BatchNorm cannot on one value per channel.
            if trace is not None:
                order = _Comparison(runs, call, modes, trace).verify(order)
                after |= _layers_before_loops(state, trace)
        if at_half_size:
            _verify_half_size(runs, call, order)
    if after and not state.counter.after:
        _learn_order(host, state, call, after)


def _verify_half_size(runs: Reruns, call: Call, order: list[int] | None) -> None:
    """A second path for small inputs may take the same merges in another way, which no count would notice."""
    sizes = {tensor.shape[2:] for tensor in pytree.tree_leaves(call) if isinstance(tensor, Tensor) and tensor.dim() > 3}
    if order is None or len(sizes) != 1 or any(size % 2 or size < 4 for size in next(iter(sizes))):
        return
    small = pytree.tree_map_only(
        Tensor, lambda t: t[(..., *(slice(size // 2) for size in t.shape[2:]))] if t.dim() > 3 else t, call
    )
    trace = runs.trace(small, runs.modes(False))
    if trace is None:
        return
    try:
        _, found = _places(trace, runs.state)
    except _MissingMergeError:
        return  # the count of a forward would say so
    except VerificationError as error:
        raise VerificationError(
            f"at half the size of the example inputs the model takes another path: {error}"
        ) from None
    _require_same_order(found, order, "at half the size")


class _MissingMergeError(VerificationError):
    """A merge of the plan did not run."""


def _layers_before_loops(state: Attached, trace: Trace) -> set[str]:
    """The layers that run right before the executions of an expression in a loop."""
    looped = [edit for edit in state.edits if (s := edit.attachment.source) is not None and s.executions > 1]
    places = {(edit.skip.merge.location, edit.skip.merge.module) for edit in looped}
    names = set()
    for merge in trace.merges:
        if (merge.site.text, merge.call.name) in places:
            before = [c for c in trace.calls if c.name and c.end <= merge.node and trace.call_count[c.name] == 1]
            names |= {max(before, key=lambda c: (c.end, c.start)).name} if before else set()
    return names


def _learn_order(host: nn.Module, state: Attached, call: Call, names: set[str]) -> None:
    """Know the executions of an expression in a loop by the layers that run between them."""
    for name in names:
        host.get_submodule(name).register_forward_hook(OrderHook(state.counter, name))
    with rerunning(host, state) as runs, state.counter.learning():
        runs.run_scaled(call, runs.modes(False), Mode(constants={}))


# One comparison.


class _Comparison:
    """The scaled model against the reference, for one call in one mode."""

    def __init__(self, runs: Reruns, call: Call, modes: list[bool], trace: Trace) -> None:
        self.runs, self.call, self.modes, self.trace = runs, call, modes, trace
        self.host, self.state = runs.host, runs.state
        self.edits = runs.state.edits
        self.places, self.order = _places(trace, runs.state)

    def verify(self, order: list[int] | None) -> list[int]:
        """Raise a VerificationError, or return the order in which the skips leave the main path."""
        if order is not None:
            _require_same_order(self.order, order, "in training")
        factors = {slot: 0.4 + 0.5 * (0.618034 * (slot + 1) % 1) for slot in range(len(self.edits))}
        difference = self._compare_factors(factors)
        if difference is not None:
            raise self._blame(factors, difference)
        learned = [slot for slot, edit in enumerate(self.edits) if edit.factor is None]
        if learned and all(self.places[slot].axis == self.edits[slot].attachment.axis for slot in learned):
            self._compare_gates(learned)
        return self.order

    def _compare_factors(self, factors: dict[int, float]) -> float | None:
        constants = {slot: _times(factor) for slot, factor in factors.items()}
        wanted = self.runs.run(self.call, self.modes, OFF, _changes(self.places, constants))
        found = self.runs.run_scaled(self.call, self.modes, Mode(constants=factors))
        return _first_difference(found, wanted)

    def _compare_gates(self, learned: list[int]) -> None:
        changes = {slot: _as_method(self.state, edit) for slot, edit in enumerate(self.edits)}
        with with_random_gates(self.state.scaling):
            wanted = self.runs.run(self.call, self.modes, OFF, _changes(self.places, changes))
            found = self.runs.run_scaled(self.call, self.modes, UNSEEN)
        for index in dict.fromkeys(self.edits[slot].skip.index for slot in learned):
            far = distance(found.coefficients[index], wanted.coefficients[index])
            if far is not None:
                raise VerificationError(
                    f"the coefficient of long skip {index} differs by {far:.1e} from that of the tensor that enters "
                    f"its merge: what lies between ({self.state.plan[index].places.skip}) does not commute with "
                    f"{type(self.state.scaling.config).__name__}. {WAY_OUT}"
                )
        far = _first_difference(found, wanted)
        if far is not None:
            raise VerificationError(
                f"the scaled {type(self.host).__name__} differs by {far:.1e} from one whose skips are scaled at their "
                f"merges. {WAY_OUT}"
            )

    def _blame(self, factors: dict[int, float], difference: float) -> VerificationError:
        """Which skip is at fault: each by itself."""
        plain, again = (self.runs.run(self.call, self.modes, OFF) for _ in range(2))
        if first_difference(again.readings, plain.readings) is not None:
            return VerificationError(
                f"{type(self.host).__name__} gives different results for the same inputs and random seed, so its "
                f"scaling cannot be verified. Nothing was changed. Make its randomness follow torch's seed, or pass "
                f"verify=False"
            )
        faults = []
        for slot, edit in enumerate(self.edits[:64]):
            if self._compare_factors({slot: factors[slot]}) is None:
                continue
            alone = self.runs.run(self.call, self.modes, Mode(constants={slot: factors[slot]}))
            idle = first_difference(alone.readings, plain.readings) is None
            what = "has no effect" if idle else "changes something else, or not this alone"
            faults.append(f"scaling {edit.label} as {edit.attachment} {what} (merged at {edit.skip.merge.location})")
        mode = "in training mode, " if any(self.modes) else ""
        listed = "; ".join(faults[:4]) or f"the skips together differ by {difference:.1e}"
        return VerificationError(f"{mode}{listed}. {WAY_OUT}")


def _first_difference(found: Result, wanted: Result) -> float | None:
    far = first_difference(found.readings, wanted.readings)
    return far if far is not None else first_difference(found.outputs, wanted.outputs)


def _as_method(state: Attached, edit: Edit) -> Change:
    if edit.factor is not None:
        return _times(edit.factor)
    if edit.operand == "merged":
        return lambda tensor: state.scaling.scale_merged(tensor, edit.skip.index, edit.attachment.start)
    scale = state.scaling.scale_main if edit.main else state.scaling.scale
    return lambda tensor: scale(tensor, edit.skip.index)


def _times(factor: float) -> Change:
    return lambda tensor: tensor * factor


# Where the merges of a plan are in the forward at hand.


@dataclass(frozen=True)
class _Place:
    """Operations, by name and number in the forward, with the position of a tensor among their arguments; None stands
    for their result."""

    operations: tuple[tuple[str, int, int | None], ...] = ()
    axis: int = -1
    module: str = ""
    """After a norm: the layer that reads the skip."""
    start: int = 0
    length: int = 0
    channels: int = 0


def _places(trace: Trace, state: Attached) -> tuple[list[_Place], list[int]]:
    """Where each edit belongs, and the order in which the skips leave the main path."""
    by_merge: defaultdict[int, list[Candidate]] = defaultdict(list)
    for candidate in candidates(trace):
        by_merge[candidate.merge.node].append(candidate)
    edited = {edit.skip.index for edit in state.edits if not edit.behind_norm}
    merges = {skip.index: _merges(trace, skip, state.plan.repeats, skip.index in edited) for skip in state.plan}
    starts = [_start(skip, merges[skip.index], by_merge) for skip in state.plan]
    ordered = sorted(set(starts))
    order = [ordered.index(start) for start in starts]
    return [_place(edit, merges[edit.skip.index]) for edit in state.edits], order


def _merges(trace: Trace, skip: LongSkip, repeats: int, needed: bool) -> list[Merge]:
    """The merge of a skip, in each run of the network."""
    place = (skip.merge.location, skip.merge.module, skip.merge.kind)
    here = [merge for merge in trace.merges if (merge.site.text, merge.call.name, merge.kind) == place]
    per_run = len(here) // repeats
    numbers = [skip.merge.occurrence + run * per_run for run in range(repeats)]
    if here and len(here) % repeats == 0 and numbers[-1] < len(here):
        return [here[number] for number in numbers]
    if not needed:
        return []
    raise _MissingMergeError(
        f"the merge of long skip {skip.index} is number {skip.merge.occurrence + 1} of those at {skip.merge.location} "
        f"in the plan, and {len(here)} run there now"
    )


def _start(skip: LongSkip, merges: list[Merge], by_merge: dict[int, list[Candidate]]) -> int:
    """Where the skip leaves the main path; -1 if that is not known."""
    starts = []
    for merge in merges:
        here = by_merge.get(merge.node, [])
        same = [candidate for candidate in here if candidate.operand == skip.merge.operand]
        if here and not same:
            raise VerificationError(
                f"the operands of long skip {skip.index} have changed places at {skip.merge.location}: the skip was "
                f"operand {skip.merge.operand + 1}, and is {here[0].operand + 1} here"
            )
        starts += [candidate.start for candidate in same[:1]]
    return starts[0] if starts else -1


def _require_same_order(order: list[int], before: list[int], when: str) -> None:
    """The skips come from where they did. Names of modules will not do: in training, dropout makes the feature."""
    moved = [index for index, (a, b) in enumerate(zip(order, before, strict=True), start=1) if a != b]
    if moved:
        raise VerificationError(
            f"long skips {', '.join(map(str, moved))} come from other places of the network {when}: the merges "
            f"take the features in another order"
        )


def _place(edit: Edit, merges: list[Merge]) -> _Place:
    place, skip = edit.attachment, edit.skip
    if edit.behind_norm:
        return _Place((), place.axis, place.module, place.start, place.length, place.channels)
    if edit.operand == "merged":
        axis = merges[0].axis
        return _Place(tuple((*_operation(merge, 0)[:2], None) for merge in merges), -1 if axis is None else axis)
    wanted = skip.merge.main_operand if edit.main else skip.merge.operand
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
        if tensor.dim() < 2 or tensor.shape[place.axis] != place.channels:
            return tensor  # an adapter runs layers of its own inside the layer
        # A copy has the layout in memory of the tensor, which a concatenation may not have: dropout behind the layer
        # draws its numbers in the order of the memory.
        result = tensor.clone()
        where = (place.axis, place.start, place.length)
        result.narrow(*where).copy_(change(tensor.narrow(*where)))
        return result

    return changed


# When a model cannot be run for comparison.


def _obstacle(host: nn.Module, plan: SkipPlan, call: Call) -> str:
    """Why the model cannot be run once more on these inputs; empty if it can."""
    tensors = [*host.parameters(), *host.buffers(), *map(without_subclass, tensors_in(call))]
    if any(tensor.is_meta for tensor in tensors):
        return "it is on the meta device"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "its tensors are fake or sharded"
    if any(skip.merge.operand < 0 for skip in plan):
        return "its plan is of an older version, which does not say which operand is the skip"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and any(isinstance(module, nn.SyncBatchNorm) for module in host.modules()):
        return "its processes must run alike"
    return ""


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
    if _obstacle(host.model, plan, call) or any(skip.places.skip is None for skip in plan):
        return plan
    args, kwargs, batch = _as_batch(call)
    capture = _Capture(plan.sites)
    state = Attached(plan, capture)
    host.attach(state)
    try:
        seen = []
        with rerunning(host.model, state) as runs:
            modes = runs.modes(False)
            for inputs in ((args, kwargs), _with_another_image((args, kwargs), batch)):
                with runs.prepared(modes, REAL):
                    given, named = copied(inputs)
                    host.model(*given, **named)
                    seen.append(dict(capture.skips))
    except Exception as error:
        # Not every model takes two images where it was shown one.
        logger.info("the axis of the batch is taken for the first, because two images do not run: %s", error)
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


def function_of(
    host: Host, call: Call, constants: dict[int, float] | None, without: Sequence[nn.Module]
) -> tuple[list[Tensor], list[Tensor]]:
    """What the model computes: its outputs, and the results of its layers but these."""
    state = attached(host.model)
    assert state is not None
    weights = {layer.weight.data_ptr() for layer in without if isinstance(layer.weight, Tensor)}
    observer = Observer(Changes(), results_without=weights)
    with rerunning(host.model, state) as runs:
        result = runs.run(call, runs.modes(False), Mode(constants=constants), observer=observer)
    return result.outputs, result.readings


def is_same_function(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(first_difference(found, wanted) is None for found, wanted in zip(other, one, strict=True))


def can_verify(host: Host, call: Call | None) -> bool:
    state = attached(host.model)
    return call is not None and state is not None and not _obstacle(host.model, state.plan, call)
