"""Which candidates are the long skips: the longest nest of them, if there is no doubt."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .candidates import Candidate, changes_resolution, contains, longest_chain, site_key
from .trace import Call, Trace, bits


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
