"""Prove that a scaled model computes what it should.

The model runs twice on the same inputs with the same random numbers. In the first run its scaling is off, and a
dispatch mode counts the operations and multiplies the recorded operand of each recorded merge: the reference. It shares
nothing with hooks and rewritten functions. In the second run the edits themselves act. Both runs note what every layer
gets and gives, because a new network often ends in a layer of zeros that hides everything. Each edit has a factor of
its own, so that one which does not act, or acts on something else, shows.

    reference   unscaled model, cat(x, f_i · skip_i) by the mode
    found       scaled model, every edit multiplies by its f_i

Methods that look at the data are then compared once more as they are, with the gate at the merge. All of this leaves no
trace: random states, buffers, weights, training flags, attributes and gradients are as before.
"""

import copy
import logging
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ScaleLongError, UnsupportedModelError, VerificationError
from ..finding import ExampleInputs, LongSkip, SkipPlan, candidates, example_call, without_freeu, without_subclass
from ..scaling import NoScaling, SkipScaling
from ..tracing import (
    Merge,
    StateSnapshot,
    Trace,
    counted_as,
    foreign_hooks_marked,
    held_tensors,
    in_foreign_hook,
    isolated_run,
    leaves,
    record_forward,
)
from .actions import OFF, REAL, UNSEEN, Attached, Edit, Mode
from .attach import attached, follow_structure, weights_reading
from .host import Host, require_scaled

logger = logging.getLogger(__name__)

Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
# How far two ways to compute the same may be apart, relative to the largest value: roundings grow from layer to layer.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LAYERS = re.compile(r"conv|mm|linear|attention|lstm|gru|rnn|(?<!vector)(?<!matrix)_norm")
WAY_OUT = "Nothing was changed. Leave this skip out (exclude=...), or, if you know better, pass verify=False"


def verify(model: nn.Module, example_inputs: ExampleInputs = None) -> None:
    """Prove on these inputs that the scaled model computes what it should, in evaluation and in training mode.

    `scale_skips_` does so on its example inputs. Call it for inputs of another size or kind, or after the model was
    changed. A difference raises VerificationError. The model is left as it was, random states included.
    """
    host = require_scaled(model)
    if host.state is None:
        return  # the model scales its skips itself
    call = example_call(host.model, example_inputs)
    reason = obstacle_to_reruns(host.model, host.state.plan, call)
    if reason:
        raise UnsupportedModelError(f"this {type(host.model).__name__} cannot be verified: {reason}")
    verify_attached(host.model, host.state, call)


def verify_attached(host: nn.Module, state: Attached, call: Call) -> None:
    """Verify a scaling in evaluation and in training mode, where the model can run on these inputs."""
    if not state.edits or obstacle_to_reruns(host, state.plan, call):
        return
    call, operands = _without_zeros(call), []
    with rerunning(host, state) as runs:
        for training in (False, True):
            runs.train(training)
            trace = runs.trace(call)
            # Some models cannot be trained on such inputs, as BatchNorm cannot on one value per channel.
            if trace is not None:
                before, operands = operands, _operands(trace, state.plan)
                _require_alike(before, operands, "in training")
                _compare(runs, call, _places(host, trace, state))
        runs.train(False)
        trace = runs.trace(_half_size(call))
        if trace is not None:
            _require_alike(operands, _operands(trace, state.plan), "at half the size of these inputs")


def _half_size(call: Call) -> Call:
    """A second path for small inputs may take the operands in a different order, which no count would notice."""

    def halved(tensor: Tensor) -> Tensor:
        return tensor[(..., *(slice(size // 2) for size in tensor.shape[2:]))] if tensor.dim() > 3 else tensor

    return pytree.tree_map_only(Tensor, halved, call)


def _require_alike(one: list[set[int]], other: list[set[int]], when: str) -> None:
    swapped = [n for n, (a, b) in enumerate(zip(one, other, strict=False), start=1) if a and b and a != b]
    if swapped:
        raise VerificationError(
            f"the operands of long skip {swapped[0]} change places {when}: which is the skip depends on the inputs. "
            f"{WAY_OUT}"
        )


def _operands(trace: Trace, plan: SkipPlan) -> list[set[int]]:
    """For each long skip: the operands of its merge that go around a path, as this forward shows it."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for candidate in candidates(trace):
        found[candidate.end].add(candidate.operand)
    unnamed = [skip for skip in plan if not skip.is_named]
    return [{n for merge in _merges(trace, skip, plan.repeats) for n in found[merge.node]} for skip in unnamed]


def obstacle_to_reruns(host: nn.Module, plan: SkipPlan, call: Call) -> str:
    """Why the model cannot be run once more on these inputs; empty if it can."""
    tensors = [*host.parameters(), *host.buffers(), *map(without_subclass, _tensors_in(call))]
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


# One comparison: the scaled model against the reference, for one call in one mode.


def _compare(runs: "Reruns", call: Call, places: list["_Place"]) -> None:
    state, edits = runs.state, runs.state.edits
    factors = {slot: 0.4 + 0.5 * (0.618034 * (slot + 1) % 1) for slot in range(len(edits)) if places[slot].is_known}

    def difference(factors: dict[int, float]) -> float | None:
        wanted = runs.run(call, OFF, [(places[slot], _times(factor)) for slot, factor in factors.items()])
        return runs.run_scaled(call, Mode(constants=factors)).difference(wanted)

    far = difference(factors)
    if far is not None:
        raise _blame(runs, call, factors, difference, far)
    learned = [slot for slot, edit in enumerate(edits) if edit.factor is None]
    if not learned or any(places[slot].axis != edits[slot].attachment.axis for slot in learned):
        return
    with _random_gates(state.scaling):
        wanted = runs.run(call, OFF, [(place, _as_method(state, place.edit)) for place in places])
        found = runs.run_scaled(call, UNSEEN)
    for index in dict.fromkeys(edits[slot].skip.index for slot in learned):
        far = _distance(found.coefficients[index], wanted.coefficients[index])
        if far is not None:
            raise VerificationError(
                f"the coefficient of long skip {index} differs by {far:.1e} from that of the tensor that enters its "
                f"merge: what lies between ({state.plan[index].places.skip}) does not commute with "
                f"{type(state.scaling.config).__name__}. {WAY_OUT}"
            )
    far = found.difference(wanted)
    if far is not None:
        raise VerificationError(
            f"the scaled {type(runs.host).__name__} differs by {far:.1e} from one whose skips are scaled at their "
            f"merges. {WAY_OUT}"
        )


def _blame(
    runs: "Reruns",
    call: Call,
    factors: dict[int, float],
    difference: Callable[[dict[int, float]], float | None],
    far: float,
) -> VerificationError:
    """Which skip is at fault: each by itself."""
    plain, again = (runs.run(call, OFF) for _ in range(2))
    if again.difference(plain) is not None:
        return VerificationError(
            f"{type(runs.host).__name__} gives different results for the same inputs and random seed, so its scaling "
            f"cannot be verified. Nothing was changed. Make its randomness follow torch's seed, or pass verify=False"
        )
    wrong = [runs.state.edits[slot] for slot in factors if difference({slot: factors[slot]}) is not None]
    named = "; ".join(f"{edit.label} as {edit.attachment}, merged at {edit.skip.merge.location}" for edit in wrong[:4])
    return VerificationError(
        f"{'in training mode, ' if runs.training else ''}scaling {named or 'the skips together'} does not change its "
        f"merge, or not that alone: the layers differ by {far:.1e}. {WAY_OUT}"
    )


def _as_method(state: Attached, edit: Edit) -> Change:
    return lambda tensor: edit.scaled(tensor, state.scaling)


def _times(factor: float) -> Change:
    return lambda tensor: tensor * factor


# Where the merges of a plan are in the forward at hand.


@dataclass(frozen=True)
class _Place:
    """Where the reference scales an operand."""

    edit: Edit
    operations: tuple[tuple[str, int, int | None], ...] = ()
    """By name and number in the forward, with the position of a tensor among the arguments; None: the result."""
    axis: int = -1
    weights: tuple[Tensor, ...] = ()
    """After a norm: the weights that read the skip, as views."""

    @property
    def is_known(self) -> bool:
        return bool(self.operations or self.weights)


def _places(host: nn.Module, trace: Trace, state: Attached) -> list[_Place]:
    """Where each edit belongs."""
    places = []
    for edit in state.edits:
        if edit.after_norm:
            target = edit.attachment
            layer = host.get_submodule(target.module)
            # An adapter, or a weight that is computed: what reads the skip is not one tensor.
            plain = isinstance(layer._parameters.get("weight"), Tensor)
            views = weights_reading(layer, target.start, target.length) if plain else ()
            places.append(_Place(edit, axis=target.axis, weights=tuple(views)))
            continue
        merges, merge = _merges(trace, edit.skip, state.plan.repeats), edit.skip.merge
        if not merges:
            raise VerificationError(
                f"the merge of long skip {edit.skip.index} is number {merge.occurrence + 1} of those at "
                f"{merge.location} in the plan, and did not run there now"
            )
        whole = edit.operand == "merged"
        number = 0 if whole else merge.main_operand if edit.operand == "main" else merge.operand
        operations = tuple((found.name, found.ordinal, None if whole else found.positions[number]) for found in merges)
        axis = edit.skip.site.channel_axis if merges[0].axis is None else merges[0].axis
        places.append(_Place(edit, operations, axis % len(merges[0].shapes[number])))
    return places


def _merges(trace: Trace, skip: LongSkip, repeats: int) -> list[Merge]:
    """The merge of a skip, in each run of the network."""
    named = [merge for merge in trace.merges if merge.named is not None and merge.named[0] == skip.index]
    if named and skip.is_named:
        return named
    place = (skip.merge.location, skip.merge.module, skip.merge.kind)
    here = [merge for merge in trace.merges if (merge.site.text, merge.call.name, merge.kind) == place]
    per_run = len(here) // repeats
    numbers = [skip.merge.occurrence + run * per_run for run in range(repeats)]
    fits = len(here) % repeats == 0 and numbers[-1] < len(here)
    return [here[number] for number in numbers] if fits else []


# Runs.


class Observer(TorchDispatchMode):
    """Counts operations, changes recorded operands, and notes what layers get and give."""

    def __init__(self, changes: list[tuple[_Place, Change]], without: set[int] | None) -> None:
        super().__init__()
        self.changes: defaultdict[tuple[str, int], list[tuple[int | None, Change]]] = defaultdict(list)
        for place, change in changes:
            for name, number, position in place.operations:
                self.changes[name, number].append((position, change))
        self.counts, self.without = Counter[str](), without
        """`without`, if given: note results alone, and not those of layers with these weights."""
        self.readings: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        counted = counted_as(name)
        changes = self.changes.get((counted, self.counts[counted]), ())
        self.counts[counted] += 1
        for position, change in changes:
            if position is not None:
                args, kwargs = _with_changed(args, kwargs, position, change, func._schema.is_mutable)
        result = func(*args, **kwargs)
        for position, change in changes:
            result = change(result) if position is None else result
        # What a hook measures is not what the network computes; what it changes, the next layers show.
        if _LAYERS.search(name) is not None and not in_foreign_hook():
            given, made = ([leaf for leaf in pytree.tree_leaves(v) if isinstance(leaf, Tensor)] for v in (args, result))
            if self.without is None:
                made = [*given[:2], *made]  # weights come last
            elif any(tensor.data_ptr() in self.without for tensor in given):
                made = []
            self.readings += _samples(made)
        return result


def _with_changed(args: Any, kwargs: Any, position: int, change: Change, mutable: bool) -> tuple[Any, Any]:
    values, structure = pytree.tree_flatten((args, kwargs))
    at = [number for number, leaf in enumerate(values) if isinstance(leaf, Tensor)][position]
    # An operation in place writes into its first operand: all who hold it see the result.
    changed = change(values[at])
    values[at] = values[at].copy_(changed) if mutable and position == 0 else changed
    return pytree.tree_unflatten(values, structure)


@dataclass
class Result:
    """What a run made and what its layers got and gave, as samples."""

    outputs: list[Tensor]
    readings: list[Tensor]
    coefficients: dict[int, Tensor] = field(default_factory=dict)

    def difference(self, wanted: "Result") -> float | None:
        """How far the first values are apart that differ; None if all are the same."""
        for ours, theirs in ((self.readings, wanted.readings), (self.outputs, wanted.outputs)):
            if len(ours) != len(theirs):
                return float("inf")
            loosest = 0.0
            for one, other in zip(ours, theirs, strict=True):
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
    one, other = (value.cpu().double().nan_to_num() for value in (found, wanted))  # some devices have no float64
    size = float(other.abs().max())
    far = float((one - other).abs().max())
    return far / max(size, 1e-30) if far > tolerance * size else None


def _samples(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Up to some hundreds of values of each; a prime number, so that no axis is met at the same place every time."""
    found = []
    for tensor in tensors:
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if is_number and not tensor.is_meta and tensor.layout == torch.strided and tensor.numel() > 0:
            real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
            flat = real.reshape(-1)
            found.append(flat[:: max(flat.numel() // 509, 1)][:1024].clone())
    return found


class Reruns:
    """Forwards of one scaled model. Each starts from the same state, with the same random numbers."""

    def __init__(self, host: nn.Module, state: Attached, snapshot: StateSnapshot) -> None:
        self.host, self.state, self.snapshot = host, state, snapshot
        self.train(False)

    def train(self, training: bool) -> None:
        """The training flags as `host.train(training)` sets them, which some models do in their own way."""
        self.snapshot.restore()
        self.host.train(training)
        self.training, self._flags = training, [module.training for module in self.host.modules()]

    @contextmanager
    def prepared(self, mode: Mode) -> Iterator[None]:
        """The state in which a forward starts."""
        self.snapshot.restore()
        self.snapshot.seed()
        for module, training in zip(self.host.modules(), self._flags, strict=True):
            module.training = training
        with self.state.counter.set_to(mode):
            yield

    def trace(self, call: Call) -> Trace | None:
        """The forward of the unscaled model; None if it cannot run so."""
        with self.prepared(OFF):
            try:
                return record_forward(self.host, *_copied(call))
            except Exception:
                return None

    def run(
        self,
        call: Call,
        mode: Mode,
        changes: Sequence[tuple[_Place, Change]] = (),
        without: set[int] | None = None,
    ) -> Result:
        """One forward, with operands changed on their way into operations and layers."""
        # A scaled weight is not a scaled input: only what its layer gives can be compared.
        is_after_norm = any(edit.after_norm for edit in self.state.edits)
        observer = Observer([*changes], set() if without is None and is_after_norm else without)
        with self.prepared(mode):
            for place, change in changes:
                for weights in place.weights:
                    weights.copy_(change(weights))  # restored with all weights
            args, kwargs = _copied(call)
            with observer:
                output = self.host(*args, **kwargs)
            coefficients = {}
            for edit in self.state.edits if mode.constants is None else ():
                if edit.factor is None:
                    try:
                        value = self.state.scaling.coefficient(edit.skip.index)
                    except ScaleLongError:  # a run without gates
                        value = 1.0
                    coefficients[edit.skip.index] = _samples([torch.as_tensor(value)])[0]
            return Result(_samples(_tensors_in(output)), observer.readings, coefficients)

    def run_scaled(self, call: Call, mode: Mode) -> Result:
        """The same, of the scaled model: what it raises is an error of the scaling."""
        try:
            return self.run(call, mode)
        except ScaleLongError as error:
            raise VerificationError(f"{error}. {WAY_OUT}") from error
        except Exception as error:
            raise VerificationError(
                f"the scaled {type(self.host).__name__} fails where the plain one runs: {type(error).__name__}: "
                f"{error}. {WAY_OUT}"
            ) from error


@contextmanager
def rerunning(host: nn.Module, state: Attached) -> Iterator[Reruns]:
    """Run the model as often as needed. One snapshot serves all runs, and afterwards everything is as it was."""
    follow_structure(host, state)  # outside of the isolated run, which would undo it
    with (
        foreign_hooks_marked(host),
        without_freeu(host),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
        isolated_run(host, state.scaling) as snapshot,
    ):
        warnings.simplefilter("ignore")
        yield Reruns(host, state, snapshot)


def recomputed(host: nn.Module, call: Call, constants: dict[int, float], without: Sequence[nn.Module]) -> Result:
    """What the model computes with its edits at these constants, the results of these layers apart."""
    state = attached(host)
    assert state is not None
    weights = {layer.weight.data_ptr() for layer in without if isinstance(layer.weight, Tensor)}
    with rerunning(host, state) as runs:
        return runs.run(call, Mode(constants=constants), without=weights)


@contextmanager
def _random_gates(scaling: SkipScaling) -> Iterator[None]:
    """Noise in the weights of the gates: new gates are flat, and one that reads the wrong data shows only so."""
    saved = [(parameter, parameter.detach().clone()) for parameter in scaling.parameters()]
    generator = torch.Generator().manual_seed(0)
    for parameter, _ in saved:
        parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).to(parameter))
    try:
        yield
    finally:
        for parameter, before in saved:
            parameter.copy_(before)


# Inputs.


def _copied(call: Call) -> tuple[Any, Any]:
    """Inputs that a model may change in place, draw from or empty."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return without_subclass(value).detach().clone()
        if isinstance(value, torch.Generator):
            return value.clone_state()
        try:
            return value if isinstance(value, nn.Module) else copy.deepcopy(value)
        except Exception:
            return value

    args, kwargs = call
    return pytree.tree_map(copied, tuple(args)), pytree.tree_map(copied, dict(kwargs))


def _without_zeros(call: Call) -> Call:
    """Zeros as example inputs leave networks without biases at zero: noise in their place."""
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        dead = tensor.is_floating_point() and tensor.dim() > 2 and not bool(tensor.any())
        return torch.randn(tensor.shape, generator=generator).to(tensor) if dead else tensor

    return pytree.tree_map_only(Tensor, filled, (tuple(call[0]), dict(call[1])))


def _tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a result, whatever they are packed in."""
    return [*(tensor for _, tensor in leaves(value)), *held_tensors(value)]


def call_to_keep(call: Call) -> Any:
    """What the inputs look like, without keeping the batch alive; None where they hold objects of unknown content."""

    def noted(value: Tensor) -> Tensor:
        value = without_subclass(value).detach()
        is_large = value.is_floating_point() and value.numel() > 4096
        return torch.empty_like(value, device="meta") if is_large or value.is_meta else value.cpu().clone()

    plain = (Tensor, str, int, float, complex, bool, type(None), torch.dtype, torch.device)
    known = all(isinstance(leaf, plain) for leaf in pytree.tree_leaves(call))
    return pytree.tree_map_only(Tensor, noted, call) if known else None


def recalled(host: Host) -> Call | None:
    """Inputs like those that the model was scaled with, if these are known."""
    inputs = None if host.state is None else host.state.inputs
    generator, weight = torch.Generator().manual_seed(0), next(host.model.parameters(), None)

    def made(value: Tensor) -> Tensor:
        values = torch.randn(value.shape, generator=generator).to(value.dtype) if value.is_meta else value
        return values if weight is None else values.to(weight.device)

    return None if inputs is None else pytree.tree_map_only(Tensor, made, inputs)


# Which axis holds the batch: measured by changing one image.


class _Capture(SkipScaling):
    """Keeps the skips as they come, and changes nothing."""

    def __init__(self, plan: SkipPlan) -> None:
        super().__init__(NoScaling(), plan.sites)
        self.skips: dict[int, Tensor] = {}

    def scale(self, skip: Tensor, index: int) -> Tensor:
        self.skips[index] = skip.detach().clone()
        return skip

    def coefficient(self, index: int) -> float:  # noqa: ARG002
        return 1.0


def with_batch_axes(host: Host, plan: SkipPlan, call: Call) -> SkipPlan:
    """The plan, with the axis of each skip along which the images of a batch lie."""
    if obstacle_to_reruns(host.model, plan, call) or any(skip.places.skip is None for skip in plan):
        return plan
    sizes = [t.shape[0] for t in pytree.tree_leaves(call) if isinstance(t, Tensor) and t.dim() > 1]
    batch = max(sizes[0] if sizes else 1, 2)
    generator = torch.Generator().manual_seed(1)

    def as_batch(value: Tensor) -> Tensor:
        return torch.cat([value, value]) if sizes[:1] in ([], [1]) and value.dim() and len(value) == 1 else value

    def with_another_image(value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dim() < 2 or len(value) != batch:
            return value
        other = value.clone()
        other[0] = torch.randn(value[0].shape, generator=generator).to(value)
        return other

    several = pytree.tree_map_only(Tensor, as_batch, (tuple(call[0]), dict(call[1])))
    capture = _Capture(plan)
    state = Attached(plan, capture)
    host.attach(state)
    seen: list[dict[int, Tensor]] = []
    try:
        with rerunning(host.model, state) as runs:
            for inputs in (several, pytree.tree_map_only(Tensor, with_another_image, several)):
                with runs.prepared(REAL):
                    args, kwargs = _copied(inputs)
                    host.model(*args, **kwargs)
                    seen.append(dict(capture.skips))
    except Exception as error:
        # Not every model takes two images where it was shown one.
        logger.info("the axis of the batch is taken for the first, because two images do not run: %s", error)
        return plan
    finally:
        host.detach()
    skips = []
    for skip in plan:
        axis = skip.site.batch_axis
        if all(skip.index in found for found in seen):
            axis = _batch_axis(seen[0][skip.index], seen[1][skip.index], batch, skip.site.channel_axis)
        skips.append(skip.replace(site=replace(skip.site, batch_axis=axis)))
    return replace(plan, skips=tuple(skips))


def _batch_axis(before: Tensor, after: Tensor, batch: int, channel_axis: int) -> int | None:
    """The axis along which only the share of one image has changed."""
    changed = before != after
    for axis in range(before.dim()):
        if axis == channel_axis % before.dim() or before.shape[axis] % batch:
            continue
        touched = changed.movedim(axis, 0).reshape(before.shape[axis], -1).any(1)
        if int(touched.sum()) * batch == before.shape[axis]:
            return axis
    return None if bool(changed.any()) else 0
