"""Forwards of a scaled model that must not see each other: what verifying and folding compare.

Each starts from the same state with the same random numbers, on the same inputs. An observer notes what every layer
gets and gives, because a new network often ends in a layer of zeros that hides everything, and can change the recorded
operand of a recorded merge. All of it leaves no trace.
"""

import copy
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ScaleLongError, VerificationError
from ..finding import SkipPlan, without_freeu, without_subclass
from ..tracing import (
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
from .actions import OFF, Attached, Edit, Mode
from .attach import attached, follow_structure
from .host import Host

Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
# How far two ways to compute the same may be apart, relative to the largest value: roundings grow from layer to layer.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LAYERS = re.compile(r"conv|mm|linear|attention|lstm|gru|rnn|(?<!vector)(?<!matrix)_norm")
WAY_OUT = "Nothing was changed. Leave this skip out (exclude=...), or, if you know better, pass verify=False"


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


@dataclass(frozen=True)
class Place:
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


# Runs.


class Observer(TorchDispatchMode):
    """Counts operations, changes recorded operands, and notes what layers get and give."""

    def __init__(self, changes: list[tuple[Place, Change]], without: set[int] | None) -> None:
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


def _distance(found: Tensor, wanted: Tensor, tolerance: float) -> float | None:
    """How far apart they are, relative to the largest value; None if that is within the tolerance."""
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
        self.failure: Exception | None = None
        """Why the most recent trace could not be made."""
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
            except Exception as error:
                self.failure = error
                return None

    def run(
        self,
        call: Call,
        mode: Mode,
        changes: Sequence[tuple[Place, Change]] = (),
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
            return Result(_samples(_tensors_in(output)), observer.readings)

    def run_scaled(self, call: Call, mode: Mode) -> Result:
        """The same, of the scaled model: what it raises is an error of the scaling."""
        try:
            return self.run(call, mode)
        except Exception as error:
            kind = "" if isinstance(error, ScaleLongError) else f" with {type(error).__name__}"
            raise VerificationError(
                f"the scaled {type(self.host).__name__} fails where the plain one runs{kind}: {error}. {WAY_OUT}"
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
