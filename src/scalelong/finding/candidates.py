"""The merges that could end a long skip: one operand went through the network, the other went around it.

A candidate is an interval: it begins where a feature leaves the main path and ends at the merge. Its *scope* is
where it belongs: the innermost run of a function in which the merge and all layers that it goes around took place.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

from ..tracing import Invocation, Merge, Trace, bits, common_scope
from .axes import COPIES, VIEWS, channel_axis, joins_channels


@dataclass(eq=False)
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

    def __post_init__(self) -> None:
        self.end = self.merge.node
        self.skip_node = self.merge.operands[self.operand] or 0
        self.main_node = self.merge.operands[self.main] or 0

    @cached_property
    def scope(self) -> Invocation:
        """The innermost run of a function in which all of it took place."""
        layers = self.trace.layers_between(self.start, self.main_node)
        scopes = [scope for layer in layers if (scope := self.trace.nodes[layer].scope) is not None]
        return reduce(common_scope, scopes, self.merge.site.frames[0].invocation)

    @cached_property
    def goes_lower(self) -> bool:
        """True if the main path works on fewer positions than the skip somewhere on its way: the shape of a U."""
        return _goes_lower(self.trace, self.start, self.main_node, self.merge)

    @cached_property
    def site(self) -> tuple[Any, ...]:
        return _site(self.trace, self.merge)

    @cached_property
    def has_decoder(self) -> bool:
        """True if a layer reads the merge."""
        later = bits(self.trace.layers >> self.end)
        return any(self.trace.depends(self.end + place, self.end) for place in later)

    def contains(self, inner: "Candidate") -> bool:
        """True if this skip spans another: it leaves earlier and returns later."""
        return self.trace.depends(inner.start, self.start) and self.trace.depends(self.end, inner.end)

    def repeats(self, inner: "Candidate", layers: int = 0) -> bool:
        """True if the very same feature is merged a second time here, later; after so many layers of its own."""
        same = self.start == inner.start and self.skip_layers <= layers and not inner.skip_layers
        return same and self.trace.depends(self.end, inner.end)

    def precedes(self, outer: "Candidate", inner: "Candidate") -> bool:
        """True if the feature of a skip enters the main path here before its own merge, around the next inner skip."""
        on_main_path = self.end == outer.main_node or self.trace.depends(outer.main_node, self.end)
        is_map = _vectors(self.trace.nodes[self.end].shape) > 1  # no gate with a number for each channel
        return self.start == outer.start and on_main_path and is_map and self.contains(inner)

    def turned(self) -> "Candidate":
        """The same merge with the operands exchanged."""
        return replace(
            self,
            operand=self.main,
            main=self.operand,
            skip_layers=self.main_layers,
            main_layers=self.skip_layers,
        )

    def follows(self, other: "Candidate") -> bool:
        """True if this skip leaves the main path where another one has returned, or later."""
        return self.start == other.end or self.trace.depends(self.start, other.end)


def longest_chain(found: Sequence[Candidate], *, again: bool = False) -> list[Candidate]:
    """The longest sequence of skips, each around the next: the U. `again`: a feature may be merged twice in it."""
    ordered = sorted(found, key=lambda c: (c.start, -c.end))
    length = [1] * len(ordered)
    outer: list[int | None] = [None] * len(ordered)
    for j, inner in enumerate(ordered):
        for i, one in enumerate(ordered[:j]):
            if length[i] + 1 > length[j] and (one.contains(inner) or (again and one.repeats(inner))):
                length[j], outer[j] = length[i] + 1, i
    chain: list[Candidate] = []
    at = max(range(len(ordered)), key=lambda i: length[i], default=None)
    while at is not None:
        chain.append(ordered[at])
        at = outer[at]
    return chain[::-1]


def candidates(trace: Trace, rank: int = 3) -> list[Candidate]:
    """Every merge with a shortcut around a path; of tensors with at least so many axes."""
    merges = [m for m in trace.merges if _is_feature_merge(trace, m, rank) and not _is_around_nothing(trace, m)]
    found = {merge.node: _of_merge(trace, merge, rank) for merge in merges}
    pairs: defaultdict[tuple[Any, ...], list[Merge]] = defaultdict(list)
    for merge in merges:
        if merge.is_scalable and len(merge.operands) == 2:
            pairs[_site(trace, merge)].append(merge)
    for same in pairs.values():
        found |= _oriented_alike(trace, same, found, rank)
    return [candidate for merge in merges for candidate in found[merge.node]]


def _site(trace: Trace, merge: Merge) -> tuple[Any, ...]:
    """The place in the source. A module that only merges does not count: its caller does."""
    key, call = merge.site.key, merge.call
    while call.parent is not None and call.site is not None:
        end = min(call.end, len(trace.nodes))
        if trace.layers >> call.start & ((1 << (end - call.start)) - 1):
            break
        key, call = (*key, *call.site.key), call.parent
    return key


def _oriented_alike(
    trace: Trace, same: list[Merge], found: dict[int, list[Candidate]], rank: int
) -> dict[int, list[Candidate]]:
    """Candidates of merges at one place: there the skip is the same operand each time, also where it has more layers.

    The main path is the operand that comes through other merges at this place, or the one with layers. The innermost
    merge has no others inside it, and follows the rest.
    """
    ends = sum(1 << merge.node for merge in same)
    mains = set()
    for merge in same:
        for candidate in found[merge.node]:
            inside = ends >> candidate.start + 1 << candidate.start + 1
            through = [n for n, node in enumerate(merge.operands) if trace.with_ancestors(node or 0) & inside]
            if len(through) == 1 or not candidate.skip_layers:
                mains.add(through[0] if len(through) == 1 else candidate.main)
    if len(mains) != 1:
        return {}
    (main,) = mains
    oriented = {}
    for merge in same:
        if not any(candidate.main == main for candidate in found[merge.node]):
            skip_node, main_node = merge.operands[1 - main], merge.operands[main]
            spans = _fork(trace, skip_node or 0, main_node or 0, merge, rank, is_decided=True)
            oriented[merge.node] = [] if spans is None else [Candidate(trace, merge, 1 - main, main, *spans)]
    return oriented


def around_nothing(trace: Trace) -> list[Candidate]:
    """Merges of a tensor with itself. Which of the operands is the skip, a merge at the same place has to say."""
    return [
        Candidate(trace, merge, 1, 0, _origin(trace, merge.operands[0] or 0), 0, 0)
        for merge in trace.merges
        if merge.is_scalable and _is_around_nothing(trace, merge) and _is_feature_merge(trace, merge, 3)
    ]


def remembered(trace: Trace) -> list[Merge]:
    """Merges of a feature with one that the forward before left in the modules."""
    kept, inputs = (sum(1 << n.index for n in trace.nodes if n.name == kind) for kind in ("kept", "input"))
    found = []
    for merge in trace.merges:
        sources = [0 if node is None else trace.with_ancestors(node) for node in merge.operands]
        old = [bool(one & kept) and not one & inputs for one in sources]
        # A running mean has no positions.
        is_feature = merge.is_scalable and _vectors(trace.nodes[merge.node].shape) > 1
        if any(old) and not all(old) and is_feature and _is_feature_merge(trace, merge, 3):
            found.append(merge)
    return found


def _is_around_nothing(trace: Trace, merge: Merge) -> bool:
    origins = [_origin(trace, node) for node in merge.operands if node is not None]
    return len(origins) == len(merge.operands) == 2 and origins[0] == origins[1]


def _origin(trace: Trace, node: int) -> int:
    """The tensor before it was copied, or multiplied by a weight."""
    while trace.nodes[node].name in COPIES | VIEWS | {"mul", "native_dropout"} and len(trace.nodes[node].inputs) == 1:
        node = trace.nodes[node].inputs[0]
    return node


def _is_feature_merge(trace: Trace, merge: Merge, rank: int) -> bool:
    shape = trace.nodes[merge.node].shape
    if len(shape) < rank or len(merge.operands) - merge.operands.count(None) < 2:
        return False
    if not merge.is_scalable:
        # What multiplies or chooses element by element joins features of one shape; a factor for each channel does not.
        pointwise = not trace.nodes[merge.node].is_layer and merge.name not in ("slices", "stack")
        return not pointwise or merge.shapes.count(shape) > 1 or merge.is_broadcast
    if merge.axis is None:
        return None not in merge.operands
    return joins_channels(trace, merge)


def _of_merge(trace: Trace, merge: Merge, rank: int) -> list[Candidate]:
    """The candidates of one merge: each operand that goes around the main path."""
    tracked = [(n, node) for n, node in enumerate(merge.operands) if node is not None and trace.nodes[node].is_number]
    gated: dict[int, int] = {}
    for position, node in tracked:
        for _, other in tracked:
            if other != node and (start := _gated_start(trace, node, other, merge, rank)) is not None:
                gated[position] = start
    direct = [(position, node) for position, node in tracked if position not in gated]
    if not direct:
        return []
    # The main path is the deepest operand; of two, the one that came through a lower resolution, however few layers
    # it has.
    depth = [((trace.with_ancestors(node) & trace.layers).bit_count(), node, position) for position, node in direct]
    _, main_node, main = max(depth)
    for (position, node), (_, skip) in (direct, direct[::-1]) if len(direct) == 2 else ():
        if _fork(trace, skip, node, merge, rank) is not None:
            main, main_node = position, node
            break
    found = []
    for position, node in tracked:
        if position != main:
            spans = (gated[position], 0, 1) if position in gated else _fork(trace, node, main_node, merge, rank)
            # A vector that is added to a map is a condition or a context; a skip is a map.
            is_map = not merge.is_broadcast or merge.shapes[position] == trace.nodes[merge.node].shape
            if spans is not None and is_map:
                found.append(Candidate(trace, merge, position, main, *spans))
    if not found and len(direct) == len(tracked) == 2 and merge.is_scalable:
        # As many layers on either side: which is the skip, the others must tell.
        spans = _fork(trace, direct[1][1], direct[0][1], merge, rank, is_decided=True)
        found = [] if spans is None else [Candidate(trace, merge, direct[1][0], direct[0][0], *spans)]
    return found


def _fork(
    trace: Trace, skip: int, main: int, merge: Merge, rank: int, *, is_decided: bool = False
) -> tuple[int, int, int] | None:
    """Where the two paths part, and the layers on each side, if the skip is the shorter one or that is decided."""
    common = trace.with_ancestors(skip) & trace.with_ancestors(main)
    while common:
        start = common.bit_length() - 1
        on_skip, on_main = len(trace.layers_between(start, skip)), len(trace.layers_between(start, main))
        longer = on_main > on_skip
        if not on_skip and not on_main:
            mixed = [len(trace.between(trace.mixtures, start, end)) for end in (main, skip)]
            longer = mixed[0] > mixed[1]
        if on_skip and on_main:
            lower, skip_lower = _goes_lower(trace, start, main, merge), _goes_lower(trace, start, skip, merge)
            longer = lower if lower != skip_lower else longer
        longer = on_main > 0 if is_decided else longer
        if longer and _is_feature(trace, start, merge, rank):
            return start, on_skip, on_main
        # They may share something late that is no feature, such as an embedding of time.
        common &= ~trace.with_ancestors(start)
    return None


def _is_feature(trace: Trace, node: int, merge: Merge, rank: int) -> bool:
    """True if a tensor is a feature, not an embedding of time or text, of which there is one vector for each image."""
    shape, merged = trace.nodes[node].shape, merge.shapes[0]
    if not trace.with_ancestors(node) & trace.primary_inputs:
        return False
    if rank == 2:
        return len(shape) >= 2
    if len(shape) == 2:
        return shape[0] != merged[0]
    return len(shape) > 2 and (_vectors(shape) > 1 or _vectors(merged) == 1 or shape in merge.shapes)


def _vectors(shape: tuple[int, ...]) -> int:
    """How many vectors there are for each image, at the least."""
    return math.prod(sorted(shape[1:])[:-1])


def _gated_start(trace: Trace, gated: int, main: int, merge: Merge, rank: int) -> int | None:
    """Attention gates: the operand is feature * gate(feature, main). Where the feature leaves the main path."""
    if not trace.depends(gated, main):
        return None
    between = trace.with_ancestors(gated) & ~trace.with_ancestors(main) & trace.products
    for index in sorted(bits(between), reverse=True):
        node = trace.nodes[index]
        for feature in node.inputs:
            on_main_side = feature == main or trace.depends(feature, main)
            if not on_main_side and trace.nodes[feature].shape == node.shape:
                spans = _fork(trace, feature, main, merge, rank)
                if spans is not None:
                    return spans[0]
    return None


def _goes_lower(trace: Trace, start: int, end: int, merge: Merge) -> bool:
    """True if every path from start to end passes a layer or pooling with fewer positions than the merge has.

    Every path: attention over pooled keys, and gates computed from an average, keep one at full resolution.
    """
    shape = trace.nodes[merge.node].shape
    # Channels last only where the concatenation or the next layer says so.
    axis = merge.axis if merge.axis is not None else channel_axis(trace, merge.node) or min(1, len(shape) - 1)
    positions, begins = math.prod(shape) // max(shape[axis], 1), trace.nodes[start].shape
    if len(begins) == len(shape):  # of a feature that goes up to the merge on both paths
        positions = min(positions, math.prod(begins) // max(begins[axis], 1))
    front, seen = [end], {end}
    while front:
        node = front.pop()
        if node == start:
            return False
        if trace.positions.get(node, positions) < positions:
            continue
        for before in trace.nodes[node].inputs:
            if before not in seen and (before == start or trace.depends(before, start)):
                seen.add(before)
                front.append(before)
    return True
