"""What is done at a merge, and the count of it.

    Edit             one operand of one merge: multiply it by a constant, or do what the method says
    Action           all edits of one tensor; hooks and rewritten functions call it
    ForwardCounter   every edit must act once in each forward of the model, else the forward raises
    Attached         what a scaled model remembers

Plain objects, so that copies and pickles of a model keep them.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import SkipMismatchError
from ..finding import Attachment, LongSkip, SkipPlan
from ..scaling import SkipScaling
from ..tracing import TreePath

AGAIN = (
    "The plan holds for the path that it was made with: unscale_ the model and scale it with example_inputs like these"
)

REWRITES = "_scalelong_rewrites"
"""The attribute of a module that holds its rewritten functions."""

Operand = Literal["skip", "main", "merged"]
"""What is changed: one operand of the merge, or the concatenation of both."""
IN_WORDS: dict[Operand, str] = {"skip": "", "main": "the main path of ", "merged": "the concatenation of "}


@dataclass(frozen=True)
class Edit:
    """One operand of one merge, and its factor; None: the method computes it."""

    skip: LongSkip
    attachment: Attachment
    factor: float | None
    operand: Operand = "skip"
    after_norm: bool = False

    @property
    def label(self) -> str:
        return f"{IN_WORDS[self.operand]}long skip {self.skip.index} ({self.skip.ends})"

    def scaled(self, tensor: Tensor, scaling: SkipScaling) -> Tensor:
        """The operand as the method changes it."""
        if self.factor is not None:
            return tensor * self.factor
        index = self.skip.index
        if self.operand == "merged":
            return scaling.scale_merged(tensor, index, self.attachment.start)
        return scaling.scale_main(tensor, index) if self.operand == "main" else scaling.scale(tensor, index)


@dataclass(frozen=True)
class Mode:
    """What edits do: what their method says (`REAL`), nothing (`OFF`), or a multiplication by constants, by slot."""

    is_off: bool = False
    constants: dict[int, float] | None = None
    unseen: bool = False
    """Whether modes that watch the operations of the model do not see those of the edits."""


REAL, OFF, UNSEEN = Mode(), Mode(is_off=True), Mode(unseen=True)


def running_backward() -> int:
    """The backward that is running, or -1: what is called inside it computes again what a forward has computed."""
    return torch._C._current_graph_task_id()


class _Thread(threading.local):
    """What a thread knows of its own forwards."""

    def __init__(self) -> None:
        self.mode = REAL
        self.gates: SkipScaling | None = None
        """The gates of the replica that it runs, if it runs one."""
        self.forwards: list[tuple[int, list[int]]] = []
        """For each forward that runs: the backward in which it does, and how often each edit has acted."""


class ForwardCounter:
    """The mode of a scaled model, and how often each edit has acted in the forward that is running.

    Each thread has its own. Compiled code always scales. Outside of a forward of the model nothing is counted: a block
    may be called by itself, or activation checkpointing computes it again.
    """

    def __init__(self, labels: Sequence[str] = (), repeats: int = 1) -> None:
        self.labels = list(labels)
        """One for each edit; the position is its slot."""
        self.repeats = repeats
        """How often each edit acts in one forward; 0 if the model names its merges, each as often as it likes."""
        self._thread = _Thread()
        self._traced: list[int] = []
        self._compiled = False

    @property
    def mode(self) -> Mode:
        return REAL if torch.compiler.is_compiling() else self._thread.mode

    @contextmanager
    def set_to(self, mode: Mode) -> Iterator[None]:
        before, self._thread.mode = self.mode, mode
        try:
            yield
        finally:
            self._thread.mode = before

    @property
    def gates(self) -> SkipScaling | None:
        """The gates of the replica that this thread runs, if it runs one."""
        return None if torch.compiler.is_compiling() else self._thread.gates

    def add(self, label: str) -> int:
        """One more slot."""
        self.labels.append(label)
        return len(self.labels) - 1

    def begin(self, gates: SkipScaling | None = None) -> None:
        if torch.compiler.is_compiling():
            self._traced = [0] * len(self.labels)
            return
        self._thread.gates = gates
        if len(self._thread.forwards) > 32:  # those that ended with an exception
            self._thread.forwards.clear()
        self._thread.forwards.append((running_backward(), [0] * len(self.labels)))

    def count(self, slots: Sequence[int]) -> None:
        if torch.compiler.is_compiling():
            if not self._traced:
                # A compiled block in a model that is not compiled: its runs cannot be counted.
                self._compiled = True
                return
            counts = self._traced
        else:
            forwards = self._thread.forwards
            if not forwards or forwards[-1][0] != running_backward():
                return
            counts = forwards[-1][1]
        for slot in slots:
            counts[slot] += 1
            if counts[slot] > self.repeats == 1:
                raise SkipMismatchError(f"{self.labels[slot]} is reached a second time in one forward. {AGAIN}")

    def end(self) -> None:
        if torch.compiler.is_compiling():
            counts, self._traced = self._traced, []
        else:
            forwards = self._thread.forwards
            counts = forwards.pop()[1] if forwards else []
        if self.mode.is_off:
            return
        # A network that runs several times may do so as often as it likes, but then with all of its skips.
        wanted = max(counts, default=0) if self.repeats > 1 else 1
        for label, count in zip(self.labels, counts, strict=False):
            fits = count == max(wanted, 1) if self.repeats else count > 0
            if not fits and not self._compiled:
                raise SkipMismatchError(
                    f"{label} was reached {count} times in this forward instead of {max(wanted, 1)}: the model took "
                    f"another path, or a layer, its forward or its hooks were replaced. {AGAIN}"
                )

    def __reduce__(self) -> Any:
        return ForwardCounter, (self.labels, self.repeats)


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
    """What the inputs looked like that it was verified with (`verify.remembered`). Pickles leave them out."""
    counter: ForwardCounter = field(default_factory=ForwardCounter)
    edits: list[Edit] = field(default_factory=list)
    """What is changed, in the order of the slots of the counter."""
    registered: nn.Module | None = None
    """While it is detached: what stood for the gates in the model, which PEFT may have wrapped or copied."""
    structure: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    """The modules that were changed and those around them: (parent, name, child)."""

    @contextmanager
    def paused(self, host: nn.Module) -> Iterator[None]:
        """The model without its scaling. Rewritten methods are taken off, so that the source of the model is seen."""
        rewritten = [(module, module.__dict__[REWRITES]) for module in host.modules() if REWRITES in module.__dict__]
        for module, rewrites in rewritten:
            rewrites.take_off(module)
        try:
            with self.counter.set_to(OFF):
                yield
        finally:
            for module, rewrites in rewritten:
                rewrites.put_on(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": None}


class Action:
    """All edits of one tensor: the operand itself, or the operands as slices of a concatenation.

    It checks that the tensor is the planned one: the plan holds for the path that was traced, and for no other.
    """

    def __init__(self, edits: list[tuple[int, Edit]], state: Attached) -> None:
        self.slots = tuple(slot for slot, _ in edits)
        self.edits = [edit for _, edit in edits]
        self.state = state
        first = self.edits[0]
        self.label, self.axis, self.channels = first.label, first.attachment.axis, first.attachment.channels
        self.is_whole = first.operand == "merged" or not first.attachment.is_slice
        self.factors = [edit.factor for edit in self.edits if edit.factor is not None]
        self._vectors: dict[Any, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise SkipMismatchError(f"{self.label}: expected a tensor, found {type(tensor).__name__}")
        jit = torch._C._get_tracing_state() is not None  # then sizes are tensors
        if not jit and (tensor.dim() <= self.axis or tensor.shape[self.axis] != self.channels):
            raise SkipMismatchError(
                f"{self.label}: expected {self.channels} channels on axis {self.axis}, found the shape "
                f"{tuple(tensor.shape)}. {AGAIN}"
            )
        counter = self.state.counter
        counter.count(self.slots)
        mode = counter.mode
        if mode.constants is not None:
            return self._times(tensor, [mode.constants.get(slot, 1.0) for slot in self.slots])
        if self.factors:
            return self._times(tensor, self.factors)
        # Gates ask for the scaling each time: PEFT trains a copy of it, and replicas have their own.
        scaling = counter.gates or self.state.scaling
        if not mode.unseen:
            return self._gated(tensor, scaling)
        with _disable_current_modes():
            return self._gated(tensor, scaling)

    def _gated(self, tensor: Tensor, scaling: SkipScaling) -> Tensor:
        first = self.edits[0]
        if self.is_whole:
            return first.scaled(tensor, scaling)
        if len(self.edits) == 1 and first.operand == "skip":
            start, length = first.attachment.start, first.attachment.length
            gate = scaling.gate(tensor.narrow(self.axis, start, length), first.skip.index)
            if gate is not None:
                # One multiplication, by gates for some channels and ones for the others: to split and to concatenate
                # again would copy the whole, and its backward does so for each part.
                shape = [1] * (tensor.dim() - gate.dim()) + [*gate.shape]
                shape[self.axis] = length
                sides = [0, 0] * (tensor.dim() - 1 - self.axis % tensor.dim())
                ones = [*sides, start, self.channels - start - length]
                return tensor * nn.functional.pad(gate.to(tensor.dtype).expand(shape), ones, value=1.0)
        pieces, at = [], 0
        for edit in sorted(self.edits, key=lambda edit: edit.attachment.start):
            start, length = edit.attachment.start, edit.attachment.length
            if start > at:
                pieces.append(tensor.narrow(self.axis, at, start - at))
            pieces.append(edit.scaled(tensor.narrow(self.axis, start, length), scaling))
            at = start + length
        if at < self.channels:
            pieces.append(tensor.narrow(self.axis, at, self.channels - at))
        return torch.cat(pieces, dim=self.axis)

    def _times(self, tensor: Tensor, factors: list[float]) -> Tensor:
        """Slices are multiplied by one vector over the channels: cheaper than to split and concatenate again."""
        if self.is_whole:
            return tensor * factors[0]
        # A compiled graph has its own constants, and a fake tensor must not be remembered for a real one.
        if torch.compiler.is_compiling() or type(tensor) not in (Tensor, nn.Parameter) or factors is not self.factors:
            return tensor * self._vector(tensor, factors)
        key = (tensor.device, tensor.dtype, tensor.dim())
        if key not in self._vectors:
            with torch.inference_mode(False), torch.no_grad():
                self._vectors[key] = self._vector(tensor, factors)
        return tensor * self._vectors[key]

    def _vector(self, tensor: Tensor, factors: list[float]) -> Tensor:
        values = torch.ones(self.channels, dtype=tensor.dtype, device=tensor.device)
        for edit, factor in zip(self.edits, factors, strict=True):
            start = edit.attachment.start
            values[start : start + edit.attachment.length] = factor
        shape = [1] * tensor.dim()
        shape[self.axis] = self.channels
        return values.view(shape)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_vectors": {}}


class Pass:
    """An execution of a merge's expression that is not scaled. It counts: if one is left out, the others move up."""

    def __init__(self, label: str, counter: ForwardCounter) -> None:
        self.counter, self.slots = counter, (counter.add(label),)

    def __call__(self, tensor: Tensor) -> Tensor:
        self.counter.count(self.slots)
        return tensor


# Hooks that edit one or more tensors among the arguments or in the result of a module.


class ArgumentHook:
    """A forward pre-hook."""

    def __init__(self, state: Attached) -> None:
        self.state = state
        self.edits: list[tuple[TreePath, Action]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.state.counter.mode.is_off:
            return None
        value: Any = (args, kwargs)
        for path, action in self.edits:
            value = edited(value, path, action, module)
        return value


class OutputHook(ArgumentHook):
    """A forward hook."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        if self.state.counter.mode.is_off:
            return None
        for path, action in self.edits:
            output = edited(output, path, action, module)
        return output


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
