"""Which candidates are the long skips: the longest nest of them, if there is no doubt.

The skips of a U lie one inside the other; residual blocks follow each other. The skips of one U share the scope of the
U, while a residual of an attention block, a dense block or a pyramid of pooled features has a scope of its own.

The rules, in the order in which `select` applies them. The network is one that is read wrongly without the rule; it
stands in tests/networks/deceptive.py (d) or zoo.py (z), or in tests/finding/finding_networks.py (f).

    rule                      what it takes out, adds or decides                  network
    _shown_again              one tensor that is merged in many places            EmbeddingInEveryBlock (d)
    _without_dense            dense blocks, pyramids of pooled branches           InlinePooledPyramid (f)
    _without_injections       the input, shown to every level again               ImageAtEveryLevel (d)
    _without_blocks           residual blocks, which follow each other            AdapterInLine (d)
                              branches of one block, as in Inception              BottleneckInception (f)
    _reads_one_variable       `h + f(h)`, `cat([f(h), g(h)])` next to the U       InlineResidual (f), BranchesInLine (d)
    _is_like_a_level          a level around the middle, on a line of its own     Written (d)
    _below_the_input          the innermost addition of a U like Demucs           WrittenOutAdditions (f)
    _with_additions           levels that add in a U that concatenates            "mixed" (z)
    _merged_again             features that enter the decoder a second time       AddedAndConcatenated (d)
    _doubtful                 a second U                                          TwoUs (f)
    _repeats                  one U that runs several times                       "run twice" (z), Flips (d)
    _with_main_paths          which operand is the skip                           AdapterInLine (d)
    _hidden                   levels merged by a product, or that broadcast       GatedLevel (f), BroadcastOutermost (d)
    innermost_around_nothing  the innermost skip, if it is merged with itself     AroundNothing (d)
"""

import ast
import linecache
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from operator import attrgetter
from typing import Any

from torch import nn

from ..tracing import Call, CallSite, Invocation, Trace, common_scope
from .candidates import Candidate, longest_chain


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


def select(trace: Trace, found: Sequence[Candidate], itself: Sequence[Candidate] = ()) -> Selection:
    """Concatenations first, then additions. Empty if there is no U. `itself`: merges of a tensor with itself."""
    known = [c for c in found if c.merge.is_scalable]
    shown = _shown_again(known)
    cats = _without_dense([c for c in known if c.merge.kind == "cat" and c not in shown])
    cats = _without_blocks(_without_injections(trace, cats))
    adds = [c for c in known if c.merge.kind != "cat" and c not in shown]
    adds = _without_blocks(_without_injections(trace, adds))
    selection = _select_cats(cats)
    if selection.chosen:
        selection = _with_additions(selection, adds)
    elif not selection.doubtful:
        selection = _select_adds(adds, itself)
    if not selection.chosen:
        return selection
    selection = _with_main_paths(selection)
    left_out = [(c, "one tensor that is merged in many places") for c in shown]
    if selection.repeats == 1:
        taken = {*selection.chosen, *selection.doubtful}
        left_out += [(c, "does not nest with the others") for c in cats if c not in taken]
    hidden = _hidden(trace, selection.chosen, [c for c in found if not c.merge.is_scalable])
    return replace(selection, hidden=hidden, left_out=left_out)


def select_all(found: Sequence[Candidate]) -> Selection:
    """The candidates that were named: all of them, outermost first, if they form one nest."""
    named = [c for c in found if c.merge.is_scalable]
    chain = longest_chain(named)
    return Selection(chain, [c for c in named if c not in chain])


def innermost_around_nothing(chain: list[Candidate], found: Sequence[Candidate]) -> Candidate | None:
    """The merge of a tensor with itself that would be the innermost skip: at a place where the other skips merge."""
    siblings = {c.site: c for c in chain}
    inside = [c for c in found if c.site in siblings and chain[-1].contains(c)]
    if len(inside) != 1:
        return None
    sibling = siblings[inside[0].site]
    return replace(inside[0], operand=sibling.operand, main=sibling.main)


def _with_main_paths(selection: Selection) -> Selection:
    """The main path of a skip comes through the next inner merge, however many layers the skip has of its own.

    Around the innermost there is nothing to tell by: with layers of its own, on a line of its own and at one resolution
    it is in doubt.
    """
    chain = selection.chosen
    for n, (outer, inner) in enumerate(pairwise(chain)):
        through = [outer.trace.with_ancestors(node) >> inner.end & 1 for node in (outer.main_node, outer.skip_node)]
        if through == [0, 1] and len(outer.merge.operands) == 2:
            chain = [*chain[:n], outer.turned(), *chain[n + 1 :]]
    innermost, sites = chain[-1], {c.site for c in chain[:-1]}
    if sites and innermost.skip_layers and not innermost.goes_lower and innermost.site not in sites:
        return replace(selection, chosen=chain[:-1], doubtful=[*selection.doubtful, innermost])
    return replace(selection, chosen=chain)


# What is no long skip


def _shown_again(found: Sequence[Candidate]) -> list[Candidate]:
    """One tensor that is merged again and again: the embedding, the values of the first block, the image.

    Either a place in the source merges this tensor alone, or it is the only one that is concatenated more than once.
    """

    def is_one_in_sequence(same: list[Candidate], least: int) -> bool:
        ends = sorted({c.end for c in same})
        in_order = all(same[0].trace.depends(b, a) for a, b in pairwise(ends))
        return len({c.start for c in same}) == 1 and len(ends) >= least and in_order

    shown = [c for same in _grouped(found, attrgetter("site")).values() if is_one_in_sequence(same, 2) for c in same]
    cats = [c for c in found if c.merge.kind == "cat" and c not in shown]
    several = [same for same in _grouped(cats, attrgetter("start")).values() if len({c.end for c in same}) > 1]
    return shown + (several[0] if len(several) == 1 and is_one_in_sequence(several[0], 3) else [])


def _without_dense(cats: list[Candidate]) -> list[Candidate]:
    """Without dense blocks, which concatenate ever more of the same features, and pyramids of pooled or dilated
    branches: next to the main path others that fork off at the same feature.
    """
    operands = {c.merge.node: frozenset(c.merge.operands) for c in cats}
    kept = []
    for c in cats:
        mine = operands[c.merge.node]
        dense = any(mine < other or mine > other for other in operands.values())
        main = c.trace.with_ancestors(c.main_node)
        rest = [node for n, node in enumerate(c.merge.operands) if node is not None and n not in (c.operand, c.main)]
        forks = [node for node in rest if (c.trace.with_ancestors(node) & main).bit_length() - 1 == c.start]
        if not dense and not any(c.trace.layers_between(c.start, node) for node in forks):
            kept.append(c)
    return kept


def _without_injections(trace: Trace, found: list[Candidate]) -> list[Candidate]:
    """Without the input at several sizes, which some networks show to every level again."""
    learned = sum(1 << node.index for node in trace.nodes if node.is_learned)
    raw = [c for c in found if not trace.with_ancestors(c.start) & learned]

    def is_resized(c: Candidate) -> bool:
        axis, shape = c.merge.axis or 1, c.merge.shapes[c.operand]
        sizes = [image[:axis] + image[axis + 1 :] for image in _images(c) if len(image) == len(shape)]
        return bool(sizes) and shape[:axis] + shape[axis + 1 :] not in sizes

    injected = len({c.end for c in raw}) > 1 and any(map(is_resized, raw))
    return [c for c in found if c not in raw] if injected else found


def _images(c: Candidate) -> list[tuple[int, ...]]:
    """The shapes of the inputs that a skip is made of."""
    sources = c.trace.with_ancestors(c.start)
    return [node.shape for node in c.trace.nodes if node.name == "input" and sources >> node.index & 1]


def _without_blocks(found: list[Candidate]) -> list[Candidate]:
    """Without residual blocks, merges at one place that follow each other, and parallel branches of one block."""
    kept: list[Candidate] = []
    for same in _grouped(found, attrgetter("site")).values():
        ordered = sorted(same, key=lambda c: c.end)
        follow = all(b.follows(a) for a, b in pairwise(ordered) if a.end != b.end)
        if len({c.end for c in same}) > 1 and follow:
            # The same small U that runs several times is no residual block.
            first = [c for c in same if c.goes_lower][:1]
            kept += same if first and _repeats(first, [c for c in same if c not in first]) > 1 else []
            continue
        c, call = same[0], same[0].merge.call
        # A block with its own small layers on either side, around which the network does not nest.
        inside = call.contains(c.start) or any(node == c.start for _, node in call.inputs)
        is_branch = len(same) == 1 and c.skip_layers > 0 and call.parent is not None and inside
        # Not around weights alone that are multiplied in a loop (a scan).
        if any(c.main_layers for c in same) and not (is_branch and not any(map(c.contains, found))):
            kept += same
    return kept


# Concatenations


def _select_cats(cats: list[Candidate]) -> Selection:
    chain = longest_chain(cats, again=True)
    if len({c.start for c in chain}) == 1:  # one feature that is concatenated again and again is no U
        chain = longest_chain(cats)
    if len(chain) > 1:
        innermost, others = chain[-1], chain[:-1]
        if innermost.site not in {c.site for c in others} and not innermost.goes_lower:
            # On a line of its own, around the middle alone: a dense or parallel branch looks like it.
            in_one = _reads_one_variable(innermost.merge.site)
            if innermost.skip_layers and in_one:
                return _select_cats([c for c in cats if c is not innermost])
            # `cat([f(h), h])` is the innermost level of a U that is written out. Where the others stand in a loop, it
            # may as well be a dense block.
            in_loop = len(others) > 1 and len({c.site for c in others}) == 1
            may_be_block = in_loop or (all(c.goes_lower for c in others) and not _below_the_input(chain[0]))
            if may_be_block and (in_one or not _is_like_a_level(innermost, others)):
                return Selection(others, [innermost])
        doubtful = _doubtful(chain, [c for c in cats if c not in chain])
        repeats = _repeats(chain, doubtful)
        return Selection(chain, [] if repeats > 1 else doubtful, repeats)
    if len(cats) == 1:
        (only,) = cats
        return Selection(cats if only.goes_lower or (only.skip_layers == 0 and only.main_layers >= 3) else [])
    levels = [c for c in cats if c.goes_lower and c.skip_layers == 0]
    repeats = _repeats(levels[:1], levels[1:]) if levels else 1
    return Selection(levels[:1], [] if repeats > 1 else levels[1:], repeats)


def _with_additions(selection: Selection, adds: list[Candidate]) -> Selection:
    """Some networks concatenate at some levels and add at others."""
    chain, doubtful = selection.chosen, selection.doubtful
    whole = _scope_of_all(chain)
    levels, useful = [], []
    for c in adds:
        gates = any(c.trace.depends(o.skip_node, c.end) and not c.trace.depends(o.main_node, c.end) for o in chain)
        if not c.has_decoder or gates:
            continue
        useful.append(c)
        around = any(c.contains(one) for one in chain)
        if c.goes_lower and (around or (c.scope is whole and any(one.contains(c) for one in chain))):
            levels.append(c)
    if again := _merged_again(useful, chain):
        return replace(selection, doubtful=[*doubtful, *again])
    if not levels:
        return selection
    # An addition around all concatenations may be an outer level, or only a residual around the whole U.
    joined = longest_chain([*chain, *levels], again=True)
    inside = all(any(outer.contains(c) for outer in chain) for c in levels)
    if inside and len(joined) == len(chain) + len(levels):
        return replace(selection, chosen=joined)
    return replace(selection, doubtful=[*doubtful, *(c for c in levels if c not in doubtful)])


# Additions


def _select_adds(adds: list[Candidate], itself: Sequence[Candidate]) -> Selection:
    nests = [c for same in _grouped(adds, attrgetter("site")).values() if len(longest_chain(same)) > 1 for c in same]
    levels = [c for c in adds if c not in nests and c.goes_lower and c.has_decoder]
    sure = [*nests, *levels]
    chain = longest_chain(sure)
    # Merges on lines of their own, in the function where the others stand: the same U, written out.
    scopes = {c.scope for c in chain or adds}
    lines = [c for c in adds if c not in sure and c.scope in scopes and c.has_decoder]
    lines = [c for c in lines if not any(c.follows(o) or o.follows(c) for o in lines if o is not c)]
    joined = longest_chain([*chain, *(c for c in lines if not _reads_one_variable(c.merge.site))])
    added = [c for c in joined if c not in chain]
    in_doubt: list[Candidate] = []
    if added and set(chain) <= set(joined):
        # A residual across several lines in the middle of a U looks like its innermost level. It is none where the
        # skips begin at full resolution; where they begin below, as in Demucs, the innermost goes around the middle.
        full = bool(chain) and all(c.goes_lower for c in chain) and not _below_the_input(chain[0])
        if full or len(joined) < 3:
            in_doubt = [c for c in added if not _is_like_a_level(c, chain)]
        chain = [c for c in joined if c not in in_doubt]
    if len(chain) == 1 and not in_doubt and innermost_around_nothing(chain, itself) is not None:
        return Selection(chain)  # two levels, the inner one around nothing
    if len(chain) < 2:
        # Demucs with two levels, or a residual in the middle of one level.
        may_be_levels = chain and in_doubt and _below_the_input(chain[0]) and chain[0].start != in_doubt[0].start
        return Selection(chain, in_doubt) if may_be_levels else Selection([])
    doubtful = _doubtful(chain, [c for c in sure if c not in chain])
    repeats = _repeats(chain, doubtful)
    in_doubt = [c for c in in_doubt if c not in doubtful]
    return Selection(chain, in_doubt if repeats > 1 else [*doubtful, *in_doubt], repeats)


def _below_the_input(outermost: Candidate) -> bool:
    shape = outermost.merge.shapes[outermost.operand]
    same = [image for image in _images(outermost) if len(image) == len(shape) > 2]
    return bool(same) and all(math.prod(shape[2:]) < math.prod(image[2:]) for image in same)


def _is_like_a_level(c: Candidate, levels: list[Candidate]) -> bool:
    """True if modules like those of a level make the skip and read the merge: an encoder block and a decoder block."""
    ends = _maker_and_reader(c)
    return None not in ends and any(_maker_and_reader(level) == ends for level in levels)


def _maker_and_reader(c: Candidate) -> tuple[object, object]:
    trace, node, reader = c.trace, c.end, None
    while reader is None:
        reader = next((call.module for call in trace.taking[node] if any(True for _ in call.module.parameters())), None)
        if len(trace.users[node]) != 1:
            break
        node = trace.users[node][0]
    maker = trace.producer(c.start)
    return None if maker.startswith("input ") else _likeness(trace.model.get_submodule(maker)), _likeness(reader)


def _likeness(module: nn.Module | None) -> object:
    """The class of a module; of those of torch, what is in them as well."""
    if module is None or not type(module).__module__.startswith("torch."):
        return None if module is None else type(module)
    return type(module), getattr(module, "kernel_size", None), *map(_likeness, module.children())


def _reads_one_variable(site: CallSite) -> bool:
    """`h + f(h)`, `cat([f(h), g(h)])`: the paths begin at one variable of one expression. A block of the network."""
    frame = site.frames[0]
    line, last_line, column, last_column = frame.position
    if line is None or last_line is None or column is None or last_column is None:
        return False
    lines = [linecache.getline(frame.code.co_filename, n).encode() for n in range(line, last_line + 1)]
    lines[-1] = lines[-1][:last_column]
    lines[0] = lines[0][column:]
    text = b"".join(lines)
    node: Any = None
    for attempt in (b"(" + text + b")", text):  # an expression over several lines, or `h += f(h)`
        with suppress(SyntaxError, IndexError):
            node = node or ast.parse(attempt).body[0]
    node = node.value if isinstance(node, ast.Expr) else node
    if isinstance(node, ast.BinOp):
        operands = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        operands = [node.target, node.value]
    else:
        items = node.args[0] if isinstance(node, ast.Call) and node.args else None
        operands = items.elts if isinstance(items, ast.List | ast.Tuple) else []
    own = {*frame.code.co_varnames, *frame.code.co_cellvars, *frame.code.co_freevars} - {"self"}
    names = [{n.id for n in ast.walk(side) if isinstance(n, ast.Name)} & own for side in operands]
    shared = set.intersection(*names) if names else set()
    alone = any(isinstance(side, ast.Name) and name <= shared for side, name in zip(operands, names, strict=True))
    return bool(shared) and (alone or all(len(name) == 1 for name in names))


# Doubts


def _hidden(trace: Trace, chain: list[Candidate], others: list[Candidate]) -> list[Candidate]:
    """Joins of other kinds that would be levels of this U: a maximum, a product, a matrix product of two features.

    With one of these between the long skips, their numbers would be wrong. A product with a mask of the input is no
    level: there a part of the main path did not come through the place where the skip leaves it.
    """
    whole, ends, sites = _scope_of_all(chain), {c.end for c in chain}, {c.site for c in chain}
    on_skips = 0
    for one in chain:
        on_skips |= trace.with_ancestors(one.skip_node) & ~trace.with_ancestors(one.main_node)
    primary = trace.primary_inputs
    first = (primary & -primary).bit_length() - 1
    found = []
    for c in others:
        if c.end in ends or not whole.is_inside(c.scope) or on_skips >> c.end & 1 or c.skip_layers > 1:
            continue
        inside, outside = (sum(map(test, chain)) for test in (c.contains, lambda one, c=c: one.contains(c)))
        lower = c.goes_lower and not trace.nodes[c.end].is_layer
        may_be_level = inside or (c.site in sites if c.merge.is_broadcast else lower)
        if inside + outside == len(chain) and may_be_level and c.has_decoder:
            front, seen = [c.main_node], {c.main_node, c.start}
            while front and (c.start == first or first not in seen):
                new = [node for node in trace.nodes[front.pop()].inputs if node not in seen]
                seen.update(new)
                front += new
            if c.start == first or first not in seen:
                found.append(c)
    again = _merged_again([c for c in others if c.has_decoder], chain)
    return found + [c for c in again if c not in found]


def _merged_again(found: list[Candidate], chain: list[Candidate]) -> list[Candidate]:
    """Merges of the very features of the skips at a second place of the decoder: with one of two uses scaled, such a
    skip would be neither scaled nor left alone. Of one skip alone, and later, it is a residual around the U.
    """
    later = [c for c in found if any(c.repeats(one, layers=1) for one in chain)]
    before = [c for c in found if any(c.precedes(one, inner) for one, inner in pairwise(chain))]
    return before + later if before or len({c.start for c in later}) > 1 else []


def _doubtful(chain: list[Candidate], rest: list[Candidate]) -> list[Candidate]:
    """All the rest if one of it could belong to the U or is a second U: which is meant is for the reader to say."""
    sites, innermost = {c.site for c in chain}, chain[-1]
    # On one side of the bottleneck lie fusions of the encoder or of the decoder; or a second U.
    aside = [c for c in rest if c.site not in sites and (innermost.follows(c) or c.follows(innermost))]
    if len(longest_chain(aside)) < 2:
        rest = [c for c in rest if c not in aside or (c.goes_lower and not c.skip_layers)]

    def is_in_conflict(c: Candidate) -> bool:
        spans = any(c.start < one.start and one.end < c.end for one in chain)
        for one in chain:
            crosses = c.start < one.start < c.end < one.end or one.start < c.start < one.end < c.end
            if crosses or c.end == one.end or (c.start == one.start and spans):
                return True
        return c.site in sites

    doubtful = [c for c in rest if is_in_conflict(c)]
    second = longest_chain([c for c in rest if c not in doubtful])
    return rest if doubtful or len(second) > 1 else []


def _repeats(chain: list[Candidate], rest: list[Candidate]) -> int:
    """How often the module or method around the chain runs, if all the rest is the same chain in its other runs."""

    def signatures(found: list[Candidate]) -> list[tuple[object, ...]]:
        return [(c.merge.call.name, c.site, c.operand, c.merge.shapes[c.operand]) for c in found]

    for runs in _runs_around(chain, rest) if rest else ():
        each = [[c for c in (*chain, *rest) if is_inside(c)] for is_inside in runs]
        alike = all(len(own) == len(chain) and signatures(longest_chain(own)) == signatures(chain) for own in each)
        if alike and sum(map(len, each)) == len(chain) + len(rest):
            return len(runs)
    return 1


def _runs_around(chain: list[Candidate], rest: list[Candidate]) -> Iterator[list[Callable[[Candidate], bool]]]:
    """The runs of what is around the whole chain, each as a test for what took place in it."""

    def runs_in(call: Call, c: Candidate) -> bool:
        return call.contains(c.end) and all(map(call.contains, c.trace.layers_between(c.start, c.main_node)))

    calls = [call for call in chain[0].merge.call.stack() if all(runs_in(call, c) for c in chain)]
    if calls:
        yield [partial(runs_in, call) for call in chain[0].trace.calls if call.name == calls[0].name]
    for method in _scope_of_all(chain).stack():
        if method.module is not None:  # a method that its module calls several times: flips, tiles
            around = {one for c in (*chain, *rest) for one in c.scope.stack() if one.code is method.code}
            yield [lambda c, run=run: c.scope.is_inside(run) for run in around if run.module == method.module]


def _scope_of_all(chain: list[Candidate]) -> Invocation:
    return reduce(common_scope, [c.scope for c in chain])


def _grouped(found: Sequence[Candidate], key: Any) -> dict[Any, list[Candidate]]:
    groups = defaultdict(list)
    for candidate in found:
        groups[key(candidate)].append(candidate)
    return groups
