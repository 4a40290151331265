"""From a recorded forward to the long skips: candidates at every merge, and which of them form the U.

A candidate is an interval: it begins where a feature leaves the main path and ends at the merge. The skips of a U lie
one inside the other; residual blocks follow each other. Where a candidate belongs is told by its *scope*, the innermost
run of a function in which the merge and all layers that it goes around took place: the skips of one U share the scope
of the U, while a residual of an attention block, a dense block or a pyramid of pooled features has a scope of its own.
"""

import ast
import linecache
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

from ..tracing import Call, CallSite, Invocation, Merge, Trace, bits, common_scope
from .reach import channel_axis, next_layer_axis

# The merges that could end a long skip: one operand went through the network, the other went around it.


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
    return [c for merge in trace.merges if _is_feature_merge(trace, merge, rank) for c in _of_merge(features, merge)]


def contains(trace: Trace, outer: Candidate, inner: Candidate) -> bool:
    """Whether one skip spans the other: it leaves earlier and returns later."""
    return trace.depends(inner.start, outer.start) and trace.depends(outer.end, inner.end)


def _contains_or_again(trace: Trace, outer: Candidate, inner: Candidate) -> bool:
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
    # Tokens that are appended to a sequence, or images to a batch, are not features that are joined.
    axis = next_layer_axis(trace, merge.node)
    return axis == merge.axis if axis is not None else merge.axis != 0


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


# Which candidates are the long skips: the longest nest of them, if there is no doubt.


@dataclass(frozen=True)
class Selection:
    chosen: list[Candidate]
    """The long skips, outermost first."""
    doubtful: list[Candidate] = field(default_factory=list)
    """Candidates that could be long skips as well: with any of these the selection is ambiguous."""
    repeats: int = 1
    """How often each long skip occurs in one forward, where the model runs the same network several times."""
    hidden: list[Candidate] = field(default_factory=list)
    """Merges among the long skips of a kind that cannot be scaled."""


def select(trace: Trace, found: Sequence[Candidate]) -> Selection:
    """Concatenations first, then additions. Empty if there is no U."""
    known = [c for c in found if c.merge.form.is_scalable]
    cats = [c for c in known if c.merge.form.joins_channels]
    cats = _without_blocks(trace, _without_injections(trace, _without_dense(cats)))
    adds = _without_blocks(trace, _without_injections(trace, [c for c in known if not c.merge.form.joins_channels]))
    selection = _select_cats(trace, cats)
    if selection.chosen:
        selection = _with_additions(trace, selection, adds)
    elif not selection.doubtful:
        selection = _select_adds(trace, adds)
    if not selection.chosen:
        return selection
    others = [c for c in found if not c.merge.form.is_scalable]
    return Selection(selection.chosen, selection.doubtful, selection.repeats, _hidden(trace, selection.chosen, others))


def select_all(trace: Trace, found: Sequence[Candidate]) -> Selection:
    """The candidates that somebody named: all of them, outermost first, if they form one nest."""
    named = [c for c in found if c.merge.form.is_scalable]
    chain = longest_chain(trace, named)
    return Selection(chain, [c for c in named if c not in chain])


def _select_cats(trace: Trace, cats: list[Candidate]) -> Selection:
    chain = _nest_of_cats(trace, cats)
    alone = [c for c in chain if _is_alone_in_its_block(trace, c, chain)]
    if alone:
        # A concatenation of a block's own, in the middle of the U: kept in doubt only if it is shaped like a level.
        cats = [c for c in cats if c not in alone]
        chain = _nest_of_cats(trace, cats)
        alone = [c for c in alone if c.skip_layers == 0 and c.goes_lower == all(one.goes_lower for one in chain)]
    rest = [c for c in cats if c not in chain]
    if len(chain) > 1:
        doubtful = _doubtful(trace, chain, rest)
        repeats = _repeats(trace, chain, doubtful)
        return Selection(chain, alone if repeats > 1 else [*doubtful, *alone], repeats)
    if alone:
        return Selection(chain, [*alone, *rest]) if chain else _select_cats_of_one_level(trace, [*alone, *rest])
    return _select_cats_of_one_level(trace, cats)


def _select_cats_of_one_level(trace: Trace, cats: list[Candidate]) -> Selection:
    if len(cats) == 1:
        (only,) = cats
        direct = only.skip_layers == 0 and only.main_layers >= 3
        return Selection(cats if direct or only.goes_lower else [])
    levels = [c for c in cats if c.goes_lower and c.skip_layers == 0]
    if levels:
        repeats = _repeats(trace, levels[:1], levels[1:])
        return Selection(levels[:1], [] if repeats > 1 or len(levels) == 1 else levels[1:], repeats)
    return Selection([])


def _nest_of_cats(trace: Trace, cats: list[Candidate]) -> list[Candidate]:
    chain = longest_chain(trace, cats, _contains_or_again)
    # One feature that is concatenated again and again is an injection, not a U.
    levels = len({c.start for c in chain})
    return chain if 2 * levels > len(chain) or levels > 1 else longest_chain(trace, cats)


def _is_alone_in_its_block(trace: Trace, candidate: Candidate, chain: list[Candidate]) -> bool:
    """Whether it takes place in a function of its own, inside of the U, at a place of the source of its own."""
    others = [c for c in chain if c is not candidate]
    if not others:
        return False
    whole = reduce(common_scope, [c.scope for c in chain])
    mine = site_key(trace, candidate)
    shared = any(c.scope.is_inside(candidate.scope) or site_key(trace, c) == mine for c in others)
    return candidate.scope is not whole and not shared


def _select_adds(trace: Trace, adds: list[Candidate]) -> Selection:
    nests = [c for same in _by_site(trace, adds).values() if len(longest_chain(trace, same)) > 1 for c in same]
    levels = [c for c in adds if c not in nests and c.goes_lower and _has_decoder(trace, c)]
    sure = [*nests, *levels]
    chain = longest_chain(trace, sure)
    # Merges on lines of their own, in the function where the others stand: the same U, written out.
    scopes = {c.scope for c in chain} or {c.scope for c in adds}
    lines = [c for c in adds if c not in sure and c.scope in scopes and _has_decoder(trace, c)]
    lines = [c for c in lines if not _in_sequence(trace, c, lines) and not _reads_one_variable(c.merge.site)]
    joined = longest_chain(trace, [*chain, *lines])
    added = [c for c in joined if c not in chain]
    in_doubt: list[Candidate] = []
    if added and set(chain) <= set(joined):
        # A residual across several lines in the middle of a U looks like its innermost level. It is none where the
        # skips begin at full resolution; where they begin below, as in Demucs, the innermost goes around the middle.
        full = bool(chain) and all(c.goes_lower for c in chain) and not _below_the_input(trace, chain[0])
        in_doubt = added if full or len(joined) < 3 else []
        chain = joined if not in_doubt or not chain else chain
    if len(chain) < 2:
        return Selection([], [])
    rest = [c for c in sure if c not in chain]
    doubtful = _doubtful(trace, chain, rest)
    repeats = _repeats(trace, chain, doubtful)
    in_doubt = [c for c in in_doubt if c not in doubtful]
    return Selection(chain, in_doubt if repeats > 1 else [*doubtful, *in_doubt], repeats)


def _below_the_input(trace: Trace, outermost: Candidate) -> bool:
    shape = outermost.merge.shapes[outermost.operand]
    sources = trace.with_ancestors(outermost.start)
    images = [node.shape for node in trace.nodes if node.name == "input" and sources >> node.index & 1]
    same = [image for image in images if len(image) == len(shape) > 2]
    return bool(same) and all(math.prod(shape[2:]) < math.prod(image[2:]) for image in same)


def _in_sequence(trace: Trace, candidate: Candidate, found: list[Candidate]) -> bool:
    """Whether another follows it or goes before it, as residual blocks do."""

    def follows(first: Candidate, second: Candidate) -> bool:
        return second.start == first.end or trace.depends(second.start, first.end)

    return any(follows(candidate, c) or follows(c, candidate) for c in found if c is not candidate)


def _reads_one_variable(site: CallSite) -> bool:
    """`h + f(h)`: the path and the shortcut around it begin at one variable of one expression. A residual."""
    frame = site.frames[0]
    line, last_line, column, last_column = frame.position
    if line is None or last_line is None or column is None or last_column is None:
        return False
    lines = [linecache.getline(frame.code.co_filename, n).encode() for n in range(line, last_line + 1)]
    lines[-1] = lines[-1][:last_column]
    lines[0] = lines[0][column:]
    try:
        statement = ast.parse(b"(" + b"".join(lines) + b")" if line else b"").body[0]
    except (SyntaxError, IndexError):
        try:
            statement = ast.parse(b"".join(lines)).body[0]
        except (SyntaxError, IndexError):
            return False
    node: Any = statement.value if isinstance(statement, ast.Expr) else statement
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
    elif isinstance(node, ast.AugAssign):
        sides = (node.target, node.value)
    else:
        return False
    names = [{ast.unparse(n) for n in ast.walk(side) if isinstance(n, ast.Name)} - {"self"} for side in sides]
    alone = [isinstance(side, ast.Name) for side in sides]
    return (alone[0] and names[0] <= names[1]) or (alone[1] and names[1] <= names[0])


def _with_additions(trace: Trace, selection: Selection, adds: list[Candidate]) -> Selection:
    """Some networks concatenate at some levels and add at others."""
    chain = selection.chosen
    whole = reduce(common_scope, [c.scope for c in chain])
    levels = [
        c
        for c in adds
        if not any(_feeds_skip(trace, c, one) for one in chain)
        and _has_decoder(trace, c)
        and c.goes_lower
        and (c.scope is whole or any(contains(trace, c, inner) for inner in chain))
        and any(contains(trace, c, one) or contains(trace, one, c) for one in chain)
    ]
    if not levels:
        return selection
    joined = longest_chain(trace, [*chain, *levels], _contains_or_again)
    inside = [c for c in levels if any(contains(trace, outer, c) for outer in chain)]
    fits = len(joined) == len(chain) + len(levels) and len(inside) == len(levels)
    # An addition around all concatenations may be an outer level, or only a residual around the whole U.
    doubtful = [c for c in levels if c not in selection.doubtful]
    return Selection(
        joined if fits else chain, selection.doubtful if fits else [*selection.doubtful, *doubtful], selection.repeats
    )


def _hidden(trace: Trace, chain: list[Candidate], others: list[Candidate]) -> list[Candidate]:
    """Joins of other kinds that would be levels of this U: a maximum, a product, a matrix product of two features.

    With one of these between the long skips, their numbers would be wrong.
    """
    whole = reduce(common_scope, [c.scope for c in chain])
    known = {c.end for c in chain}
    ancestors_of_skips = 0
    for one in chain:
        ancestors_of_skips |= trace.with_ancestors(one.skip_node) & ~trace.with_ancestors(one.main_node)
    found = []
    for c in others:
        if c.end in known or not whole.is_inside(c.scope) or ancestors_of_skips >> c.end & 1:
            continue
        inside = [one for one in chain if contains(trace, c, one)]
        outside = [one for one in chain if contains(trace, one, c)]
        lower = c.goes_lower and not trace.nodes[c.end].is_layer
        is_level = len(inside) + len(outside) == len(chain) and (inside or lower) and _has_decoder(trace, c)
        if is_level and c.skip_layers <= 1 and _dominates(trace, c.start, c.main_node):
            found.append(c)
    return found


def _dominates(trace: Trace, start: int, node: int) -> bool:
    """Whether all of a node that comes from the first input came through `start`, the place where a skip leaves."""
    primary = Features(trace, 3).primary
    first = (primary & -primary).bit_length() - 1
    if start == first:
        return True
    front, seen = [node], {node, start}
    while front:
        for before in trace.nodes[front.pop()].inputs:
            if before == first:
                return False
            if before not in seen:
                seen.add(before)
                front.append(before)
    return True


def _without_dense(cats: list[Candidate]) -> list[Candidate]:
    """Dense blocks concatenate ever more of the same features. Branches side by side are more than one main path."""
    operands = {c.merge.node: frozenset(c.merge.operands) for c in cats}
    dense = {
        node for node, mine in operands.items() if any(mine < other or mine > other for other in operands.values())
    }
    return [c for c in cats if c.merge.node not in dense and not _has_branches(c)]


def _has_branches(candidate: Candidate) -> bool:
    """A pyramid of pooled or dilated branches: beside the main path others that fork off at the same feature."""
    trace, merge, start = candidate.trace, candidate.merge, candidate.start
    main = trace.with_ancestors(candidate.main_node)
    rest = [node for n, node in enumerate(merge.operands) if n not in (candidate.operand, candidate.main)]
    return any(
        node is not None
        and (trace.with_ancestors(node) & main).bit_length() - 1 == start
        and trace.layers_between(start, node)
        for node in rest
    )


def _without_injections(trace: Trace, found: list[Candidate]) -> list[Candidate]:
    """Without the input at several sizes, which some networks show to every level again."""
    raw = [c for c in found if not any(trace.nodes[n].is_learned for n in bits(trace.with_ancestors(c.start)))]
    resized = [c for c in raw if _resized(trace, c)]
    return [c for c in found if c not in raw] if resized and len({c.end for c in raw}) > 1 else list(found)


def _resized(trace: Trace, candidate: Candidate) -> bool:
    axis = 1 if candidate.merge.axis is None else candidate.merge.axis
    shape = candidate.merge.shapes[candidate.operand]
    sources = trace.with_ancestors(candidate.start)
    images = [trace.nodes[node].shape for node in bits(sources) if trace.nodes[node].name == "input"]
    same = [image for image in images if len(image) == len(shape)]
    return bool(same) and not any(
        all(a == b for n, (a, b) in enumerate(zip(shape, image, strict=True)) if n != axis) for image in same
    )


def _without_blocks(trace: Trace, found: list[Candidate]) -> list[Candidate]:
    """Without residual blocks (merges at one place that follow each other) and parallel branches of one block."""
    kept: list[Candidate] = []
    for same in _by_site(trace, found).values():
        # Around nothing but weights that are multiplied in a loop (a scan) only where others go around layers.
        if not any(c.main_layers for c in same):
            continue
        several = len({c.merge.node for c in same}) > 1
        if several and _follow_each_other(trace, same):
            first = [c for c in same if c.goes_lower][:1]
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
    aside = [c for c in rest if site_key(trace, c) not in sites and _is_one_sided(trace, c, chain[-1])]
    # On one side of the bottleneck lie fusions of the encoder or of the decoder; or another U.
    if len(longest_chain(trace, aside)) < 2:
        rest = [c for c in rest if c not in aside or (c.goes_lower and not c.skip_layers)]
    doubtful = [c for c in rest if site_key(trace, c) in sites or any(_conflict(c, one, chain) for one in chain)]
    second = longest_chain(trace, [c for c in rest if c not in doubtful])
    # With any doubt, all are shown: which of them is meant is for the reader to say.
    return list(rest) if doubtful or len(second) > 1 else []


def _is_one_sided(trace: Trace, candidate: Candidate, innermost: Candidate) -> bool:
    def follows(first: int, second: int) -> bool:
        return first == second or trace.depends(second, first)

    return follows(candidate.end, innermost.start) or follows(innermost.end, candidate.start)


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
