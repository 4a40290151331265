"""The places where a skip can be scaled: the module or expression through which it passes, best near the merge."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

from ..tracing import Argument, Call, CallSite, FunctionCall, Merge, Node, RanCall, Trace, TreePath as Path
from .axes import COPIES, VIEWS, carry, merge_axis
from .candidates import Candidate
from .plan import Attachment, Places, SourcePlace
from .source import Operand, can_rewrite, function_of, source_digest

_COMMUTING = COPIES | VIEWS | {"expand", "slice", "narrow", "pin_memory", "mul"}


def places_of(trace: Trace, candidate: Candidate, repeats: int) -> Places:
    """The places where the operands of a merge can be scaled.

    Best is a place with nothing but copies and views between it and the merge: there every method acts on the very
    values that are merged, behind a crop or a factor of the model. Only where there is none, an operation that commutes
    with a constant may lie between.
    """
    merge = candidate.merge
    if merge.named is not None:
        return _named_places(trace, candidate)
    search = _Search(trace, merge, candidate.operand, repeats, _same_values)

    def first(operand: int) -> Attachment | None:
        searches = (_Search(trace, merge, operand, repeats, passes) for passes in (_same_values, _commutes))
        return next((place for one in searches for place in one.all()), None)

    skip = first(candidate.operand)
    if skip is not None and skip.is_slice:
        # The main path in the same multiplication.
        assert merge.axis is not None
        width = merge.shapes[candidate.main][merge.axis]
        main = replace(skip, start=merge.starts[candidate.main], length=width)
    else:
        main = first(candidate.main)
    merged = None
    if merge.kind == "cat":
        merged = next((p for p in chain(search.by_concatenation(), search.by_source()) if p.is_slice), None)
    return Places(skip=skip, main=main, merged=merged, obstacle="" if skip else _obstacle(trace, merge))


def _named_places(trace: Trace, candidate: Candidate) -> Places:
    """The model merges by `scalelong.merge`, which scales what it is given."""
    merge = candidate.merge
    main, skip = merge.shapes
    axis = merge_axis(trace, merge, candidate.skip_node)
    place = Attachment(kind="merge", module=merge.call.name, axis=axis, length=skip[axis], channels=skip[axis])
    merged = replace(place, start=main[axis], channels=skip[axis] + main[axis])
    return Places(
        skip=place,
        main=replace(place, length=main[axis], channels=main[axis]),
        merged=None if merge.axis is None else merged,
    )


def _obstacle(trace: Trace, merge: Merge) -> str:
    """Why there is no place."""
    by_hand = "name the merge there by scalelong.merge(x, skip, i)"
    if trace.call_count[merge.call.name] > 1:
        return f"{merge.call.name} is called {trace.call_count[merge.call.name]} times in one forward; {by_hand}"
    at = merge.site.text
    return f"the merge at {at} is not the argument or result of a module, its source is out of reach; {by_hand}"


class _Search:
    """The places where one operand of a merge can be scaled, near the merge first within each kind."""

    def __init__(self, trace: Trace, merge: Merge, operand: int, repeats: int, passes: Callable[[Node], bool]) -> None:
        self.trace, self.merge, self.operand, self.repeats = trace, merge, operand, repeats
        self.before = list(_before(trace, merge, operand, passes))
        self.after = list(_after(trace, merge, passes))

    def all(self) -> Iterator[Attachment]:
        yield from chain(self.by_operand(), self.by_concatenation(), self.by_source())

    def by_operand(self) -> Iterator[Attachment]:
        """It is an argument or a result of a module."""
        trace, merge = self.trace, self.merge
        for node, follower, axis in self.before:
            if merge.operands.count(node) > 1:  # merged with itself: what scales it would scale both
                return
            whole = self._whole(node, axis)
            for call in merge.call.stack():
                yield from self._at_module("argument", call, _argument(trace, call, node, follower), whole)
            for call in trace.returning[node]:
                paths = [path for path, leaf in call.outputs if leaf == node]
                outside = [user for user in trace.users[node] if user >= call.end]
                passes = call.contains(node) and not call.contains(follower) and node not in trace.outputs
                if len(paths) == 1 and passes and outside == [follower]:
                    yield from self._at_module("output", call, paths[0], whole)

    def by_concatenation(self) -> Iterator[Attachment]:
        """The concatenation is an argument or a result of a module."""
        trace = self.trace
        for node, axis in self.after:
            part = self._slice(axis)
            for call in trace.taking[node]:
                paths = [path for path, leaf in call.inputs if leaf == node]
                alone = all(call.contains(user) for user in trace.users[node]) and node not in trace.outputs
                passed_on = any(leaf == node for _, leaf in call.outputs)
                if len(paths) == 1 and node < call.start and alone and not passed_on and not call.pops_list:
                    yield from self._at_module("concat argument", call, paths[0], part)
            for call in self.merge.call.stack():
                yield from self._at_module("concat output", call, _returned(trace, call, node), part)

    def by_source(self) -> Iterator[Attachment]:
        """At the merge itself, or where a function or module that runs more often is called."""
        merge = self.merge
        merges = [(other.site, other.node) for other in self.trace.merges if other.name == merge.name]
        # The value of a concatenation, or one operand where it stands.
        as_slice = merge.kind == "cat"
        word = None if as_slice else merge.positions[self.operand]
        node, _, axis = self.before[0]
        place = self._slice(axis) if as_slice else self._whole(node, axis)
        yield from self._in_source(merge.site, merge.node, merges, word, place)
        calls: list[RanCall] = [*merge.call.stack(), *reversed(self.trace.functions)]
        for call in calls:
            if call.site is not None and call.contains(merge.node):
                same_kind = self.trace.calls if isinstance(call, Call) else self.trace.functions
                runs = [(other.site, other.start) for other in same_kind if other.site is not None]
                for node, follower, axis in self.before:
                    name = _parameter(self.trace, call, node, follower)
                    if name is not None:
                        yield from self._in_source(call.site, call.start, runs, name, self._whole(node, axis))
                for node, axis in self.after:
                    if _returned(self.trace, call, node) == ():
                        yield from self._in_source(call.site, call.start, runs, None, self._slice(axis))

    def _whole(self, node: int, axis: int) -> Attachment:
        size = self.trace.nodes[node].shape[axis]
        return Attachment(kind="rewrite", module="", axis=axis, length=size, channels=size)

    def _slice(self, axis: int) -> Attachment:
        merge = self.merge
        assert merge.axis is not None
        start, length = merge.starts[self.operand], merge.shapes[self.operand][merge.axis]
        channels = self.trace.nodes[merge.node].shape[merge.axis]
        return Attachment(kind="rewrite", module="", axis=axis, start=start, length=length, channels=channels)

    def _at_module(self, kind: str, call: Call, path: Path | None, place: Attachment) -> Iterator[Attachment]:
        if path is not None and self.trace.call_count[call.name] == self.repeats:
            yield replace(place, kind=kind, module=call.name, path=path)

    def _in_source(
        self, site: CallSite, at: int, runs: list[tuple[CallSite, int]], operand: Operand, place: Attachment
    ) -> Iterator[Attachment]:
        """An expression in a method that runs once in each run of the network, and which of its executions this is."""
        method, inner = site.method, site.frames[0]
        if method is None or method.module is None:
            return
        position = inner.position
        here = [
            (other.frames[-1].invocation, node)
            for other, node in runs
            if other.frames[0].code is inner.code
            and other.frames[0].position == position
            and other.frames[-1].module == method.module
            and other.method is not None
        ]
        mine = [node for invocation, node in here if invocation == method.invocation]
        line, last_line, column, last_column = position
        if len({invocation for invocation, _ in here}) != self.repeats or at not in mine:
            return
        if line is None or last_line is None or column is None or last_column is None:
            return
        first = method.code.co_firstlineno
        relative = (line - first, last_line - first, column, last_column)
        module = self.trace.model.get_submodule(method.module)
        function = function_of(module, method.code)
        if function is None or not can_rewrite(function, relative, operand):
            return
        source = SourcePlace(
            method=method.code.co_name,
            owner=function.__qualname__,
            digest=source_digest(function),
            line=line,
            position=relative,
            operand=operand,
            execution=mine.index(at),
            executions=len(mine),
        )
        yield replace(place, module=method.module, source=source)


def _before(trace: Trace, merge: Merge, operand: int, passes: Callable[[Node], bool]) -> Iterator[tuple[int, int, int]]:
    """The operand, and what it was before operations that pass: (node, its user, channel axis)."""
    node, follower = merge.operands[operand], merge.node
    assert node is not None
    axis: int | None = merge_axis(trace, merge, node)
    while axis is not None:
        yield node, follower, axis
        step = trace.nodes[node]
        if not passes(step) or trace.users[node] != [follower] or node in trace.outputs:
            return
        axis = carry(trace, step, step.inputs[0], axis, forward=False)
        node, follower = step.inputs[0], node


def _after(trace: Trace, merge: Merge, passes: Callable[[Node], bool]) -> Iterator[tuple[int, int]]:
    """A concatenation, and what it becomes by operations that pass: (node, channel axis)."""
    node, axis = merge.node, merge.axis
    while axis is not None:
        yield node, axis
        users = trace.users[node]
        if len(users) != 1 or node in trace.outputs or not passes(trace.nodes[users[0]]):
            return
        axis = carry(trace, trace.nodes[users[0]], node, axis)
        node = users[0]


def _same_values(step: Node) -> bool:
    return step.name in COPIES | VIEWS and len(step.inputs) == 1


def _commutes(step: Node) -> bool:
    """True if a constant, or a gate over channels, before the operation is the same as after it."""
    if len(step.inputs) != 1 or step.operands.count(step.inputs[0]) != 1:
        return False
    if step.name == "constant_pad_nd":
        return not any(isinstance(option, int | float) and option != 0 for option in step.options)
    if step.name == "div":
        return step.operands[0] is not None
    return step.name in _COMMUTING or step.name.startswith("upsample_")


def _argument(trace: Trace, call: Call, node: int, follower: int) -> Path | None:
    """The way to the node in the arguments of a call that uses it for this merge alone."""
    paths = [path for path, leaf in call.inputs if leaf == node]
    return paths[0] if len(paths) == 1 and not call.pops_list and _is_only_for(trace, call, node, follower) else None


def _parameter(trace: Trace, call: RanCall, node: int, follower: int) -> Argument | None:
    """The argument in the text of the call."""
    if isinstance(call, Call):
        path = _argument(trace, call, node, follower)
        if path is None or len(path) != 2:
            return None
        return Argument(int(path[1])) if path[0] == 0 else Argument(keyword=str(path[1]))
    names = [name for name, leaf in call.parameters.items() if leaf == node] if isinstance(call, FunctionCall) else []
    return names[0] if len(names) == 1 and _is_only_for(trace, call, node, follower) else None


def _is_only_for(trace: Trace, call: RanCall, node: int, follower: int) -> bool:
    inside = [user for user in trace.users[node] if call.contains(user)]
    passed_on = any(leaf == node for _, leaf in call.outputs)
    return node < call.start and inside == [follower] and not passed_on


def _returned(trace: Trace, call: RanCall, merged: int) -> Path | None:
    paths = [path for path, leaf in call.outputs if leaf == merged]
    used_inside = any(user < call.end for user in trace.users[merged])
    return paths[0] if len(paths) == 1 and call.contains(merged) and not used_inside else None
