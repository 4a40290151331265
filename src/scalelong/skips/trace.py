"""One forward, recorded: which operation used which tensor, and which module call it ran in.

The record holds no tensors, only their shapes, so that a large model is not kept in memory, and meta or fake
tensors do as well as real ones.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .callsite import CallSite

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
