"""Which candidates are the long skips: the longest nest of them, if there is no doubt.

The skips of a U lie one inside the other; residual blocks follow each other. The skips of one U share the scope of the
U, while a residual of an attention block, a dense block or a pyramid of pooled features has a scope of its own.

The rules, in the order in which `select` applies them. The network is one that is read wrongly without the rule; it
stands in tests/networks/deceptive.py (d), tests/finding/finding_networks.py (f), tests/attaching/hard_networks (h) or
tests/networks/zoo.py (z). Rules with a dash change no network of these when they alone are left out.

    rule                      what it takes out or adds                           network
    _shown_again              one tensor that is merged in many places            EmbeddingInEveryBlock (d)
    _without_dense            dense blocks                                        InlinePooledPyramid (f)
    _has_branches             pyramids of pooled or dilated branches              InlinePooledPyramid (f)
    _without_injections       the input, shown to every level again               ImageInTheDecoder (h)
    _without_blocks           residual blocks, which follow each other            WrittenOut (h)
    _is_parallel_branch       branches of one block, as in Inception              -
    _is_alone_in_its_block    a concatenation of a block's own                    -
    _in_sequence              additions that follow each other                    -
    _reads_one_variable       `h + f(h)` next to the additions of the U           InlineResidual (f)
    _below_the_input          the innermost addition of a U like Demucs           WrittenOutAdditions (f)
    _with_additions           levels that add in a U that concatenates            "mixed" (z)
    _merged_again             features that are merged a second time              AddedBehindTheConcat (h)
    _hidden                   levels that are merged by a product or a maximum    GatedLevel (f)
    _dominates                a product with a mask of the input is no level      Masked (f)
    _doubtful                 a second U                                          TwoUs (f)
    _repeats                  one U that runs several times                       "run twice" (z)
    innermost_around_nothing  the innermost skip, if it is merged with itself     AroundNothing (d)
    proposal                  the nest that an error proposes                     TwoDecoders (z)
"""

import ast
import linecache
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Any

from ..tracing import Call, CallSite, Trace, bits, common_scope
from .candidates import Candidate, Features, contains, contains_or_again, longest_chain, site_key


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
    left_out: list[tuple[Candidate, str]] = field(default_factory=list)
    """Merges that a reader could take for long skips, and why they are none."""


def select(trace: Trace, found: Sequence[Candidate]) -> Selection:
    """Concatenations first, then additions. Empty if there is no U."""
    known = [c for c in found if c.merge.form.is_scalable]
    shown = _shown_again(trace, known)
    known = [c for c in known if c not in shown]
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
    aside = [c for c in cats if c not in selection.chosen and c not in selection.doubtful]
    left_out = [(c, "one tensor that is merged in many places") for c in shown]
    left_out += [(c, "does not nest with the others") for c in aside] if selection.repeats == 1 else []
    hidden = _hidden(trace, selection.chosen, others)
    return replace(selection, hidden=hidden, left_out=left_out)


def _shown_again(trace: Trace, found: Sequence[Candidate]) -> list[Candidate]:
    """One tensor that is merged again and again: the embedding, the values of the first block, the image.

    Either a place in the source merges this tensor alone, or it is the only one that is concatenated more than once.
    """
    shown = [c for same in _by_site(trace, found).values() if _is_one_in_sequence(trace, same, 2) for c in same]
    cats = [c for c in found if c.merge.form.joins_channels and c not in shown]
    by_start = defaultdict(list)
    for candidate in cats:
        by_start[candidate.start].append(candidate)
    several = [same for same in by_start.values() if len({c.end for c in same}) > 1]
    return shown + (several[0] if len(several) == 1 and _is_one_in_sequence(trace, several[0], 3) else [])


def _is_one_in_sequence(trace: Trace, found: list[Candidate], least: int) -> bool:
    ends = sorted({c.end for c in found})
    one_after_the_other = all(trace.depends(b, a) for a, b in pairwise(ends))
    return len({c.start for c in found}) == 1 and len(ends) >= least and one_after_the_other


def proposal(trace: Trace, selection: Selection) -> list[Candidate]:
    """The nest to propose where several are possible: the longest, of one kind and one decoder; empty if in doubt.

    Merges at one place of the source belong to one decoder. Otherwise those of one function do.
    """
    found = [*selection.chosen, *selection.doubtful]
    groups = [*_by_site(trace, found).values()]
    if all(len(group) == 1 for group in groups):
        groups = [found]
    best = max((longest_chain(trace, group) for group in groups), key=len)
    rest = longest_chain(trace, [c for c in found if c not in best])
    alike = len({c.merge.kind for c in best}) == 1
    together = len(groups) > 1 or len({c.merge.scope for c in best}) == 1
    return best if alike and together and len(best) > max(1, len(rest)) else []


def innermost_around_nothing(trace: Trace, chain: list[Candidate], found: Sequence[Candidate]) -> Candidate | None:
    """The merge of a tensor with itself that would be the innermost skip: at a place where the other skips merge."""
    siblings = {site_key(trace, c): c for c in chain}
    inside = [c for c in found if site_key(trace, c) in siblings and contains(trace, chain[-1], c)]
    if len(inside) != 1:
        return None
    sibling = siblings[site_key(trace, inside[0])]
    return replace(inside[0], operand=sibling.operand, main=sibling.main)


def select_all(trace: Trace, found: Sequence[Candidate]) -> Selection:
    """The candidates that were named: all of them, outermost first, if they form one nest."""
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
    chain = longest_chain(trace, cats, contains_or_again)
    # One feature that is concatenated again and again is an injection, not a U.
    levels = len({c.start for c in chain})
    return chain if 2 * levels > len(chain) or levels > 1 else longest_chain(trace, cats)


def _is_alone_in_its_block(trace: Trace, candidate: Candidate, chain: list[Candidate]) -> bool:
    """Whether it takes place in a function of its own, inside the U, at a place of the source of its own."""
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
    useful = [c for c in adds if _has_decoder(trace, c) and not any(_feeds_skip(trace, c, one) for one in chain)]
    levels = [
        c
        for c in useful
        if c.goes_lower
        and (c.scope is whole or any(contains(trace, c, inner) for inner in chain))
        and any(contains(trace, c, one) or contains(trace, one, c) for one in chain)
    ]
    if again := _merged_again(trace, useful, chain):
        return Selection(chain, [*selection.doubtful, *again], selection.repeats)
    if not levels:
        return selection
    joined = longest_chain(trace, [*chain, *levels], contains_or_again)
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
    again = _merged_again(trace, [c for c in others if _has_decoder(trace, c)], chain)
    return found + [c for c in again if c not in found]


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


def _merged_again(trace: Trace, found: list[Candidate], chain: list[Candidate]) -> list[Candidate]:
    """Merges of the very features of several skips, later in the decoder: with one of two uses scaled, such a skip
    would be neither scaled nor left alone. Of one skip alone it is a residual around the U.
    """

    def repeats(candidate: Candidate, one: Candidate) -> bool:
        same = candidate.start == one.start and not candidate.skip_layers and not one.skip_layers
        return same and trace.depends(candidate.end, one.end)

    again = [c for c in found if any(repeats(c, one) for one in chain)]
    return again if len({c.start for c in again}) > 1 else []


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
