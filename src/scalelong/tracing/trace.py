"""The record of one forward: which operation used which tensor, and which module call it ran in.

It holds no tensors, only their shapes, so that a large model is not kept in memory, and meta or fake tensors do as well
as real ones.
"""

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

# The tensors in arguments and results, whatever they are packed in.

TreePath = tuple[int | str, ...]


def leaves(value: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Tensor]]:
    """The tensors of nested tuples, lists and dictionaries, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, tuple | list | deque):
        for position, item in enumerate(value):
            yield from leaves(item, (*path, position))


def held_tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """The tensors in objects of any class, such as dataclasses, and in what these hold."""
    seen = set() if seen is None else seen
    if isinstance(value, dict | tuple | list | deque | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            yield from held_tensors(item, seen)
        return
    cls = type(value)
    is_known = cls.__module__ in ("builtins", "types", "torch") and not dataclasses.is_dataclass(value)
    if is_known or isinstance(value, Tensor | nn.Module | type) or id(value) in seen:
        return
    seen.add(id(value))
    slots = [name for base in cls.__mro__ for name in getattr(base, "__slots__", ()) if isinstance(name, str)]
    contents = [*vars(value).values()] if hasattr(value, "__dict__") else [getattr(value, n, None) for n in slots]
    for content in contents:
        yield from (tensor for _, tensor in leaves(content))
        yield from held_tensors(content, seen)


# Where in the source an operation or a module call stands.

# Frames of these are not the model's own text: what counts is who called them.
_OWN = tuple(str(Path(__file__).parents[1] / package) for package in ("tracing", "finding", "attaching"))
_LIBRARIES = (str(Path(torch.__file__).parent), *_OWN)
_HELPERS = ("einops", "accelerate/hooks")


@cache
def is_model_code(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith(_LIBRARIES) and not any(helper in file for helper in _HELPERS)


def is_own_code(code: CodeType) -> bool:
    """Ours: in functions that were rewritten for a different model of the same class."""
    return code.co_filename.startswith(_OWN)


@dataclass(eq=False, slots=True)
class Invocation:
    """One run of a function, torch's own included."""

    code: CodeType
    parent: "Invocation | None"
    depth: int
    module: str | None
    """The module whose method this is, by name; None for a plain function."""

    def stack(self) -> Iterator["Invocation"]:
        """This run and those around it, innermost first."""
        at: Invocation | None = self
        while at is not None:
            yield at
            at = at.parent

    def is_inside(self, other: "Invocation") -> bool:
        return any(at is other for at in self.stack())


def common_scope(one: Invocation, other: Invocation) -> Invocation:
    """The innermost run of a function in which both took place."""
    while one is not other:
        deeper, shallower = (one, other) if one.depth > other.depth else (other, one)
        if deeper.parent is None:
            return deeper
        one, other = deeper.parent, shallower
    return one


@dataclass(frozen=True)
class Frame:
    code: CodeType
    instruction: int
    invocation: Invocation

    @property
    def module(self) -> str | None:
        return self.invocation.module

    @property
    def position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First line, last line, first column, last column of the expression."""
        return _positions(self.code)[self.instruction // 2]


@cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


@dataclass(frozen=True)
class CallSite:
    """The expression, and the plain functions that led to it from the nearest method of a module (the last frame)."""

    frames: tuple[Frame, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((frame.code.co_filename, frame.position) for frame in self.frames)

    @property
    def method(self) -> Frame | None:
        """The method in whose text the expression stands, perhaps inside a nested function or comprehension."""
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


# The record.

KINDS = {
    "cat": "cat",
    **dict.fromkeys(("add", "sub", "rsub", "addcmul", "addcdiv", "add_", "sub_", "addcmul_", "addcdiv_"), "add"),
    **dict.fromkeys(("lerp", "lerp_"), "lerp"),
}
"""The kind of a merge by its operation. All others are "other": a product, a maximum, a stack, writes into parts of one
buffer. None of these is scaled."""

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
    """True if it is a layer with weights of the model."""
    scope: Invocation | None = None
    """The run of a function that called it, for layers."""


@dataclass(kw_only=True)
class RanCall:
    """One call of a module or function: the operations that ran in it."""

    start: int
    site: CallSite | None
    """The expression that made the call, if it stands in a method of a module."""
    end: int = 1 << 60
    outputs: list[Leaf] = field(default_factory=list)
    pops_list: bool = False
    """True if the call changed a list or dictionary that it was given: it must get that very object, no copy."""

    def contains(self, node: int) -> bool:
        return self.start <= node < self.end


@dataclass(kw_only=True)
class Call(RanCall):
    """One call of a module."""

    name: str
    module: nn.Module
    parent: "Call | None"
    inputs: list[Leaf]
    is_mapped: bool = False
    """True under torch.vmap, where modules do not see the shapes that the operations have."""

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

    def __str__(self) -> str:
        """As plans write it: "#1" by position, "skip" by keyword, "#1=skip" by either."""
        place = "" if self.position is None else f"#{self.position}"
        return f"{place}{'=' if place and self.keyword else ''}{self.keyword}"

    @classmethod
    def parse(cls, text: str) -> "Argument":
        place, _, keyword = text.partition("=") if text.startswith("#") else ("", "", text)
        return cls(int(place[1:]) if place else None, keyword)


@dataclass(kw_only=True)
class FunctionCall(RanCall):
    """One call of a plain function or method from the method of a module."""

    parameters: dict[Argument, int]
    """The nodes that it got, by the argument in the text of the call."""


@dataclass(slots=True)
class Merge:
    """Two or more tensors become one."""

    kind: str
    """"cat", "add", "lerp" or "other"."""
    node: int
    """The result."""
    operands: tuple[int | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    axis: int | None
    """Along which a concatenation joins its operands, so that each is a slice of the result."""
    starts: tuple[int, ...]
    """Where each operand begins along that axis."""
    name: str
    ordinal: int
    """It is the n-th operation of this name in the forward."""
    positions: tuple[int, ...]
    """Where each operand stands among the tensors of its arguments."""
    call: Call
    site: CallSite
    named: tuple[int, int] | None = None
    """For a merge that the model does by `scalelong.merge`: the number of the long skip, and the axis of channels."""
    is_broadcast: bool = False
    """An addition of tensors of different shapes."""
    is_scalable: bool = False


@dataclass
class Trace:
    model: nn.Module
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    users: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    outputs: set[int] = field(default_factory=set)
    call_count: Counter[str] = field(default_factory=Counter)
    later: "Trace | None" = None
    """The forward after this one, if this one leaves features in the modules. They are its nodes named "kept"."""
    layers: int = 0
    """The layer nodes as a bit set."""
    products: int = 0
    """The nodes that multiply two tensors."""
    mixtures: int = 0
    """The nodes that are no layers, but multiply or add weights, or stack positions, as a scan in a loop does."""

    @cached_property
    def owners(self) -> Counter[int]:
        """How many modules have each parameter, by its identity."""
        return Counter(id(p) for module in self.model.modules() for p in {*module._parameters.values()})

    @cached_property
    def primary_inputs(self) -> int:
        """The inputs that the features are made of: those with the most axes. Times, texts and masks have fewer."""
        inputs = [node for node in self.nodes if node.name == "input"]
        most = max((len(node.shape) for node in inputs), default=0)
        return sum(1 << node.index for node in inputs if len(node.shape) == most)

    @cached_property
    def positions(self) -> dict[int, int]:
        """How many positions the layers, poolings and interpolations work on, in what they get or make."""
        found = {}
        for node in self.nodes:
            resizes = len(node.shape) > 2 and any(name in node.name for name in ("conv", "_pool", "upsample"))
            if (resizes or node.is_layer) and node.shape and "fft" not in node.name:
                # What is before a transposed convolution is as low as what is after a pooling.
                shapes = [node.shape, self.nodes[node.inputs[0]].shape] if resizes else [node.shape]
                channels = 1 if resizes else -1
                found[node.index] = min(math.prod(shape) // max(shape[channels], 1) for shape in shapes)
        return found

    @cached_property
    def taking(self) -> defaultdict[int, list[Call]]:
        """The module calls that get each node, outermost first."""
        found: defaultdict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            for node in {node for _, node in call.inputs}:
                found[node].append(call)
        return found

    @cached_property
    def returning(self) -> defaultdict[int, list[Call]]:
        """The module calls that return each node, outermost first."""
        found: defaultdict[int, list[Call]] = defaultdict(list)
        for call in self.calls:
            for node in {node for _, node in call.outputs}:
                found[node].append(call)
        return found

    def with_ancestors(self, node: int) -> int:
        return self.nodes[node].ancestors | 1 << node

    def depends(self, node: int, on: int) -> bool:
        return bool(self.nodes[node].ancestors >> on & 1)

    def layers_between(self, start: int, end: int) -> list[int]:
        return self.between(self.layers, start, end)

    def between(self, nodes: int, start: int, end: int) -> list[int]:
        """Those of a set of nodes that lie on the paths from one node to another, without the first."""
        first = start + 1  # the sets are shifted, so that a short path costs little in a long forward
        found = (self.with_ancestors(end) >> first) & (nodes >> first)
        return [first + place for place in bits(found) if self.depends(first + place, start)]

    def producer(self, node: int) -> str:
        """The name of the outermost module call whose result this node is, also through plain functions."""
        at = self.nodes[node]
        while at.call is not None:
            around = [call for call in at.call.stack() if call.parent]
            results = [call.name for call in around if {leaf for _, leaf in call.outputs} == {at.index}][-1:]
            if not results and at.name == "add":  # a residual block that returns other things as well
                results = [call.name for call in around if any(leaf == at.index for _, leaf in call.outputs)][:1]
            if results or at.is_layer or not at.inputs:
                return results[0] if results else at.call.name
            at = self.nodes[at.inputs[0]]
        return f"input {at.options[0]}"


def bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low
