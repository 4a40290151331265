"""The record of one forward: which operation used which tensor, and which module call it ran in.

It holds no tensors, only their shapes, so that a large model is not kept in memory, and meta or fake tensors do as well
as real ones.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from .callsites import CallSite, Invocation
from .containers import TreePath
from .merges import OTHER, MergeKind

Leaf = tuple[TreePath | None, int]
"""A node among the arguments or results of a call. Without a path, it is inside an object that cannot be copied."""


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
    is_number: bool = True
    """Real or complex, not an index or a mask."""
    is_layer: bool = False
    is_learned: bool = False
    """Whether it is a layer with weights of the model."""
    scope: Invocation | None = None
    """The run of a function that called it, for layers."""


@dataclass(slots=True)
class Call:
    """One call of a module."""

    name: str
    module: nn.Module
    parent: "Call | None"
    start: int
    inputs: list[Leaf]
    site: CallSite | None
    """The expression that made the call, if it stands in a method of a module."""
    number: int = 0
    """The n-th call of this module in the forward."""
    end: int = 1 << 60
    outputs: list[Leaf] = field(default_factory=list)
    pops_list: bool = False
    """Whether the call changed a list, dictionary or set that it was given: it must get that very object, no copy."""

    def contains(self, node: int) -> bool:
        return self.start <= node < self.end

    def stack(self) -> Iterator["Call"]:
        """This call and those around it, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True)
class Argument:
    """An argument in the text of a call: by position, by keyword, or by either of them where both are known."""

    position: int | None = None
    keyword: str = ""
    item: int | None = None
    """The argument is a list, and this item of it is meant."""

    @property
    def by_either(self) -> bool:
        return self.position is not None and bool(self.keyword)

    def __str__(self) -> str:
        """As plans write it: "#1" by position, "skip" by keyword, "#1=skip" by either, "#0[1]" for an item."""
        place = "" if self.position is None else f"#{self.position}"
        equals = "=" if self.by_either else ""
        return f"{place}{equals}{self.keyword}" + ("" if self.item is None else f"[{self.item}]")

    @classmethod
    def parse(cls, text: str) -> "Argument":
        name, _, item = text.partition("[")
        place, _, keyword = name.partition("=") if name.startswith("#") else ("", "", name)
        return cls(int(place[1:]) if place else None, keyword, int(item.rstrip("]")) if item else None)


@dataclass(slots=True)
class FunctionCall:
    """One call of a plain function or method from the method of a module."""

    parameters: dict[Argument, int]
    """The nodes that it got, by the argument in the text of the call."""
    start: int
    site: CallSite
    end: int = 1 << 60
    outputs: list[Leaf] = field(default_factory=list)

    def contains(self, node: int) -> bool:
        return self.start <= node < self.end


@dataclass(frozen=True, slots=True)
class Part:
    """Where torch gets one operand of a merge: an argument of one operation in the forward."""

    name: str
    ordinal: int
    """The n-th operation of this name in the forward."""
    position: int
    """Among the tensors of its arguments."""
    node: int
    """What that operation makes."""
    site: CallSite
    call: Call


@dataclass(slots=True)
class Merge:
    """Two or more tensors become one."""

    form: MergeKind
    node: int
    """The result."""
    operands: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int | None
    starts: tuple[int, ...]
    """Where each operand begins along that axis."""
    parts: tuple[Part, ...]
    """Where each operand goes in."""
    call: Call
    site: CallSite
    scope: Invocation

    @property
    def kind(self) -> str:
        return self.form.name

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def ordinal(self) -> int:
        return self.parts[0].ordinal


@dataclass
class Trace:
    model: nn.Module
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    users: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    outputs: set[int] = field(default_factory=set)
    later: "Trace | None" = None
    """The forward after this one, if this one leaves features in the modules. They are its nodes named "kept"."""
    layers: int = 0
    """The layer nodes as a bit set."""
    products: int = 0
    """The nodes that multiply two tensors."""
    mixtures: int = 0
    """The nodes that are no layers, but multiply or add weights, or stack positions, as a scan in a loop does."""

    def __post_init__(self) -> None:
        self.call_count: Counter[str] = Counter()

    @cached_property
    def owners(self) -> Counter[int]:
        """How many modules have each parameter, by its identity."""
        return Counter(id(p) for module in self.model.modules() for p in {*module._parameters.values()})

    def with_ancestors(self, node: int) -> int:
        return self.nodes[node].ancestors | 1 << node

    def depends(self, node: int, on: int) -> bool:
        return bool(self.nodes[node].ancestors >> on & 1)

    def layers_between(self, start: int, end: int) -> list[int]:
        """The layers on the paths from one node to another, without the first."""
        found = self.with_ancestors(end) & self.layers & ~((2 << start) - 1)
        return [layer for layer in bits(found) if self.depends(layer, start)]

    def mixes_between(self, start: int, end: int) -> int:
        found = self.with_ancestors(end) & self.mixtures & ~((2 << start) - 1)
        return sum(self.depends(node, start) for node in bits(found))

    def producer(self, node: int) -> str:
        """The name of the outermost module call whose result this node is, behind plain functions."""
        at = self.nodes[node]
        while at.call is not None:
            results = [c for c in at.call.stack() if c.parent and {leaf for _, leaf in c.outputs} == {at.index}]
            if not results and at.name == "add":  # a residual block that returns other things as well
                results = [c for c in at.call.stack() if c.parent and any(leaf == at.index for _, leaf in c.outputs)][
                    :1
                ]
            if results or at.is_layer or not at.inputs:
                return (results[-1] if results else at.call).name
            at = self.nodes[at.inputs[0]]
        return f"input {at.options[0]}"

    def settle(self) -> None:
        """A stack of tensors that is summed or averaged over the new axis, and used for nothing else, is a merge."""
        for merge in self.merges:
            if merge.kind == "stack":
                users = self.users[merge.node]
                reduced = self.nodes[users[0]] if len(users) == 1 else None
                if reduced is not None and _sums_over(reduced, self.nodes[merge.node]) and len(reduced.inputs) == 1:
                    merge.node = reduced.index
                else:
                    merge.form = OTHER


def _sums_over(step: Node, stack: Node) -> bool:
    """Whether a reduction takes the axis that a stack made, and that one alone."""
    axes = [option for option in step.options if isinstance(option, list | tuple)]
    made = [option for option in stack.options if isinstance(option, int)]
    new = (made[0] if made else 0) % len(stack.shape)
    return step.name in ("sum", "mean") and bool(axes) and [axis % len(stack.shape) for axis in axes[0]] == [new]


def bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low
