"""One forward of a model, recorded: operations, calls, what follows from what. The model is left untouched."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .untouched import untouched

# Where in the source of a model an operation or a module call stands.

# Frames of these are not the model's own text: what counts is who called them.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_HELPERS = ("einops", "accelerate/hooks")


def is_model_code(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith(_LIBRARIES) and not any(helper in file for helper in _HELPERS)


@dataclass(frozen=True)
class Frame:
    code: CodeType
    instruction: int
    module: str | None
    """The module whose method this is, by name; None for a plain function."""
    invocation: int
    """Tells one run of the function from another."""

    @property
    def position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First line, last line, first column, last column of the expression."""
        return list(self.code.co_positions())[self.instruction // 2]


@dataclass(frozen=True)
class CallSite:
    """The expression, and the plain functions that led to it from the nearest method of a module (the last frame)."""

    frames: tuple[Frame, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((frame.code.co_filename, frame.position) for frame in self.frames)

    @property
    def method(self) -> Frame | None:
        """The method in whose text the expression stands, perhaps inside of a nested function or comprehension."""
        owner = self.frames[-1]
        return owner if self.frames[0].code in _nested(owner.code) else None

    @property
    def text(self) -> str:
        frame = self.frames[0]
        return f"{Path(frame.code.co_filename).name}:{frame.position[0]}"


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


class CallSites:
    """Looks at the Python stack. Frames are kept, so that their identities are unique, but not their variables."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._frames: dict[int, FrameType] = {}
        self._running: list[FrameType] = []

    def current(self, frame: FrameType | None = None) -> CallSite | None:
        """The call site of whoever called torch, or of a frame; None if no method of a module did."""
        frames = []
        frame = frame or sys._getframe(1)
        while frame is not None:
            if is_model_code(frame.f_code):
                owner = self._owner(frame)
                frames.append(Frame(frame.f_code, frame.f_lasti, owner, self._identity(frame)))
                if owner is not None:
                    return CallSite(tuple(frames))
            frame = frame.f_back
        return None

    def release(self) -> None:
        """Let go of the variables of functions that have returned."""
        still_running = []
        for frame in self._running:
            try:
                frame.clear()
            except RuntimeError:
                still_running.append(frame)
        self._running = still_running

    def _identity(self, frame: FrameType) -> int:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = frame
            self._running.append(frame)
        return id(frame)

    def _owner(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if not code.co_argcount:
            return None
        first = frame.f_locals.get(code.co_varnames[0])
        return self._names.get(first) if isinstance(first, nn.Module) else None


# One forward, recorded: which operation used which tensor, and which module call it ran in.
#
# The record holds no tensors, only their shapes, so that a large model is not kept in memory, and meta or fake
# tensors do as well as real ones.

TreePath = tuple[int | str, ...]


@dataclass(slots=True)
class Node:
    """A tensor that depends on the inputs: the operation that made it, and what it was made of."""

    index: int
    name: str
    shape: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    """The nodes that it was computed from."""
    operands: tuple[int | None, ...] = ()
    """Its tensor arguments in order; None for weights and constants."""
    ancestors: int = 0
    """All nodes that it depends on, as a bit set."""
    call: "Call | None" = None
    options: tuple[Any, ...] = ()
    """Its arguments that are not tensors."""
    is_layer: bool = False


@dataclass(slots=True)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    parent: "Call | None"
    start: int
    inputs: list[tuple[TreePath, int]]
    site: CallSite | None
    """The expression that made the call, if it stands in a method of a module."""
    end: int = 1 << 60
    outputs: list[tuple[TreePath, int]] = field(default_factory=list)
    emptied: bool = False
    """Whether the call took elements out of a list that it was given."""

    def contains(self, node: int) -> bool:
        return self.start <= node < self.end

    def stack(self) -> Iterator["Call"]:
        """This call and those around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(slots=True)
class FunctionCall:
    """One call of a plain function or method from the method of a module."""

    parameters: dict[str, int]
    """The nodes that it got, by the name of the parameter."""
    names: tuple[str, ...]
    """All parameters in order, without `self`."""
    start: int
    site: CallSite
    end: int = 1 << 60
    outputs: list[tuple[TreePath, int]] = field(default_factory=list)

    def contains(self, node: int) -> bool:
        return self.start <= node < self.end


@dataclass(slots=True)
class Merge:
    """A concatenation or addition of two or more tensors."""

    kind: str
    name: str
    ordinal: int
    """The n-th operation of this name in the forward."""
    node: int
    operands: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int | None
    call: Call
    site: CallSite


@dataclass
class Trace:
    model: nn.Module
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    users: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    outputs: set[int] = field(default_factory=set)
    layers: int = 0
    """The layer nodes as a bit set."""
    products: int = 0
    """The nodes that multiply two tensors."""

    def __post_init__(self) -> None:
        self.call_count: Counter[str] = Counter()

    def with_ancestors(self, node: int) -> int:
        return self.nodes[node].ancestors | 1 << node

    def depends(self, node: int, on: int) -> bool:
        return bool(self.nodes[node].ancestors >> on & 1)

    def layers_between(self, start: int, end: int) -> list[int]:
        """The layers on the paths from one node to another, without the first."""
        found = self.with_ancestors(end) & self.layers & ~((2 << start) - 1)
        return [layer for layer in bits(found) if self.depends(layer, start)]

    def producer(self, node: int) -> str:
        """The name of the outermost module call whose result this node is, behind plain functions."""
        at = self.nodes[node]
        while at.call is not None:
            results = [c for c in at.call.stack() if c.parent and {leaf for _, leaf in c.outputs} == {at.index}]
            if results or at.is_layer or not at.inputs:
                return (results[-1] if results else at.call).name
            at = self.nodes[at.inputs[0]]
        return f"input {at.options[0]}"


def bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def leaves(value: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Tensor]]:
    """The tensors of nested tuples, lists and dictionaries, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, tuple | list):
        for position, item in enumerate(value):
            yield from leaves(item, (*path, position))


# Record one forward of a model, with every operation and every module call.

LAYER = re.compile(
    r"^(_|mkldnn_|cudnn_)?conv|^_?(add|b|badd|int_|scaled_)*mm$|^addbmm$|^linear$|attention|lstm|gru|encoder_layer"
)
MERGES = {"cat": "cat", "add": "add", "add_": "add", "sub": "add", "sub_": "add", "lerp": "lerp", "lerp_": "lerp"}
# These take the shape of a tensor, not its values.
SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_")


class Recorder(TorchDispatchMode):
    """Records every operation while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace(model)
        self.names = {module: name for name, module in model.named_modules()}
        self._node_of = WeakTensorKeyDictionary()
        self._last_write: dict[int, int] = {}
        self._sites = CallSites(self.names)
        self._counts: Counter[str] = Counter()
        self._stack: list[Call] = []
        self._lists: list[list[tuple[list[Any], int]]] = []
        self._functions: dict[FrameType, FunctionCall] = {}

    # Module boundaries -------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.names[module]
        call = Call(
            name=name,
            module=module,
            parent=self._stack[-1] if self._stack else None,
            start=len(self.trace.nodes),
            inputs=self._tracked((args, kwargs)),
            site=self._sites.current(),
        )
        self.trace.call_count[name] += 1
        self._stack.append(call)
        self._lists.append([(value, len(value)) for value in _lists((args, kwargs))])
        self.trace.calls.append(call)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        call = self._stack.pop()
        call.end = len(self.trace.nodes)
        call.outputs = self._tracked(output)
        call.emptied = any(len(value) != length for value, length in self._lists.pop())
        self._sites.release()

    # Operations --------------------------------------------------------------------------------------------------

    def add_input(self, tensor: Tensor, path: TreePath) -> None:
        node = Node(len(self.trace.nodes), "input", tuple(tensor.shape), options=(".".join(map(str, path)),))
        self.trace.nodes.append(node)
        self._node_of[tensor] = node.index

    def node_of(self, tensor: Tensor) -> int | None:
        node = self._node_of.get(tensor)
        # A later write through another view of the same memory changed this tensor, too.
        written = self._last_write.get(_memory(tensor))
        if written is not None and (node is None or written > node):
            return written
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [tensor for _, tensor in leaves((args, kwargs))]
        operands = tuple(self.node_of(tensor) for tensor in tensors)
        result = func(*args, **kwargs)
        self._counts[name] += 1
        inputs = tuple(dict.fromkeys(node for node in operands if node is not None))
        if not inputs or name.startswith(SHAPE_ONLY):
            for _, tensor in leaves(result):
                self._node_of.pop(tensor, None)
            return result
        outputs = [tensor for _, tensor in leaves(result)]
        if not outputs:
            return result
        node = self._add(name, outputs[0], inputs, operands, _plain((args, kwargs)))
        if func._schema.is_mutable:
            self._last_write[_memory(outputs[0])] = node.index
        if len(outputs) == 1:
            self._node_of[outputs[0]] = node.index
        else:
            # Each piece of a split is a tensor of its own.
            for tensor in outputs:
                self._node_of[tensor] = self._add(f"{name} output", tensor, (node.index,), (node.index,), ()).index
        if name in MERGES and outputs[0].is_floating_point():
            self._add_merge(MERGES[name], node, tensors, operands, args, kwargs)
        return result

    def _add(self, name: str, tensor: Tensor, inputs: tuple[int, ...], operands: Any, options: Any) -> Node:
        trace = self.trace
        ancestors = 0
        for one in inputs:
            ancestors |= trace.with_ancestors(one)
        is_layer = LAYER.search(name) is not None and not name.endswith(" output")
        call = self._stack[-1] if self._stack else None
        index = len(trace.nodes)
        node = Node(index, name, tuple(tensor.shape), inputs, operands, ancestors, call, options, is_layer)
        trace.nodes.append(node)
        trace.layers |= is_layer << index
        trace.products |= (name in ("mul", "mul_") and len(inputs) == 2) << index
        for one in inputs:
            trace.users[one].append(index)
        return node

    def _add_merge(self, kind: str, node: Node, tensors: list[Tensor], operands: Any, args: Any, kwargs: Any) -> None:
        site = self._sites.current()
        if len(tensors) < 2 or site is None or not self._stack:
            return
        axis = None
        if kind == "cat":
            axis = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(node.shape)
        else:
            tensors, operands = tensors[:2], operands[:2]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        ordinal = self._counts[node.name] - 1
        self.trace.merges.append(
            Merge(kind, node.name, ordinal, node.index, operands, shapes, axis, self._stack[-1], site)
        )

    # Plain functions ---------------------------------------------------------------------------------------------

    def watch(self, frame: FrameType, event: str, value: Any) -> None:
        """A profiler that notes calls of the model's own functions."""
        if event == "call" and frame.f_back is not None and is_model_code(frame.f_code):
            site = self._sites.current(frame.f_back)
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if site is None or not is_model_code(frame.f_back.f_code) or site.method is None:
                return
            bound = bool(names) and names[0] == "self"
            values = {name: frame.f_locals.get(name) for name in names}
            tensors = {name: self.node_of(item) for name, item in values.items() if isinstance(item, Tensor)}
            parameters = {name: node for name, node in tensors.items() if node is not None}
            call = FunctionCall(parameters, names[1:] if bound else names, len(self.trace.nodes), site)
            self._functions[frame] = call
            self.trace.functions.append(call)
        elif event == "return" and frame in self._functions:
            call = self._functions.pop(frame)
            call.end, call.outputs = len(self.trace.nodes), self._tracked(value)

    def _tracked(self, value: Any) -> list[tuple[TreePath, int]]:
        found = ((path, self.node_of(tensor)) for path, tensor in leaves(value))
        return [(path, node) for path, node in found if node is not None]


def record(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, functions: bool = False) -> Trace:
    """Run the model once in evaluation mode, without gradients and uncompiled. It is left as it was.

    `functions` also records the calls of plain functions, which takes longer.
    """
    recorder = Recorder(model)
    handles = []
    with untouched(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            for module in recorder.names:
                handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
            for path, tensor in leaves((tuple(args), kwargs)):
                recorder.add_input(tensor, path[1:])
            with recorder:
                profiler = sys.getprofile()
                if functions:
                    sys.setprofile(recorder.watch)
                try:
                    output = model(*args, **kwargs)
                finally:
                    sys.setprofile(profiler)
        finally:
            for handle in handles:
                handle.remove()
        recorder.trace.outputs = {node for _, node in recorder._tracked(_unpacked(output))}
    return recorder.trace


def _unpacked(output: Any) -> Any:
    """Outputs that are dataclasses without being dictionaries (transformers, diffusers) count as well."""
    return vars(output) if hasattr(output, "__dict__") and not isinstance(output, dict | Tensor) else output


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses have none
        return -id(tensor)


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ():
        yield from _lists(item)


def _plain(value: Any) -> tuple[Any, ...]:
    """The arguments without tensors and lists of tensors."""
    args, kwargs = value
    return tuple(item for item in (*args, *kwargs.values()) if not any(True for _ in leaves(item)))
