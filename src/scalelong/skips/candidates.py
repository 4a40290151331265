"""The merges that could end a long skip: one operand went through the network, the other went around it."""

from dataclasses import dataclass
from typing import Any

from .axes import channel_axis, next_layer_axis
from .trace import Call, Merge, Trace, bits


@dataclass(frozen=True, eq=False)
class Candidate:
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


def candidates(trace: Trace) -> list[Candidate]:
    return [found for merge in trace.merges if _is_feature_merge(trace, merge) for found in _of_merge(trace, merge)]


def contains(trace: Trace, outer: Candidate, inner: Candidate) -> bool:
    """Whether one skip spans the other: it leaves earlier and returns later."""
    return trace.depends(inner.start, outer.start) and trace.depends(outer.end, inner.end)


def longest_chain(trace: Trace, found: list[Candidate]) -> list[Candidate]:
    """The longest sequence of skips, each around the next: the U."""
    ordered = sorted(found, key=lambda c: (c.start, -c.end))
    length = [1] * len(ordered)
    outer: list[int | None] = [None] * len(ordered)
    for j, inner in enumerate(ordered):
        for i in range(j):
            if length[i] + 1 > length[j] and contains(trace, ordered[i], inner):
                length[j], outer[j] = length[i] + 1, i
    chain: list[Candidate] = []
    at = max(range(len(ordered)), key=lambda i: length[i], default=None)
    while at is not None:
        chain.append(ordered[at])
        at = outer[at]
    return chain[::-1]


def changes_resolution(trace: Trace, candidate: Candidate) -> bool:
    """Whether the main path works on fewer positions than the skip somewhere on its way: the shape of a U."""
    return _goes_lower(trace, candidate.start, candidate.main_node, candidate.merge)


def _goes_lower(trace: Trace, start: int, end: int, merge: Merge) -> bool:
    shape = trace.nodes[merge.node].shape
    # Channels last only where the concatenation or the next layer says so.
    axis = merge.axis if merge.axis is not None else channel_axis(trace, merge.node) or 1
    positions = _size(shape) // shape[axis]
    for index in trace.layers_between(start, end):
        node = trace.nodes[index]
        channels = node.shape[1] if "conv" in node.name else node.shape[-1]
        # One position for each image is a pooled gate (squeeze and excitation), not a level of a U.
        if shape[0] < _size(node.shape) // max(channels, 1) < positions:
            return True
    return False


def site_key(trace: Trace, candidate: Candidate) -> tuple[Any, ...]:
    """Merges at one place of the source. A module that only merges does not count: its caller does."""
    key, call = candidate.merge.site.key, candidate.merge.call
    while call.parent is not None and call.site is not None and not _has_layers(trace, call):
        key, call = (*key, *call.site.key), call.parent
    return key


def _has_layers(trace: Trace, call: Call) -> bool:
    end = min(call.end, len(trace.nodes))
    return bool(trace.layers >> call.start & ((1 << (end - call.start)) - 1))


def _is_feature_merge(trace: Trace, merge: Merge) -> bool:
    shape = trace.nodes[merge.node].shape
    if len(shape) < 3:
        return False
    if merge.kind != "cat":
        return merge.shapes[0] == merge.shapes[1] and None not in merge.operands
    if merge.axis == 0 or sum(operand is not None for operand in merge.operands) < 2:
        return False
    # Tokens that are appended to a sequence are not features that are joined.
    return next_layer_axis(trace, merge.node) in (None, merge.axis)


def _of_merge(trace: Trace, merge: Merge) -> list[Candidate]:
    tracked = [(position, node) for position, node in enumerate(merge.operands) if node is not None]
    gated = {
        position: start
        for position, node in tracked
        for _, other in tracked
        if other != node and (start := _gated_start(trace, node, other, merge)) is not None
    }
    direct = [(position, node) for position, node in tracked if position not in gated]
    if not direct:
        return []
    found = []
    main, main_node = _main_path(trace, merge, direct)
    for position, node in tracked:
        if position == main:
            continue
        start = gated.get(position)
        spans = _fork(trace, node, main_node, merge) if start is None else (start, 0, 1)
        if spans is not None:
            found.append(Candidate(merge, position, main, *spans))
    return found


def _main_path(trace: Trace, merge: Merge, direct: list[tuple[int, int]]) -> tuple[int, int]:
    """The deepest operand; of two, the one that came through a lower resolution, however few layers it has."""
    if len(direct) == 2:
        for main, skip in (direct, direct[::-1]):
            if _fork(trace, skip[1], main[1], merge) is not None:
                return main
    depth = {position: (trace.with_ancestors(node) & trace.layers).bit_count() for position, node in direct}
    return max(direct, key=lambda pair: (depth[pair[0]], pair[1]))


def _fork(trace: Trace, skip: int, main: int, merge: Merge) -> tuple[int, int, int] | None:
    """Where the two paths part, and the layers on each side, if the skip is the shorter one."""
    common = trace.with_ancestors(skip) & trace.with_ancestors(main)
    while common:
        start = common.bit_length() - 1
        on_skip, on_main = len(trace.layers_between(start, skip)), len(trace.layers_between(start, main))
        longer = on_main > on_skip
        if on_skip and on_main:
            lower, skip_lower = (_goes_lower(trace, start, end, merge) for end in (main, skip))
            longer = lower if lower != skip_lower else longer
        if longer and _is_feature(trace, start, merge):
            return start, on_skip, on_main
        # They may share something late that is no feature, such as an embedding of time.
        common &= ~trace.with_ancestors(start)
    return None


def _is_feature(trace: Trace, node: int, merge: Merge) -> bool:
    """Not an embedding of time or text, of which there is one vector for each image."""
    shape = trace.nodes[node].shape
    return len(shape) > 2 or (len(shape) == 2 and shape[0] != merge.shapes[0][0])


def _gated_start(trace: Trace, gated: int, main: int, merge: Merge) -> int | None:
    """Attention gates: the operand is feature * gate(feature, main). Where the feature leaves the main path."""
    if not trace.depends(gated, main):
        return None
    between = trace.with_ancestors(gated) & ~trace.with_ancestors(main) & trace.products
    for index in sorted(bits(between), reverse=True):
        node = trace.nodes[index]
        for feature in node.inputs:
            on_main_side = feature == main or trace.depends(feature, main)
            if not on_main_side and trace.nodes[feature].shape == node.shape:
                spans = _fork(trace, feature, main, merge)
                if spans is not None:
                    return spans[0]
    return None


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
