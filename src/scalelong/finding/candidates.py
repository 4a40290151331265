"""The merges that could end a long skip: one operand went through the network, the other went around it.

A candidate is an interval: it begins where a feature leaves the main path and ends at the merge. Where it belongs is
told by its *scope*, the innermost run of a function in which the merge and all layers that it goes around took place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

from ..tracing import Call, Invocation, Merge, Trace, bits, common_scope
from .reach import COPIES, VIEWS, channel_axis, joins_channels


@dataclass(frozen=True, eq=False)
class Candidate:
    trace: Trace = field(repr=False)
    merge: Merge
    operand: int
    """Position of the skip among the operands of the merge."""
    main: int
    start: int
    """The node where the skip leaves the main path."""
    skip_layers: int
    main_layers: int

    @property
    def end(self) -> int:
        return self.merge.node

    @property
    def skip_node(self) -> int:
        node = self.merge.operands[self.operand]
        assert node is not None
        return node

    @property
    def main_node(self) -> int:
        node = self.merge.operands[self.main]
        assert node is not None
        return node

    @cached_property
    def scope(self) -> Invocation:
        """The innermost run of a function in which all of it took place."""
        layers = self.trace.layers_between(self.start, self.main_node)
        scopes = [scope for layer in layers if (scope := self.trace.nodes[layer].scope) is not None]
        return reduce(common_scope, scopes, self.merge.scope)

    @cached_property
    def goes_lower(self) -> bool:
        """Whether the main path works on fewer positions than the skip somewhere on its way: the shape of a U."""
        return _goes_lower(self.trace, self.start, self.main_node, self.merge)


@dataclass(frozen=True)
class Features:
    """What counts as a feature: not an embedding of time or text, of which there is one vector for each image."""

    trace: Trace
    rank: int
    """The least number of axes: 3, or 2 for graphs and tables."""

    @cached_property
    def primary(self) -> int:
        """The inputs that the features are made of: those with the most axes. Times, texts and masks have fewer."""
        inputs = [node for node in self.trace.nodes if node.name == "input"]
        most = max((len(node.shape) for node in inputs), default=0)
        return sum(1 << node.index for node in inputs if len(node.shape) == most)

    def accept(self, node: int, merge: Merge) -> bool:
        shape, merged = self.trace.nodes[node].shape, merge.shapes[0]
        if not self.trace.with_ancestors(node) & self.primary:
            return False
        if self.rank == 2:
            return len(shape) >= 2
        if len(shape) == 2:
            return shape[0] != merged[0]
        vector = _positions_beside_batch(shape) == 1 and _positions_beside_batch(merged) > 1
        return len(shape) > 2 and (not vector or shape in merge.shapes)


def _positions_beside_batch(shape: tuple[int, ...]) -> int:
    """1 if there is one vector for each image."""
    sizes = sorted(shape[1:])
    return math.prod(sizes[:-1])


def candidates(trace: Trace, rank: int = 3) -> list[Candidate]:
    """Every merge with a shortcut around a path; of tensors with at least so many axes."""
    features = Features(trace, rank)
    merges = [m for m in trace.merges if _is_feature_merge(trace, m, rank) and not _is_around_nothing(trace, m)]
    return [c for merge in merges for c in _of_merge(features, merge)]


def remembered(trace: Trace) -> list[Merge]:
    """Merges of a feature with one that the forward before left in the modules."""
    kept = sum(1 << node.index for node in trace.nodes if node.name == "kept")
    inputs = sum(1 << node.index for node in trace.nodes if node.name == "input")

    def is_old(node: int | None) -> bool:
        sources = 0 if node is None else trace.with_ancestors(node)
        return bool(sources & kept) and not sources & inputs

    merges = [m for m in trace.merges if any(map(is_old, m.operands)) and not all(map(is_old, m.operands))]
    merges = [merge for merge in merges if merge.form.is_scalable and _is_feature_merge(trace, merge, 3)]
    # A running mean has no positions.
    return [merge for merge in merges if _positions_beside_batch(trace.nodes[merge.node].shape) > 1]


def around_nothing(trace: Trace) -> list[Candidate]:
    """Merges of a tensor with itself. Which of the operands is the skip, a merge at the same place has to say."""
    merges = [merge for merge in trace.merges if merge.form.is_scalable and _is_around_nothing(trace, merge)]
    return [
        Candidate(trace, merge, 1, 0, _origin(trace, merge.operands[0] or 0), 0, 0)
        for merge in merges
        if _is_feature_merge(trace, merge, 3)
    ]


def _is_around_nothing(trace: Trace, merge: Merge) -> bool:
    nodes = [node for node in merge.operands if node is not None]
    return len(nodes) == len(merge.operands) == 2 and _origin(trace, nodes[0]) == _origin(trace, nodes[1])


def _origin(trace: Trace, node: int) -> int:
    """What a tensor was before it was copied, or multiplied by a weight."""
    while trace.nodes[node].name in COPIES | VIEWS | {"mul", "native_dropout"} and len(trace.nodes[node].inputs) == 1:
        node = trace.nodes[node].inputs[0]
    return node


def contains(trace: Trace, outer: Candidate, inner: Candidate) -> bool:
    """Whether one skip spans the other: it leaves earlier and returns later."""
    return trace.depends(inner.start, outer.start) and trace.depends(outer.end, inner.end)


def contains_or_again(trace: Trace, outer: Candidate, inner: Candidate) -> bool:
    """The same, or the same feature is merged a second time, later."""
    again = outer.start == inner.start and not outer.skip_layers and not inner.skip_layers
    return contains(trace, outer, inner) or (again and trace.depends(outer.end, inner.end))


def longest_chain(trace: Trace, found: Sequence[Candidate], spans: Any = contains) -> list[Candidate]:
    """The longest sequence of skips, each around the next: the U."""
    ordered = sorted(found, key=lambda c: (c.start, -c.end))
    length = [1] * len(ordered)
    outer: list[int | None] = [None] * len(ordered)
    for j, inner in enumerate(ordered):
        for i in range(j):
            if length[i] + 1 > length[j] and spans(trace, ordered[i], inner):
                length[j], outer[j] = length[i] + 1, i
    chain: list[Candidate] = []
    at = max(range(len(ordered)), key=lambda i: length[i], default=None)
    while at is not None:
        chain.append(ordered[at])
        at = outer[at]
    return chain[::-1]


def _goes_lower(trace: Trace, start: int, end: int, merge: Merge) -> bool:
    """Whether every path from start to end passes a layer with fewer positions than the merge has.

    Every path: attention over pooled keys, and gates computed from an average, keep one at full resolution.
    """
    shape = trace.nodes[merge.node].shape
    # Channels last only where the concatenation or the next layer says so.
    axis = merge.axis if merge.axis is not None else channel_axis(trace, merge.node) or min(1, len(shape) - 1)
    positions = math.prod(shape) // max(shape[axis], 1)
    lower = {layer for layer in trace.layers_between(start, end) if _positions(trace, layer) < positions}
    if not lower or start == end:
        return False
    front, seen = [end], {end}
    while front:
        node = front.pop()
        if node == start:
            return False
        if node in lower:
            continue
        for before in trace.nodes[node].inputs:
            if before not in seen and (before == start or trace.depends(before, start)):
                seen.add(before)
                front.append(before)
    return True


def _positions(trace: Trace, layer: int) -> int:
    node = trace.nodes[layer]
    if "fft" in node.name or len(node.shape) == 0:
        return 1 << 60
    channels = node.shape[1] if "conv" in node.name and len(node.shape) > 1 else node.shape[-1]
    return math.prod(node.shape) // max(channels, 1)


def site_key(trace: Trace, candidate: Candidate) -> tuple[Any, ...]:
    """Merges at one place of the source. A module that only merges does not count: its caller does."""
    key, call = candidate.merge.site.key, candidate.merge.call
    while call.parent is not None and call.site is not None and not _has_layers(trace, call):
        key, call = (*key, *call.site.key), call.parent
    return key


def _has_layers(trace: Trace, call: Call) -> bool:
    end = min(call.end, len(trace.nodes))
    return bool(trace.layers >> call.start & ((1 << (end - call.start)) - 1))


def _is_feature_merge(trace: Trace, merge: Merge, rank: int) -> bool:
    shape = trace.nodes[merge.node].shape
    if len(shape) < rank or sum(operand is not None for operand in merge.operands) < 2:
        return False
    if not merge.form.is_scalable:
        # What multiplies or chooses element by element joins features of one shape; a factor for each channel does not.
        pointwise = not trace.nodes[merge.node].is_layer and merge.parts[0].name not in ("slices", "stack")
        return not pointwise or sum(shape == one for one in merge.shapes) > 1
    if merge.axis is None:
        return len(set(merge.shapes)) == 1 and None not in merge.operands
    return joins_channels(trace, merge)


def _of_merge(features: Features, merge: Merge) -> list[Candidate]:
    trace = features.trace
    tracked = [(n, node) for n, node in enumerate(merge.operands) if node is not None and trace.nodes[node].is_number]
    gated = {
        position: start
        for position, node in tracked
        for _, other in tracked
        if other != node and (start := _gated_start(features, node, other, merge)) is not None
    }
    direct = [(position, node) for position, node in tracked if position not in gated]
    if not direct:
        return []
    found = []
    main, main_node = _main_path(features, merge, direct)
    for position, node in tracked:
        if position == main:
            continue
        start = gated.get(position)
        spans = _fork(features, node, main_node, merge) if start is None else (start, 0, 1)
        if spans is not None:
            found.append(Candidate(trace, merge, position, main, *spans))
    return found


def _main_path(features: Features, merge: Merge, direct: list[tuple[int, int]]) -> tuple[int, int]:
    """The deepest operand; of two, the one that came through a lower resolution, however few layers it has."""
    trace = features.trace
    if len(direct) == 2:
        for main, skip in (direct, direct[::-1]):
            if _fork(features, skip[1], main[1], merge) is not None:
                return main
    depth = {position: (trace.with_ancestors(node) & trace.layers).bit_count() for position, node in direct}
    return max(direct, key=lambda pair: (depth[pair[0]], pair[1]))


def _fork(features: Features, skip: int, main: int, merge: Merge) -> tuple[int, int, int] | None:
    """Where the two paths part, and the layers on each side, if the skip is the shorter one."""
    trace = features.trace
    common = trace.with_ancestors(skip) & trace.with_ancestors(main)
    while common:
        start = common.bit_length() - 1
        on_skip, on_main = len(trace.layers_between(start, skip)), len(trace.layers_between(start, main))
        longer = on_main > on_skip
        if not on_skip and not on_main:
            longer = trace.mixes_between(start, main) > trace.mixes_between(start, skip)
        if on_skip and on_main:
            lower, skip_lower = (_goes_lower(trace, start, end, merge) for end in (main, skip))
            longer = lower if lower != skip_lower else longer
        if longer and features.accept(start, merge):
            return start, on_skip, on_main
        # They may share something late that is no feature, such as an embedding of time.
        common &= ~trace.with_ancestors(start)
    return None


def _gated_start(features: Features, gated: int, main: int, merge: Merge) -> int | None:
    """Attention gates: the operand is feature * gate(feature, main). Where the feature leaves the main path."""
    trace = features.trace
    if not trace.depends(gated, main):
        return None
    between = trace.with_ancestors(gated) & ~trace.with_ancestors(main) & trace.products
    for index in sorted(bits(between), reverse=True):
        node = trace.nodes[index]
        for feature in node.inputs:
            on_main_side = feature == main or trace.depends(feature, main)
            if not on_main_side and trace.nodes[feature].shape == node.shape:
                spans = _fork(features, feature, main, merge)
                if spans is not None:
                    return spans[0]
    return None
