"""A scaled model, run once more for comparison: operands of merges changed, hooks on or off, and nothing left behind.

A run is watched by a dispatch mode, which shares no code with hooks and rewritten functions: what every layer gets and
gives is kept, and two runs are compared.
"""

import copy
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ScaleLongError, VerificationError
from ..finding import without_freeu, without_subclass
from ..scaling import SkipScaling
from ..tracing import Snapshot, Trace, counted_as, foreign_hooks_marked, in_foreign_hook, isolated_run, record_forward
from .actions import OFF, REAL, UNSEEN, Mode
from .attach import Attached, Edit, follow_structure

Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
# How far two ways to compute the same may be apart, relative to the largest value: roundings grow from layer to layer.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LAYERS = re.compile(r"conv|mm|linear|attention|lstm|gru|rnn|(?<!vector)(?<!matrix)_norm")

WAY_OUT = "Nothing was changed. Leave this skip out (exclude=...), or, if you know better, pass verify=False"


@dataclass
class Result:
    outputs: list[Tensor]
    readings: list[Tensor]
    coefficients: dict[int, Tensor] = field(default_factory=dict)


class Observer(TorchDispatchMode):
    """Counts operations, changes recorded operands, and notes what layers get and give."""

    def __init__(self, changes: "Changes", results_without: set[int] | None = None) -> None:
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
            if position is not None:
                args, kwargs = _with_changed(args, kwargs, position, change, func._schema.is_mutable)
        # What a hook measures is not what the network computes; what it changes, the next layers show.
        is_layer = _LAYERS.search(name) is not None and not in_foreign_hook()
        if is_layer and self.inside:
            for change in self.changes.modules.get(self.inside[-1], ()):
                args, kwargs = _with_changed(args, kwargs, int(name == "addmm"), change, False)  # the bias comes first
        result = func(*args, **kwargs)
        for position, change in self.changes.operations.get((counted, number), ()):
            result = change(result) if position is None else result
        if is_layer:
            given, made = ([leaf for leaf in pytree.tree_leaves(v) if isinstance(leaf, Tensor)] for v in (args, result))
            noted = [*given[:2], *made]  # weights come last
            if self.results_without is not None:
                noted = [] if any(tensor.data_ptr() in self.results_without for tensor in given) else made
            self.readings += [_sample(tensor) for tensor in noted if _is_comparable(tensor)]
        return result


@dataclass
class Changes:
    operations: defaultdict[tuple[str, int], list[tuple[int | None, Change]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By name and number of an operation: the position of a tensor among its arguments, or None for its result."""
    modules: defaultdict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))


def _with_changed(args: Any, kwargs: Any, position: int, change: Change, mutable: bool) -> tuple[Any, Any]:
    seen = -1

    def visit(leaf: Any) -> Any:
        nonlocal seen
        if not isinstance(leaf, Tensor):
            return leaf
        seen += 1
        if seen != position:
            return leaf
        # An operation in place writes into its first operand: all who hold it see the result.
        return leaf.copy_(change(leaf)) if mutable and position == 0 else change(leaf)

    return pytree.tree_map(visit, (args, kwargs))


class Reruns:
    """Forwards of one scaled model. Each starts from the same state, with the same random numbers."""

    def __init__(self, host: nn.Module, state: Attached, snapshot: Snapshot) -> None:
        self.host, self.state, self.snapshot = host, state, snapshot

    def modes(self, training: bool) -> list[bool]:
        """The training flags as `host.train(training)` sets them, which some models do in their own way."""
        self.snapshot.restore()
        self.host.train(training)
        return [module.training for module in self.host.modules()]

    @contextmanager
    def prepared(self, modes: list[bool], mode: Mode) -> Iterator[None]:
        """The state in which a forward starts."""
        self.snapshot.restore()
        self.snapshot.seed()
        for module, training in zip(self.host.modules(), modes, strict=True):
            module.training = training
        with self.state.switch.set_to(mode):
            yield

    def trace(self, call: Call, modes: list[bool]) -> Trace | None:
        """The forward of the unscaled model; None if it cannot run so."""
        with self.prepared(modes, OFF):
            try:
                return record_forward(self.host, *copied(call))
            except Exception:
                return None

    def run(
        self,
        call: Call,
        modes: list[bool],
        mode: Mode,
        changes: "Changes | None" = None,
        observer: Observer | None = None,
    ) -> Result:
        """One forward, with operands changed on their way into operations and modules."""
        changes = changes or Changes()
        observer = observer or Observer(changes)
        with self.prepared(modes, mode), _inside(self.host, observer):
            args, kwargs = copied(call)
            with observer:
                output = self.host(*args, **kwargs)
            outputs = [_sample(tensor) for tensor in tensors_in(output) if _is_comparable(tensor)]
            coefficients = {}
            if mode in (REAL, UNSEEN) or changes.operations:
                for edit in self.state.edits:
                    if edit.factor is None:
                        coefficients[edit.skip.index] = _sample(_coefficient(self.state, edit))
        return Result(outputs, observer.readings, coefficients)

    def run_scaled(self, call: Call, modes: list[bool], mode: Mode) -> Result:
        """The same, of the scaled model: what it raises is an error of the scaling."""
        try:
            return self.run(call, modes, mode)
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


@contextmanager
def with_random_gates(scaling: SkipScaling) -> Iterator[None]:
    """Noise in the weights of the gates: new gates are flat, and one that reads the wrong data shows only so."""
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


@contextmanager
def _inside(host: nn.Module, observer: Observer) -> Iterator[None]:
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


def copied(call: Call) -> tuple[Any, Any]:
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


def without_zeros(value: Any) -> Any:
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


def first_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float | None:
    if len(found) != len(wanted):
        return float("inf")
    loosest = 0.0
    for one, other in zip(found, wanted, strict=True):
        loosest = max(loosest, _TOLERANCES.get(other.dtype, 1e-1))
        far = distance(one, other, loosest)
        if far is not None:
            return far
    return None


def distance(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> float | None:
    """How far apart they are, relative to the largest value; None if that is within the tolerance."""
    tolerance = _TOLERANCES.get(wanted.dtype, 1e-1) if tolerance is None else tolerance
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    one, other = found.double().nan_to_num(), wanted.double().nan_to_num()
    size = float(other.abs().max())
    far = float((one - other).abs().max())
    return far / max(size, 1e-30) if far > tolerance * size else None


# Inputs that are remembered without keeping the user's batch alive.

_SMALL = 4096


@dataclass(frozen=True)
class _Like:
    """A tensor that can be made again: small ones and integers as a copy on the CPU, others by their shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None


def remembered(call: Call) -> Any:
    """What the inputs look like; None where they hold objects of unknown content."""

    def noted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_large = value.is_floating_point() and value.numel() > _SMALL
        copy = None if is_large or value.is_meta else without_subclass(value).detach().cpu().clone()
        return _Like(tuple(value.shape), value.dtype, value.device, copy)

    plain = (Tensor, str, int, float, complex, bool, type(None), torch.dtype, torch.device)
    leaves = pytree.tree_leaves(call)
    return pytree.tree_map(noted, call) if all(isinstance(leaf, plain) for leaf in leaves) else None


def recalled(inputs: Any) -> Call | None:
    """Inputs like those that were remembered."""
    generator = torch.Generator().manual_seed(0)

    def made(like: Any) -> Any:
        if not isinstance(like, _Like):
            return like
        values = torch.randn(like.shape, generator=generator) if like.values is None else like.values
        return values.to(like.device, like.dtype)

    return None if inputs is None else pytree.tree_map(made, inputs)
