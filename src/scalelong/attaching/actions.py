"""What is done at a merge: an operand is scaled, whole or as a slice. The hooks that do it, and the count of them."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import SkipMismatchError
from ..scaling import SkipScaling
from ..tracing import TreePath

AGAIN = (
    "The plan holds for the path that it was made with: unscale_ the model and scale it with example_inputs like these"
)


def running_backward() -> int:
    """The backward that is running, or -1: what is called inside it computes again what a forward has computed."""
    return torch._C._current_graph_task_id()


# What the edits of a model do in a thread.


@dataclass(frozen=True)
class Mode:
    """The edits scale as their method says (`REAL`), do nothing (`OFF`), or multiply by constants, by slot."""

    is_off: bool = False
    constants: dict[int, float] | None = None
    unseen: bool = False
    """Whether modes that watch the operations of the model do not see those of the edits."""


REAL, OFF, UNSEEN = Mode(), Mode(is_off=True), Mode(unseen=True)


class ScalingSwitch:
    """The mode of a scaled model. Each thread has its own; compiled code always scales."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def mode(self) -> Mode:
        return REAL if torch.compiler.is_compiling() else getattr(self._thread, "mode", REAL)

    @contextmanager
    def set_to(self, mode: Mode) -> Iterator[None]:
        before = self.mode
        self._thread.mode = mode
        try:
            yield
        finally:
            self._thread.mode = before

    def __reduce__(self) -> Any:
        return ScalingSwitch, ()


# Every edit must act once in each forward of the model. A skip that is bypassed or scaled twice is an error.


class ForwardCounter:
    """How often each edit has acted in the forward that is running. Each thread has its own, as it has its own forward.

    Outside of a forward of the model nothing is counted: a block may be called by itself, or activation checkpointing
    computes it again.
    """

    def __init__(self, labels: Sequence[str], repeats: int, switch: ScalingSwitch) -> None:
        self.labels = list(labels)
        self.repeats, self.switch = repeats, switch
        self.after: dict[int, str | None] = {}
        """The last of the modules with an `OrderHook` before each edit, by slot, as it was when verified."""
        self._forwards = threading.local()
        self._traced: list[int] = []
        self._compiled = False

    def add(self, label: str) -> int:
        """One more slot."""
        self.labels.append(label)
        return len(self.labels) - 1

    def begin(self) -> None:
        if torch.compiler.is_compiling():
            self._traced = [0] * len(self.labels)
            return
        running = self._running()
        if len(running) > 32:  # forwards that ended with an exception
            running.clear()
        running.append((running_backward(), [0] * len(self.labels)))
        self._forwards.last = None

    def count(self, slots: Sequence[int]) -> None:
        if torch.compiler.is_compiling():
            if not self._traced:
                # A compiled block in a model that is not compiled: its runs cannot be counted.
                self._compiled = True
                return
            counts = self._traced
        else:
            running = self._running()
            if not running or running[-1][0] != running_backward():
                return
            counts = running[-1][1]
            if self.after:
                self._require_place(slots)
            learned = getattr(self._forwards, "learned", None)
            if learned is not None:
                learned.update(dict.fromkeys(slots, self._forwards.last))
        for slot in slots:
            counts[slot] += 1
            if counts[slot] > self.repeats == 1:
                raise SkipMismatchError(f"{self.labels[slot]} is reached a second time in one forward. {AGAIN}")

    def _require_place(self, slots: Sequence[int]) -> None:
        """An expression in a loop merges a different skip each time: the layer before it tells which."""
        last = self._forwards.last
        for slot in slots:
            if self.after.get(slot, last) != last:
                raise SkipMismatchError(
                    f"{self.labels[slot]} is merged after {last or 'no layer'} in this forward, and was after "
                    f"{self.after[slot] or 'no layer'}: the model takes its skips in another order, or not all. "
                    f"{AGAIN}"
                )

    def note(self, module: str) -> None:
        """A module with an `OrderHook` has run."""
        self._forwards.last = module

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Note what the edits run after."""
        self.after = {}
        learned: dict[int, str | None] = {}
        self._forwards.learned = learned
        try:
            yield
        finally:
            self._forwards.learned = None
        self.after = learned

    def end(self) -> None:
        if torch.compiler.is_compiling():
            counts, self._traced = self._traced, []
        else:
            running = self._running()
            counts = running.pop()[1] if running else []
        if self.switch.mode.is_off:
            return
        # A network that runs several times may do so as often as it likes, but then with all of its skips.
        wanted = max(counts, default=0) if self.repeats > 1 else 1
        for label, count in zip(self.labels, counts, strict=False):
            if count != max(wanted, 1) and not self._compiled:
                raise SkipMismatchError(
                    f"{label} was reached {count} times in this forward instead of {max(wanted, 1)}: the model took "
                    f"another path, or a layer, its forward or its hooks were replaced. {AGAIN}"
                )

    def _running(self) -> list[tuple[int, list[int]]]:
        forwards = self._forwards
        if not hasattr(forwards, "counts"):
            forwards.counts = []
        return forwards.counts

    def __getstate__(self) -> dict[str, Any]:
        return {"labels": self.labels, "repeats": self.repeats, "after": self.after, "switch": self.switch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["labels"], state["repeats"], state["switch"])
        self.after = dict(state["after"])


# What happens to a tensor on its way into a merge. Plain objects, so that copies and pickles of a model keep them.


class Action:
    """Checks that the tensor is the planned one: the plan holds for the path that was traced, and for no other."""

    def __init__(self, label: str, axis: int, channels: int) -> None:
        self.label, self.axis, self.channels = label, axis, channels
        self.counter: ForwardCounter | None = None
        self.slots: tuple[int, ...] = ()

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise SkipMismatchError(f"{self.label}: expected a tensor, found {type(tensor).__name__}")
        # While torch.jit traces, sizes are tensors.
        fits = torch._C._get_tracing_state() is not None or (
            tensor.dim() > self.axis and tensor.shape[self.axis] == self.channels
        )
        if not fits:
            raise SkipMismatchError(
                f"{self.label}: expected {self.channels} channels on axis {self.axis}, found the shape "
                f"{tuple(tensor.shape)}. {AGAIN}"
            )
        if self.counter is not None:
            self.counter.count(self.slots)
            mode = self.counter.switch.mode
            if mode.constants is not None:
                return self.stand_in(tensor, [mode.constants.get(slot, 1.0) for slot in self.slots])
            if mode.unseen:
                with _disable_current_modes():
                    return self.apply(tensor)
        return self.apply(tensor)

    def apply(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def stand_in(self, tensor: Tensor, factors: list[float]) -> Tensor:
        """The same with constants, one for each operand."""
        return tensor * factors[0]


class Pass(Action):
    """An execution of a merge's expression that is not scaled. It counts: if one is left out, the others move up."""

    def __init__(self, label: str) -> None:
        super().__init__(label, 0, 0)

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.counter is not None:
            self.counter.count(self.slots)
        return tensor


class Multiply(Action):
    """One operand times a constant."""

    def __init__(self, label: str, axis: int, channels: int, factor: float) -> None:
        super().__init__(label, axis, channels)
        self.factor = factor

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self.factor


class HasScaling(Protocol):
    """What a scaled model remembers. Gates ask it for the scaling each time: PEFT trains a copy of it."""

    scaling: SkipScaling


class Gate(Action):
    """One operand as its method scales it."""

    def __init__(self, label: str, axis: int, channels: int, state: HasScaling, index: int, main: bool) -> None:
        super().__init__(label, axis, channels)
        self.state, self.index, self.main = state, index, main

    def apply(self, tensor: Tensor) -> Tensor:
        return _scaled(tensor, self.state.scaling, self.index, self.main)


class ScaleMerged(Action):
    """A concatenation as a whole, as its method changes it."""

    def __init__(self, label: str, axis: int, channels: int, state: HasScaling, index: int, skip_start: int) -> None:
        super().__init__(label, axis, channels)
        self.state, self.index, self.skip_start = state, index, skip_start

    def apply(self, tensor: Tensor) -> Tensor:
        return self.state.scaling.scale_merged(tensor, self.index, self.skip_start)


class MultiplySlices(Action):
    """Slices of a concatenation times constants, in one multiplication by a vector over the channels.

    That is cheaper than to split and concatenate again, and safe with gradients, unlike a change in place.
    """

    def __init__(self, label: str, axis: int, channels: int, factors: list[tuple[int, int, float]]) -> None:
        super().__init__(label, axis, channels)
        self.factors = factors
        self._vectors: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self._vector(tensor)

    def _vector(self, tensor: Tensor) -> Tensor:
        # A compiled graph has its own constants, and a fake tensor must not be remembered for a real one.
        if torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter):
            return self._new_vector(tensor)
        key = (tensor.device, tensor.dtype, tensor.dim())
        if key not in self._vectors:
            with torch.inference_mode(False), torch.no_grad():
                self._vectors[key] = self._new_vector(tensor)
        return self._vectors[key]

    def _new_vector(self, tensor: Tensor) -> Tensor:
        values = torch.ones(self.channels, dtype=tensor.dtype, device=tensor.device)
        for start, length, factor in self.factors:
            values[start : start + length] = factor
        shape = [1] * tensor.dim()
        shape[self.axis] = self.channels
        return values.view(shape)

    def stand_in(self, tensor: Tensor, factors: list[float]) -> Tensor:
        pairs = zip(self.factors, factors, strict=True)
        return MultiplySlices(
            self.label, self.axis, self.channels, [(start, length, factor) for (start, length, _), factor in pairs]
        ).apply(tensor)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_vectors": {}}


class GateSlices(Action):
    """The slices of a concatenation that are the operands, as their method scales them: (start, length, is main)."""

    def __init__(
        self,
        label: str,
        axis: int,
        channels: int,
        slices: list[tuple[int, int, bool]],
        state: HasScaling,
        index: int,
    ) -> None:
        super().__init__(label, axis, channels)
        self.slices = slices
        self.state, self.index = state, index

    def stand_in(self, tensor: Tensor, factors: list[float]) -> Tensor:
        pairs = zip(self.slices, factors, strict=True)
        return MultiplySlices(
            self.label, self.axis, self.channels, [(start, length, factor) for (start, length, _), factor in pairs]
        ).apply(tensor)

    def apply(self, tensor: Tensor) -> Tensor:
        scaling, index, parts, at = self.state.scaling, self.index, [], 0
        for start, length, main in sorted(self.slices):
            operand = tensor.narrow(self.axis, start, length)
            if main or torch.is_grad_enabled():
                scaled = _scaled(operand, scaling, index, main)
            else:
                scaled, constants, gate = scaling.prepare(operand, index)
                if gate is not None and len(self.slices) == 1 and self._is_by_channel(gate, length):
                    # One multiplication instead of a split and a concatenation. With gradients it would cost more:
                    # the backward would go through the channels that are not scaled, too.
                    return tensor * self._factors(tensor, gate)
                scaled = scaled if gate is None else scaled * gate.to(scaled.dtype)
                scaled = scaled if constants.skip == 1.0 else scaled * constants.skip
            if start > at:
                parts.append(tensor.narrow(self.axis, at, start - at))
            parts.append(scaled)
            at = start + length
        if at < self.channels:
            parts.append(tensor.narrow(self.axis, at, self.channels - at))
        return torch.cat(parts, dim=self.axis)

    def _is_by_channel(self, gate: Tensor, length: int) -> bool:
        """(B, C, 1, 1), or alike: not a number, and not one for every position."""
        return gate.dim() > self.axis > 0 and gate.shape[self.axis] == length == gate.numel() // gate.shape[0]

    def _factors(self, tensor: Tensor, gate: Tensor) -> Tensor:
        """The gate, and ones for all other channels."""
        start, length, _ = self.slices[0]
        shape = list(gate.shape)
        shape[self.axis] = self.channels
        factors = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
        factors.narrow(self.axis, start, length).copy_(gate)
        return factors


def _scaled(tensor: Tensor, scaling: SkipScaling, index: int, main: bool) -> Tensor:
    return scaling.scale_main(tensor, index) if main else scaling.scale(tensor, index)


# Hooks that edit one or more tensors among the arguments or in the result of a module.


class ArgumentHook:
    """A forward pre-hook."""

    def __init__(self, switch: ScalingSwitch) -> None:
        self.switch = switch
        self.edits: list[tuple[TreePath, Action]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.switch.mode.is_off:
            return None
        value: Any = (args, kwargs)
        for path, action in self.edits:
            value = edited(value, path, action, module)
        return value


class OutputHook:
    """A forward hook."""

    def __init__(self, switch: ScalingSwitch) -> None:
        self.switch = switch
        self.edits: list[tuple[TreePath, Action]] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        if self.switch.mode.is_off:
            return None
        for path, action in self.edits:
            output = edited(output, path, action, module)
        return output


class OrderHook:
    """A forward hook that tells the counter that a module has run."""

    def __init__(self, counter: ForwardCounter, name: str) -> None:
        self.counter, self.name = counter, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if not torch.compiler.is_compiling():
            self.counter.note(self.name)


def edited(value: Any, path: TreePath, action: Callable[[Tensor], Tensor], module: nn.Module) -> Any:
    """A copy of nested tuples, lists and dictionaries in which one tensor is changed."""
    if not path:
        return action(value)
    step, *rest = path
    try:
        inner = value[step]
    except (KeyError, IndexError, TypeError) as error:
        label = getattr(action, "label", "long skip")
        raise SkipMismatchError(
            f"{label}: {type(module).__name__} was called without it (looked for {path!r}). {AGAIN}"
        ) from error
    changed = edited(inner, tuple(rest), action, module)
    if isinstance(value, tuple) and isinstance(step, int):
        items = [*value[:step], changed, *value[step + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    # Plain containers by plain means: the compiler can follow those.
    result: Any = {**value} if type(value) is dict else [*value] if type(value) is list else copy.copy(value)
    result[step] = changed
    return result
