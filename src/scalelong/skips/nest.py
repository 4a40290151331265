"""From a recorded forward to the long skips: candidates at every merge, and which of them form the U."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .reach import channel_axis, next_layer_axis
from .trace import Call, Merge, Trace, bits

# The merges that could end a long skip: one operand went through the network, the other went around it.


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


# Which candidates are the long skips: the longest nest of them, if there is no doubt.


@dataclass(frozen=True)
class Selection:
    chosen: list[Candidate]
    """The long skips, outermost first."""
    doubtful: list[Candidate] = field(default_factory=list)
    """Candidates that could be long skips as well: with any of these the selection is ambiguous."""
    repeats: int = 1
    """How often each long skip occurs in one forward, where the model runs the same network several times."""


def select(trace: Trace, found: Sequence[Candidate]) -> Selection:
    """Concatenations first, then additions. Empty if there is no U."""
    cats = _without_blocks(trace, _without_dense([c for c in found if c.merge.kind == "cat"]))
    adds = _without_blocks(trace, [c for c in found if c.merge.kind != "cat"])
    by_cats = _select_cats(trace, cats)
    if by_cats.chosen:
        return _with_additions(trace, by_cats, adds)
    return by_cats if by_cats.doubtful else _select_adds(trace, adds)


def select_all(trace: Trace, found: Sequence[Candidate]) -> Selection:
    """The candidates that somebody named: all of them, outermost first, if they form one nest."""
    chain = longest_chain(trace, list(found))
    return Selection(chain, [c for c in found if c not in chain])


def _select_cats(trace: Trace, cats: list[Candidate]) -> Selection:
    chain = longest_chain(trace, cats)
    rest = [c for c in cats if c not in chain]
    if len(chain) > 1:
        doubtful = _doubtful(trace, chain, rest)
        repeats = _repeats(trace, chain, doubtful)
        return Selection(chain, [] if repeats > 1 else doubtful, repeats)
    levels = [c for c in cats if changes_resolution(trace, c) and c.skip_layers == 0]
    if chain and not rest:
        (only,) = chain
        direct = only.skip_layers == 0 and only.main_layers >= 3
        return Selection(chain if direct or changes_resolution(trace, only) else [])
    if levels:
        repeats = _repeats(trace, levels[:1], levels[1:])
        return Selection(levels[:1], [] if repeats > 1 or len(levels) == 1 else levels[1:], repeats)
    return Selection([])


def _select_adds(trace: Trace, adds: list[Candidate]) -> Selection:
    sites = _by_site(trace, adds)
    eligible = [
        c
        for same in sites.values()
        for c in same
        if len(longest_chain(trace, same)) > 1 or (changes_resolution(trace, c) and _has_decoder(trace, c))
    ]
    chain = longest_chain(trace, eligible)
    if len(chain) < 2:
        return Selection([])
    doubtful = _doubtful(trace, chain, [c for c in eligible if c not in chain])
    repeats = _repeats(trace, chain, doubtful)
    return Selection(chain, [] if repeats > 1 else doubtful, repeats)


def _with_additions(trace: Trace, selection: Selection, adds: list[Candidate]) -> Selection:
    """Some networks concatenate at some levels and add at others."""
    chain = selection.chosen
    levels = [
        c
        for c in adds
        if any(contains(trace, c, inner) for inner in chain)
        and not any(_feeds_skip(trace, c, one) for one in chain)
        and _has_decoder(trace, c)
        and changes_resolution(trace, c)
    ]
    if not levels:
        return selection
    joined = longest_chain(trace, [*chain, *levels])
    inside = [c for c in levels if any(contains(trace, outer, c) for outer in chain)]
    fits = len(joined) == len(chain) + len(levels) and len(inside) == len(levels)
    # An addition around all concatenations may be an outer level, or only a residual around the whole U.
    return Selection(joined if fits else chain, selection.doubtful if fits else levels, selection.repeats)


def _without_dense(cats: list[Candidate]) -> list[Candidate]:
    """Dense blocks concatenate ever more of the same features."""
    operands = {c.merge.node: frozenset(c.merge.operands) for c in cats}
    dense = {
        node for node, mine in operands.items() if any(mine < other or mine > other for other in operands.values())
    }
    return [c for c in cats if c.merge.node not in dense]


def _without_blocks(trace: Trace, found: list[Candidate]) -> list[Candidate]:
    """Without residual blocks (merges at one place that follow each other) and parallel branches of one block."""
    kept: list[Candidate] = []
    for same in _by_site(trace, found).values():
        several = len({c.merge.node for c in same}) > 1
        if several and _follow_each_other(trace, same):
            first = [c for c in same if changes_resolution(trace, c)][:1]
            # The same small U that runs several times is no residual block.
            kept += same if first and _repeats(trace, first, [c for c in same if c not in first]) > 1 else []
        elif several or not _is_parallel_branch(trace, same[0], found):
            kept += same
    return kept


def _follow_each_other(trace: Trace, found: list[Candidate]) -> bool:
    ordered = sorted(found, key=lambda c: c.end)
    pairs = [(a, b) for a, b in pairwise(ordered) if a.end != b.end]
    return all(b.start == a.end or trace.depends(b.start, a.end) for a, b in pairs)


def _is_parallel_branch(trace: Trace, candidate: Candidate, found: list[Candidate]) -> bool:
    """A block with its own small layers on either side (Inception), around which the network does not nest."""
    call = candidate.merge.call
    if candidate.skip_layers == 0 or call.parent is None or any(contains(trace, candidate, c) for c in found):
        return False
    return call.contains(candidate.start) or any(node == candidate.start for _, node in call.inputs)


def _doubtful(trace: Trace, chain: list[Candidate], rest: list[Candidate]) -> list[Candidate]:
    sites = {site_key(trace, c) for c in chain}
    doubtful = [c for c in rest if site_key(trace, c) in sites or any(_conflict(c, one, chain) for one in chain)]
    second = longest_chain(trace, [c for c in rest if c not in doubtful])
    return doubtful + (second if len(second) > 1 else [])


def _conflict(candidate: Candidate, one: Candidate, chain: list[Candidate]) -> bool:
    crosses = (
        candidate.start < one.start < candidate.end < one.end or one.start < candidate.start < one.end < candidate.end
    )
    spans = any(candidate.start < c.start and c.end < candidate.end for c in chain)
    return crosses or candidate.end == one.end or (candidate.start == one.start and spans)


def _has_decoder(trace: Trace, candidate: Candidate) -> bool:
    return any(trace.depends(layer, candidate.end) for layer in bits(trace.layers >> candidate.end << candidate.end))


def _feeds_skip(trace: Trace, candidate: Candidate, one: Candidate) -> bool:
    """Whether an addition is a part of the gate on another skip."""
    return trace.depends(one.skip_node, candidate.end) and not trace.depends(one.main_node, candidate.end)


def _repeats(trace: Trace, chain: list[Candidate], rest: list[Candidate]) -> int:
    """How often the module around the whole chain runs, if all the rest is the same chain in its other runs."""
    around = next((call for call in chain[0].merge.call.stack() if all(_runs_in(trace, c, call) for c in chain)), None)
    if around is None or not rest:
        return 1
    runs = [call for call in trace.calls if call.name == around.name]
    wanted = [_signature(trace, c) for c in chain]
    for run in runs:
        mine = [c for c in (*chain, *rest) if _runs_in(trace, c, run)]
        if [_signature(trace, c) for c in longest_chain(trace, mine)] != wanted or len(mine) != len(chain):
            return 1
    return len(runs) if len(runs) * len(chain) == len(chain) + len(rest) else 1


def _runs_in(trace: Trace, candidate: Candidate, call: Call) -> bool:
    inside = call.contains(candidate.end)
    return inside and all(call.contains(layer) for layer in trace.layers_between(candidate.start, candidate.main_node))


def _signature(trace: Trace, candidate: Candidate) -> tuple[object, ...]:
    merge = candidate.merge
    return merge.call.name, site_key(trace, candidate), candidate.operand, merge.shapes[candidate.operand]


def _by_site(trace: Trace, found: Sequence[Candidate]) -> dict[object, list[Candidate]]:
    sites = defaultdict(list)
    for candidate in found:
        sites[site_key(trace, candidate)].append(candidate)
    return sites
