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

import copy
import random
import re
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ScaleLongError, SkipMismatchError, VerificationError
from ..scaling.base import SkipScaling, SkipSite
from ..scaling.constant import NoScaling
from ..tracing import Merge, Trace, counted_as, foreign_hooks_marked, in_foreign_hook, record, untouched
from .actions import Witness, running_backward
from .attach import Attached, Edit, attached, detach_, follow_structure
from .candidates import Candidate, candidates
from .examples import without_freeu, without_subclass
from .host import Host
from .plan import LongSkip, SkipPlan

Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]

# How far two ways to compute the same may be apart, relative to the largest value: roundings grow from layer to layer.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LAYERS = re.compile(r"conv|mm|linear|attention|lstm|gru|rnn|(?<!vector)(?<!matrix)_norm")
_EXACT_KINDS = 32
"""So many kinds of inputs are told apart by their exact sizes. Beyond these, sizes of a magnitude are alike."""
_WAY_OUT = "Nothing was changed. Leave this skip out (exclude=...), or, if you know better, pass verify=False"


def verify_attached(host: nn.Module, state: Attached, call: Call) -> None:
    """Verify a scaling that was just attached, in evaluation and in training mode, on example inputs."""
    if not state.edits or not _can_run(host, call):
        return
    call = ([*_lively(call[0])], {name: _lively(value) for name, value in call[1].items()})  # pyright: ignore
    for training in (False, True):
        modes = _modes(host, training)
        trace = _traced(host, state, call, modes)
        # Some models cannot be trained on such inputs, as BatchNorm cannot on one value per channel.
        if trace is not None:
            _verify(host, state, call, modes, trace)
            state.seen.add(_kind(training, call))


def on_forward(host: nn.Module, state: Attached, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Verify a forward with a new kind of inputs, before it runs: another path may be taken at another size."""
    if getattr(_BUSY, "on", False) or state.tally.factors is not None:
        return
    call = (args, kwargs)
    kind = _kind(host.training, call)
    if kind in state.seen or (len(state.seen) >= _EXACT_KINDS and _rough(kind) in state.seen):
        return
    if not _can_run(host, call) or running_backward() != -1:
        return
    modes = [module.training for module in host.modules()]
    trace = _traced(host, state, call, modes)
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


_BUSY = threading.local()


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
    with _awake(state.scaling):
        wanted = _run(host, state, call, modes, {}, _changes(places, changes))
        found = _run_scaled(host, state, call, modes, None)
    for index in dict.fromkeys(state.edits[slot].skip.index for slot in learned):
        far = _distance(found.coefficients[index], wanted.coefficients[index])
        if far is not None:
            raise VerificationError(
                f"the coefficient of long skip {index} differs by {far:.1e} from that of the tensor that enters its "
                f"merge: what lies between ({state.plan[index].attachment}) does not commute with "
                f"{type(state.scaling.config).__name__}. {_WAY_OUT}"
            )
    far = _first_difference(found.outputs, wanted.outputs)
    if far is not None:
        raise VerificationError(
            f"the scaled {type(host).__name__} differs by {far:.1e} from one whose skips are scaled at their merges. "
            f"{_WAY_OUT}"
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
        _run_scaled(host, state, call, modes, dict.fromkeys(range(len(state.edits)), 1.0))


def _compare_factors(
    host: nn.Module, state: Attached, call: Call, modes: list[bool], places: "list[_Place]", factors: dict[int, float]
) -> float | None:
    constants = {slot: _times(factor) for slot, factor in factors.items()}
    wanted = _run(host, state, call, modes, {}, _changes(places, constants))
    found = _run_scaled(host, state, call, modes, {slot: factors.get(slot, 1.0) for slot in range(len(state.edits))})
    far = _first_difference(found.readings, wanted.readings)
    return far if far is not None else _first_difference(found.outputs, wanted.outputs)


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
    plain, again = (_run(host, state, call, modes, {}) for _ in range(2))
    if _first_difference(again.readings, plain.readings) is not None:
        return VerificationError(
            f"{type(host).__name__} gives different results for the same inputs and random seed, so its scaling cannot "
            f"be verified. Nothing was changed. Make its randomness follow torch's seed, or pass verify=False"
        )
    faults = []
    for slot, edit in enumerate(state.edits[:64]):
        if _compare_factors(host, state, call, modes, places, {slot: factors[slot]}) is None:
            continue
        alone = _run(host, state, call, modes, {n: factors[n] if n == slot else 1.0 for n in range(len(state.edits))})
        idle = _first_difference(alone.readings, plain.readings) is None
        what = "has no effect" if idle else "changes something else, or not this alone"
        faults.append(f"scaling {edit.label} as {edit.attachment} {what} (merged at {edit.skip.location})")
    mode = "in training mode, " if any(modes) else ""
    listed = "; ".join(faults[:4]) or f"the skips together differ by {difference:.1e}"
    return VerificationError(f"{mode}{listed}. {_WAY_OUT}")


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


# Runs.


@dataclass
class _Result:
    outputs: list[Tensor]
    readings: list[Tensor]
    coefficients: dict[int, Tensor] = field(default_factory=dict)


class _Observer(TorchDispatchMode):
    """Counts operations, changes recorded operands, and notes what layers get and give."""

    def __init__(self, changes: "_Changes", results_without: set[int] | None = None) -> None:
        super().__init__()
        self.changes, self.counts = changes, Counter[str]()
        self.results_without = results_without
        """If given: note results alone, and not those of layers with these weights."""
        self.readings: list[Tensor] = []
        self.inside: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        counted = counted_as(name)
        number = self.counts[counted]
        self.counts[counted] += 1
        for position, change in self.changes.operations.get((counted, number), ()):
            args, kwargs = _with_changed(args, kwargs, position, change, func._schema.is_mutable)
        # What a hook measures is not what the network computes; what it changes, the next layers show.
        is_layer = _LAYERS.search(name) is not None and not in_foreign_hook()
        if is_layer and self.inside:
            for change in self.changes.modules.get(self.inside[-1], ()):
                args, kwargs = _with_changed(args, kwargs, 0, change, False)
        result = func(*args, **kwargs)
        if is_layer:
            given, made = ([leaf for leaf in pytree.tree_leaves(v) if isinstance(leaf, Tensor)] for v in (args, result))
            noted = [*given[:2], *made]  # weights come last
            if self.results_without is not None:
                noted = [] if any(tensor.data_ptr() in self.results_without for tensor in given) else made
            self.readings += [_sample(tensor) for tensor in noted if _is_comparable(tensor)]
        return result


@dataclass
class _Changes:
    operations: defaultdict[tuple[str, int], list[tuple[int, Change]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    modules: defaultdict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))


def _changes(places: list[_Place], by_slot: dict[int, Change]) -> _Changes:
    changes = _Changes()
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
            return tensor  # an adapter runs layers of its own inside of the layer
        # A copy has the layout in memory of the tensor, which a concatenation may not have: dropout behind the layer
        # draws its numbers in the order of the memory.
        result = tensor.clone()
        result.narrow(1, place.start, place.length).copy_(change(tensor.narrow(1, place.start, place.length)))
        return result

    return changed


def _with_changed(args: Any, kwargs: Any, position: int, change: Change, mutable: bool) -> tuple[Any, Any]:
    seen = -1

    def visit(leaf: Any) -> Any:
        nonlocal seen
        if not isinstance(leaf, Tensor):
            return leaf
        seen += 1
        if seen != position:
            return leaf
        # An operation in place writes into its first operand: whoever holds it sees the result.
        return leaf.copy_(change(leaf)) if mutable and position == 0 else change(leaf)

    return pytree.tree_map(visit, (args, kwargs))


def _run(
    host: nn.Module,
    state: Attached,
    call: Call,
    modes: list[bool],
    factors: dict[int, float] | None,
    changes: _Changes | None = None,
    observer: _Observer | None = None,
) -> _Result:
    """One forward. `factors`: {} switches the scaling off, None lets it act as it is."""
    changes = changes or _Changes()
    observer = observer or _Observer(changes)
    with _quietly(host, state, modes, factors), _inside(host, observer):
        args, kwargs = _copied(call)
        with observer:
            output = host(*args, **kwargs)
        outputs = [_sample(tensor) for tensor in tensors_in(output) if _is_comparable(tensor)]
        coefficients = {}
        if factors is None or changes.operations:
            for edit in state.edits:
                if edit.factor is None:
                    coefficients[edit.skip.index] = _sample(_coefficient(state, edit))
    return _Result(outputs, observer.readings, coefficients)


def _run_scaled(
    host: nn.Module, state: Attached, call: Call, modes: list[bool], factors: dict[int, float] | None
) -> _Result:
    try:
        return _run(host, state, call, modes, factors)
    except ScaleLongError as error:
        raise VerificationError(f"{error}. {_WAY_OUT}") from error
    except Exception as error:
        raise VerificationError(
            f"the scaled {type(host).__name__} fails where the plain one runs: {type(error).__name__}: {error}. "
            f"{_WAY_OUT}"
        ) from error


@contextmanager
def _awake(scaling: SkipScaling) -> Iterator[None]:
    """Gates with noise in their weights."""
    saved = [(parameter, parameter.detach().clone()) for parameter in scaling.parameters()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, _ in saved:
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in saved:
                parameter.copy_(before)


def _coefficient(state: Attached, edit: Edit) -> Tensor:
    try:
        value = state.scaling.coefficient(edit.skip.index)
    except ScaleLongError:  # a run of constants: nothing was gated
        value = 1.0
    return torch.as_tensor(value, dtype=torch.float32) if not isinstance(value, Tensor) else value


def _traced(host: nn.Module, state: Attached, call: Call, modes: list[bool]) -> Trace | None:
    """The forward of the unscaled model; None if it cannot run so."""
    with _quietly(host, state, modes, {}):
        args, kwargs = _copied(call)
        # The recorder goes to evaluation mode; the forward starts in the modes that are meant.
        handle = host.register_forward_pre_hook(_SetModes(modes), prepend=True)
        try:
            return record(host, args, kwargs)
        except Exception:
            return None
        finally:
            handle.remove()


class _SetModes:
    def __init__(self, modes: list[bool]) -> None:
        self.modes = modes

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        _set_modes(module, self.modes)


def _set_modes(host: nn.Module, modes: list[bool]) -> None:
    for module, training in zip(host.modules(), modes, strict=True):
        module.training = training


def _modes(host: nn.Module, training: bool) -> list[bool]:
    """The training flags as `host.train(training)` sets them, which some models do in their own way."""
    before = [module.training for module in host.modules()]
    with untouched(host):
        _set_modes(host, before)
        host.train(training)
        return [module.training for module in host.modules()]


@contextmanager
def _quietly(host: nn.Module, state: Attached, modes: list[bool], factors: dict[int, float] | None) -> Iterator[None]:
    before = getattr(_BUSY, "on", False)
    _BUSY.on = True
    follow_structure(host, state)  # outside of `untouched`, which would undo it
    try:
        with (
            untouched(host),
            untouched(state.scaling),
            foreign_hooks_marked(host),
            without_freeu(host),
            state.tally.standing_in(factors),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            random.seed(0)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            _set_modes(host, modes)
            yield
    finally:
        _BUSY.on = before


@contextmanager
def _inside(host: nn.Module, observer: _Observer) -> Iterator[None]:
    """Lets the observer know in which of the modules that matter it is."""
    handles = []
    for name in observer.changes.modules:
        module = host.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: observer.inside.append(name)))
        handles.append(module.register_forward_hook(lambda *_: observer.inside.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Inputs and outputs.


def _copied(call: Call) -> tuple[Any, Any]:
    """Inputs that a model may change in place, draw from or empty."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return without_subclass(value).detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, str | int | float | complex | bool | type(None) | nn.Module):
            return value
        try:
            return copy.deepcopy(value)
        except Exception:
            return value

    args, kwargs = call
    return pytree.tree_map(copied, tuple(args)), pytree.tree_map(copied, dict(kwargs))


def _lively(value: Any) -> Any:
    """Zeros as example inputs leave networks without biases at zero: noise in their place."""
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        dead = tensor.is_floating_point() and tensor.dim() > 2 and not bool(tensor.any())
        return torch.randn(tensor.shape, generator=generator).to(tensor) if dead else tensor

    return pytree.tree_map_only(Tensor, filled, value)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors of a result, whatever they are packed in."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, str | bytes | int | float | complex | nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        items = value
    else:
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
        items = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    for item in items:
        yield from tensors_in(item, seen)


def _is_comparable(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not tensor.is_meta and tensor.layout == torch.strided and tensor.numel() > 0


def _sample(tensor: Tensor) -> Tensor:
    """Up to some hundreds of its values; a prime number, so that no axis is met at the same place again and again."""
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = values.reshape(-1)
    return flat[:: max(flat.numel() // 509, 1)][:1024].clone()


def _first_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float | None:
    if len(found) != len(wanted):
        return float("inf")
    loosest = 0.0
    for one, other in zip(found, wanted, strict=True):
        loosest = max(loosest, _TOLERANCES.get(other.dtype, 1e-1))
        far = _distance(one, other, loosest)
        if far is not None:
            return far
    return None


def _distance(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> float | None:
    """How far apart they are, relative to the largest value; None if that is within the tolerance."""
    tolerance = _TOLERANCES.get(wanted.dtype, 1e-1) if tolerance is None else tolerance
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    one, other = found.double().nan_to_num(), wanted.double().nan_to_num()
    size = float(other.abs().max())
    far = float((one - other).abs().max())
    return far / max(size, 1e-30) if far > tolerance * size else None


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
        modes = _modes(host.model, False)
        seen = []
        for inputs in ((args, kwargs), _with_another_image((args, kwargs), batch)):
            with _quietly(host.model, state, modes, None):
                copied = _copied(inputs)
                host.model(*copied[0], **copied[1])
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
        modes = _modes(host.model, False)
        with suppress(Exception):
            before = _run(host.model, state, call, modes, {})
    yield
    if before is None or state is None or call is None:
        return
    after = _run(host.model, state, call, _modes(host.model, False), {})
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
    observer = _Observer(_Changes(), results_without=weights)
    result = _run(host.model, state, call, _modes(host.model, False), factors, observer=observer)
    return result.outputs, result.readings


def is_same_function(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> bool:
    return all(_first_difference(found, wanted) is None for found, wanted in zip(other, one, strict=True))


def can_verify(host: Host, call: Call | None) -> bool:
    return call is not None and _can_run(host.model, call)


# For others that compare forwards.


def verifying() -> bool:
    """Whether the forward that runs in this thread is one of ours."""
    return getattr(_BUSY, "on", False)


def changing_operand(merge: Merge, operand: int, change: Change) -> TorchDispatchMode:
    """A mode in which one operand of a recorded merge is changed, whatever module or function takes it."""
    name, number, position = _operation(merge, operand)
    changes = _Changes()
    changes.operations[name, number].append((position, change))
    return _Observer(changes)


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float | None:
    """How far apart they are, relative to the largest value; None if that is rounding."""
    return _first_difference(found, wanted)
