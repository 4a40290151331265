"""One forward, recorded: which operation used which tensor, and which module call it ran in.

The record holds no tensors, only their shapes, so that a large model is not kept in memory, and meta or fake
tensors do as well as real ones.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .callsite import CallSite, CallSites
from .untouched import untouched

LAYER = re.compile(
    r"^(_|mkldnn_|cudnn_)?conv|^_?(add|b|badd|int_|scaled_)*mm$|^addbmm$|^linear$|attention|lstm|gru|encoder_layer"
)
MERGES = {"cat": "cat", "add": "add", "add_": "add", "sub": "add", "sub_": "add", "lerp": "lerp", "lerp_": "lerp"}
# These take the shape of a tensor, not its values.
SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_")

Path = tuple[int | str, ...]


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
    inputs: list[tuple[Path, int]]
    site: CallSite | None
    """The expression that made the call, if it stands in a method of a module."""
    end: int = 1 << 60
    outputs: list[tuple[Path, int]] = field(default_factory=list)
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
        while at.call is not None and at.call.parent is None and at.inputs:
            at = self.nodes[at.inputs[0]]
        if at.call is None:
            return f"input {at.options[0]}"
        results = [c for c in at.call.stack() if {leaf for _, leaf in c.outputs} == {at.index} and c.parent]
        return (results[-1] if results else at.call).name


def bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of nested tuples, lists and dictionaries, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, tuple | list):
        for position, item in enumerate(value):
            yield from leaves(item, (*path, position))


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

    def add_input(self, tensor: Tensor, path: Path) -> None:
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
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

    def _tracked(self, value: Any) -> list[tuple[Path, int]]:
        found = ((path, self.node_of(tensor)) for path, tensor in leaves(value))
        return [(path, node) for path, node in found if node is not None]


def record(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Trace:
    """Run the model once in evaluation mode, without gradients and uncompiled. It is left as it was."""
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
                output = model(*args, **kwargs)
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
