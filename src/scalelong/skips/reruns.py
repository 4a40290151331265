"""A scaled model, run once more for comparison: operands of merges changed, hooks on or off, and nothing left behind.

A run is watched by a dispatch mode, which shares no code with hooks and rewritten functions: what every layer gets and
gives is kept, and two runs are compared.
"""

import copy
import random
import re
import sys
import threading
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
from ..scaling.base import SkipScaling
from ..tracing import Trace, counted_as, foreign_hooks_marked, in_foreign_hook, record, untouched
from .attach import Attached, Edit, follow_structure
from .examples import without_freeu, without_subclass

Call = tuple[tuple[Any, ...], dict[str, Any]]
Change = Callable[[Tensor], Tensor]
# How far two ways to compute the same may be apart, relative to the largest value: roundings grow from layer to layer.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_LAYERS = re.compile(r"conv|mm|linear|attention|lstm|gru|rnn|(?<!vector)(?<!matrix)_norm")

WAY_OUT = "Nothing was changed. Leave this skip out (exclude=...), or, if you know better, pass verify=False"

BUSY = threading.local()
"""`BUSY.on` while this thread compares forwards."""


@dataclass
class _Result:
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
class Changes:
    operations: defaultdict[tuple[str, int], list[tuple[int, Change]]] = field(
        default_factory=lambda: defaultdict(list)
    )
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
        # An operation in place writes into its first operand: whoever holds it sees the result.
        return leaf.copy_(change(leaf)) if mutable and position == 0 else change(leaf)

    return pytree.tree_map(visit, (args, kwargs))


def observed_run(
    host: nn.Module,
    state: Attached,
    call: Call,
    modes: list[bool],
    factors: dict[int, float] | None,
    changes: Changes | None = None,
    observer: Observer | None = None,
) -> _Result:
    """One forward. `factors`: {} switches the scaling off, None lets it act as it is."""
    changes = changes or Changes()
    observer = observer or Observer(changes)
    with quietly(host, state, modes, factors), _inside(host, observer):
        args, kwargs = copied(call)
        with observer:
            output = host(*args, **kwargs)
        outputs = [_sample(tensor) for tensor in tensors_in(output) if _is_comparable(tensor)]
        coefficients = {}
        if factors is None or changes.operations:
            for edit in state.edits:
                if edit.factor is None:
                    coefficients[edit.skip.index] = _sample(_coefficient(state, edit))
    return _Result(outputs, observer.readings, coefficients)


def run_scaled(
    host: nn.Module, state: Attached, call: Call, modes: list[bool], factors: dict[int, float] | None
) -> _Result:
    try:
        return observed_run(host, state, call, modes, factors)
    except ScaleLongError as error:
        raise VerificationError(f"{error}. {WAY_OUT}") from error
    except Exception as error:
        raise VerificationError(
            f"the scaled {type(host).__name__} fails where the plain one runs: {type(error).__name__}: {error}. "
            f"{WAY_OUT}"
        ) from error


@contextmanager
def awake(scaling: SkipScaling) -> Iterator[None]:
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


def traced(host: nn.Module, state: Attached, call: Call, modes: list[bool]) -> Trace | None:
    """The forward of the unscaled model; None if it cannot run so."""
    with quietly(host, state, modes, {}):
        args, kwargs = copied(call)
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


def modes_of(host: nn.Module, training: bool) -> list[bool]:
    """The training flags as `host.train(training)` sets them, which some models do in their own way."""
    before = [module.training for module in host.modules()]
    with untouched(host):
        _set_modes(host, before)
        host.train(training)
        return [module.training for module in host.modules()]


@contextmanager
def quietly(host: nn.Module, state: Attached, modes: list[bool], factors: dict[int, float] | None) -> Iterator[None]:
    before = getattr(BUSY, "on", False)
    BUSY.on = True
    follow_structure(host, state)  # outside `untouched`, which would undo it
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
        BUSY.on = before


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


def lively(value: Any) -> Any:
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
