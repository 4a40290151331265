"""Where a skip can be scaled: its channel axis, and the module or expression through which it passes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from ..tracing import Argument, Call, CallSite, FunctionCall, Merge, Node, Trace, TreePath as Path
from .plan import Attachment, Source
from .source import can_rewrite, function_of, source_digest

# Which axis of a tensor holds the channels: the one that the next layer sums over.

# Operations that keep every axis in its place.
_VIEWS = (
    "view",
    "_unsafe_view",
    "reshape",
    "alias",
    "contiguous",
    "clone",
    "_to_copy",
    "expand",
    "squeeze",
    "unsqueeze",
)
_REDUCTIONS = ("sum", "mean", "amax", "max", "argmax", "var", "std", "norm", "linalg_vector_norm")


def channel_axis(trace: Trace, node: int) -> int | None:
    """The channel axis of a node by the next layer after it, else by the layer that made it; None if unknown."""
    for forward in (True, False):
        axis, axes = _search(trace, node, forward)
        if axis in axes:
            return axes[axis]
    return None


def joins_channels(trace: Trace, merge: Merge) -> bool:
    """Whether a concatenation joins channels, by the layer or norm after it or the layers that made its operands.

    Otherwise tokens are appended to a sequence, as a text to the keys of attention, or images to a batch. Either side
    will do: next to a merge there may be a layer that mixes positions.
    """
    assert merge.axis is not None
    axis, axes = _search(trace, merge.node, forward=True)
    after = axes[axis] == merge.axis if axis in axes else None
    made = [_made_as_channels(trace, node, merge.axis) for node in merge.operands if node is not None]
    known = [answer for answer in made if answer is not None]
    if after is None and not known:
        return merge.axis != 0
    return after is True or (len(known) > 0 and all(known))


def _made_as_channels(trace: Trace, node: int, axis: int) -> bool | None:
    """Whether an axis is the one that the layer before made, or a part of it (heads); None if there is no layer."""
    front, seen = [(node, {axis})], {node}
    while front:
        current, axes = front.pop(0)
        step = trace.nodes[current]
        if _is_learned(step):
            return _made_by(step) in axes
        for before in step.inputs:
            if before not in seen:
                seen.add(before)
                shape = trace.nodes[before].shape
                if step.name in _VIEWS or len(shape) != len(step.shape):
                    moved = _parts(step.shape, shape)
                else:
                    moved = {old: {new} for old, new in _carry(trace, step, before, forward=False).items()}
                front.append((before, {new for old in axes for new in moved.get(old, ())}))
    return None


def _parts(shape: tuple[int, ...], other: tuple[int, ...]) -> dict[int, set[int]]:
    """The axes of another view of a tensor that share elements with each axis of this one."""
    ours, theirs = _extents(shape), _extents(other)
    return {
        a: {b for b, (n, below) in enumerate(theirs) if below < size * behind and behind < n * below and n > 1}
        for a, (size, behind) in enumerate(ours)
        if size > 1
    }


def _search(trace: Trace, node: int, forward: bool) -> tuple[int | None, dict[int, int]]:
    """Follow every axis of the node through the operations until a layer says which one it works on.

    Gives that axis there, None if no layer says it, and which axis of the node each axis there was.
    """
    front: list[tuple[int, dict[int, int]]] = [(node, {axis: axis for axis in range(len(trace.nodes[node].shape))})]
    seen = {node}
    while front:
        current, axes = front.pop(0)
        if not forward and _is_learned(trace.nodes[current]):
            return _made_by(trace.nodes[current]), axes
        for other in trace.users[current] if forward else trace.nodes[current].inputs:
            if other in seen:
                continue
            seen.add(other)
            step = trace.nodes[other if forward else current]
            norm = _normalised_axis(step) if forward else None
            if forward and (norm is not None or _is_learned(step)):
                axis = norm if norm is not None else _summed_by(step, current, len(trace.nodes[current].shape))
                if axis in axes:
                    return axis, axes
                if norm is None:
                    continue
            moved = _carry(trace, step, current if forward else other, forward)
            kept = {new: axes[old] for old, new in moved.items() if old in axes}
            if kept:
                front.append((other, kept))
    return None, {}


def _is_learned(step: Node) -> bool:
    """Whether a layer multiplies a feature by weights, not two features by each other (attention) or none (Fourier)."""
    return step.is_layer and ("conv" in step.name or None in step.operands) and "fft" not in step.name


def _normalised_axis(step: Node) -> int | None:
    """The channels by a norm with weights for each of them, which may stand before a layer that mixes positions."""
    if step.name in ("native_layer_norm", "_fused_rms_norm"):
        sizes = next((option for option in step.options if isinstance(option, list | tuple)), ())
        return len(step.shape) - 1 if len(sizes) == 1 else None
    is_norm = step.name.endswith(("group_norm", "batch_norm", "_batch_norm_no_training"))
    return 1 if is_norm and len(step.shape) > 2 else None


def _summed_by(layer: Node, operand: int, ndim: int) -> int | None:
    if operand not in layer.operands:
        return None
    position = layer.operands.index(operand)
    if "conv" in layer.name:
        return 1 if position == 0 else None
    if layer.name in ("mm", "bmm"):
        return ndim - 1 if position == 0 else ndim - 2
    if layer.name in ("addmm", "baddbmm"):
        return {1: ndim - 1, 2: ndim - 2}.get(position)
    return ndim - 1


def _made_by(layer: Node) -> int:
    return 1 if "conv" in layer.name else len(layer.shape) - 1


def _carry(trace: Trace, step: Node, source: int, forward: bool) -> dict[int, int]:
    """Where each axis goes in one operation: from its input to its output, or backward."""
    before, after = trace.nodes[source].shape, step.shape
    if step.is_layer and len(step.inputs) > 1 and source in step.operands:
        mapping = _through_product(step, step.operands.index(source), len(before))
    elif step.name in ("permute", "transpose", "t", "movedim"):
        mapping = _permutation(step, len(before))
    elif step.name in ("view_as_real", "view_as_complex", "_neg_view", "_conj"):
        mapping = {axis: axis for axis in range(min(len(before), len(after)))}
    elif step.name == "select":
        removed = next(option for option in step.options if isinstance(option, int)) % len(before)
        mapping = {axis: axis - (axis > removed) for axis in range(len(before)) if axis != removed}
    elif step.name in _VIEWS or len(before) != len(after):
        mapping = _matching(before, after)
    elif step.name in _REDUCTIONS:
        mapping = {}
    else:
        mapping = {axis: axis for axis in range(len(after))}
    return mapping if forward else {new: old for old, new in mapping.items()}


def _through_product(step: Node, position: int, ndim: int) -> dict[int, int]:
    """A product of two features, as in attention: rows come from the first, columns from the last, sums are gone."""
    if ndim != len(step.shape):
        return {}
    rows = {axis: axis for axis in range(ndim - 1)}
    columns = {axis: axis for axis in range(ndim) if axis != ndim - 2}
    if step.name in ("mm", "bmm", "addmm", "baddbmm"):
        return rows if position == len(step.operands) - 2 else columns
    return columns if position == 2 else rows if position == 0 else {}


def _permutation(step: Node, ndim: int) -> dict[int, int]:
    numbers = [option for option in step.options if isinstance(option, int)]
    lists = [option for option in step.options if isinstance(option, list | tuple)]
    if step.name == "permute" and lists:
        return {axis % ndim: place for place, axis in enumerate(lists[0])}
    first, second = (numbers[0] % ndim, numbers[1] % ndim) if len(numbers) >= 2 else (0, ndim - 1)
    swap = {first: second, second: first}
    return {axis: swap.get(axis, axis) for axis in range(ndim)}


def _matching(before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, int]:
    """An axis survives a view if its length and the number of elements behind it stay."""
    places = {(size, behind): axis for axis, (size, behind) in enumerate(_extents(after)) if size > 1}
    found = {axis: places.get(extent) for axis, extent in enumerate(_extents(before)) if extent[0] > 1}
    return {axis: place for axis, place in found.items() if place is not None}


def _extents(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    extents, behind = [], 1
    for size in reversed(shape):
        extents.append((size, behind))
        behind *= size
    return extents[::-1]


def carry_back(trace: Trace, step: Node, source: int, axis: int) -> int | None:
    """The axis of the input of an operation that becomes this axis of its output."""
    return _carry(trace, step, source, forward=False).get(axis)


def carry_forward(trace: Trace, step: Node, source: int, axis: int) -> int | None:
    """The axis of the output of an operation that was this axis of its input."""
    return _carry(trace, step, source, forward=True).get(axis)


# Where an operand of a merge can be reached: as an argument or result of a module, best near the merge.

# The same tensor in other memory.
COPIES = frozenset(("alias", "contiguous", "clone", "detach", "_to_copy", "lift_fresh"))
VIEWS = frozenset(("view", "_unsafe_view", "_reshape_alias", "reshape", "permute", "transpose", "unsqueeze", "squeeze"))
# A constant, or a gate over channels, before one of these is the same as behind it.
COMMUTING = COPIES | VIEWS | {"expand", "slice", "narrow", "pin_memory", "mul"}


def reach(trace: Trace, merge: Merge, operand: int, repeats: int, *, directly: bool = False) -> Attachment | None:
    """The best place to scale an operand, or None. Directly: as it enters the merge, but for copies and views."""
    return next(_Places(trace, merge, operand, repeats, directly).all(), None)


def reach_merged(trace: Trace, merge: Merge, operand: int, repeats: int) -> Attachment | None:
    """A place where the concatenation can be changed as a whole, with the channels of this operand in it; or None."""
    if merge.kind != "cat":
        return None
    places = _Places(trace, merge, operand, repeats, directly=True)
    return next((place for place in chain(places.by_concatenation(), places.by_source()) if place.is_slice), None)


def is_direct(trace: Trace, merge: Merge, operand: int) -> bool:
    """Whether all places are direct ones, because nothing but copies and views lies before the merge."""
    return [*_upstream(trace, merge, operand, _commutes)] == [*_upstream(trace, merge, operand, _same_values)]


def obstacle(trace: Trace, merge: Merge) -> str:
    """Why there is no place."""
    if trace.call_count[merge.call.name] > 1:
        return f"{merge.call.name} is called {trace.call_count[merge.call.name]} times in one forward"
    return f"the merge at {merge.site.text} is not the argument or result of a module, and its source is out of reach"


def merge_axis(trace: Trace, merge: Merge, node: int) -> int:
    """The channel axis of an operand."""
    if merge.axis is not None:
        return merge.axis
    found = channel_axis(trace, merge.node)
    if found is None:
        found = channel_axis(trace, node)
    return found if found is not None else (1 if len(trace.nodes[node].shape) > 3 else len(trace.nodes[node].shape) - 1)


class _Places:
    """All places where one operand of a merge can be scaled, the best first within each kind."""

    def __init__(self, trace: Trace, merge: Merge, operand: int, repeats: int, directly: bool) -> None:
        self.trace, self.merge, self.operand, self.repeats = trace, merge, operand, repeats
        self.passes = _same_values if directly else _commutes
        self.steps = list(_upstream(trace, merge, operand, self.passes))

    def all(self) -> Iterator[Attachment]:
        yield from self.by_operand()
        yield from self.by_concatenation()
        yield from self.by_source()

    def by_operand(self) -> Iterator[Attachment]:
        for node, follower, axis in self.steps:
            if self.merge.operands.count(node) > 1:  # merged with itself: what scales it would scale both
                return
            for call in self.merge.parts[self.operand].call.stack():
                path = _argument(self.trace, call, node, follower)
                if path is not None and self._once(call):
                    yield self._whole(node, axis, kind="argument", module=call.name, path=path)
            for call in self.trace.calls:
                path = _exclusive_output(self.trace, call, node, follower)
                if path is not None and self._once(call):
                    yield self._whole(node, axis, kind="output", module=call.name, path=path)

    def by_concatenation(self) -> Iterator[Attachment]:
        for node, axis in _downstream(self.trace, self.merge, self.passes):
            for call in self.trace.calls:
                path = _consumed(self.trace, call, node)
                if path is not None and self._once(call):
                    yield self._slice(axis, kind="concat argument", module=call.name, path=path)
            for call in self.merge.call.stack():
                path = _returned(self.trace, call, node)
                if path is not None and self._once(call):
                    yield self._slice(axis, kind="concat output", module=call.name, path=path)

    def by_source(self) -> Iterator[Attachment]:
        """At the merge itself, or where a function or module that runs more often is called."""
        part = self.merge.parts[self.operand]
        same = {p.node: p.site for merge in self.trace.merges for p in merge.parts if p.name == part.name}
        merges = [(site, node) for node, site in same.items()]
        # The value of a concatenation, or one operand where it stands.
        as_slice = self.merge.kind == "cat"
        word = None if as_slice else Argument(0, item=part.position) if part.name == "stack" else part.position
        source = self._source(part.site, part.node, merges, word)
        if source is not None:
            node, _, axis = self.steps[0]
            owner = source[0]
            if as_slice:
                yield self._slice(axis, kind="rewrite", module=owner, source=source[1])
            else:
                yield self._whole(node, axis, kind="rewrite", module=owner, source=source[1])
        calls: Sequence[Call | FunctionCall] = [*part.call.stack(), *reversed(self.trace.functions)]
        for call in calls:
            if call.site is not None and call.contains(part.node):
                yield from self._at_call(call)

    def _at_call(self, call: Call | FunctionCall) -> Iterator[Attachment]:
        assert call.site is not None
        same = self.trace.calls if isinstance(call, Call) else self.trace.functions
        runs = [(other.site, other.start) for other in same if other.site is not None]
        for node, follower, axis in self.steps:
            name = _parameter(self.trace, call, node, follower)
            source = self._source(call.site, call.start, runs, name) if name is not None else None
            if source is not None:
                yield self._whole(node, axis, kind="rewrite", module=source[0], source=source[1])
        for node, axis in _downstream(self.trace, self.merge, self.passes):
            source = None
            if _returned(self.trace, call, node) == ():
                source = self._source(call.site, call.start, runs, None)
            if source is not None:
                yield self._slice(axis, kind="rewrite", module=source[0], source=source[1])

    def _once(self, call: Call) -> bool:
        return self.trace.call_count[call.name] == self.repeats

    def _whole(self, node: int, axis: int, **place: object) -> Attachment:
        size = self.trace.nodes[node].shape[axis]
        return Attachment(axis=axis, length=size, channels=size, **place)  # pyright: ignore[reportArgumentType]

    def _slice(self, axis: int, **place: object) -> Attachment:
        merge = self.merge
        assert merge.axis is not None
        channels = self.trace.nodes[merge.node].shape[merge.axis]
        whole = Attachment(axis=axis, channels=channels, **place)  # pyright: ignore[reportArgumentType]
        return replace(whole, start=merge.starts[self.operand], length=merge.shapes[self.operand][merge.axis])

    def _source(
        self, site: CallSite, at: int, runs: list[tuple[CallSite, int]], operand: int | Argument | None
    ) -> tuple[str, Source] | None:
        """An expression in a method that runs once in each call of its module, and which of its runs this is."""
        method, inner = site.method, site.frames[0]
        if method is None or method.module is None or self.trace.call_count[method.module] != self.repeats:
            return None
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
        module = self.trace.model.get_submodule(method.module)
        if len({invocation for invocation, _ in here}) != self.repeats or at not in mine:
            return None
        line, last_line, column, last_column = position
        if line is None or last_line is None or column is None or last_column is None:
            return None
        first = method.code.co_firstlineno
        relative = (line - first, last_line - first, column, last_column)
        function = function_of(module, method.code)
        if function is None or not can_rewrite(module, method.code, relative, operand):
            return None
        return method.module, Source(
            method=method.code.co_name,
            owner=function.__qualname__,
            digest=source_digest(function),
            line=line,
            position=relative,
            operand=operand,
            execution=mine.index(at),
            executions=len(mine),
        )


def _upstream(
    trace: Trace, merge: Merge, operand: int, passes: Callable[[Node], bool]
) -> Iterator[tuple[int, int, int]]:
    """The operand, and what it was before operations that commute with scaling: (node, its user, channel axis)."""
    node, follower = merge.operands[operand], merge.parts[operand].node
    assert node is not None
    axis = merge_axis(trace, merge, node)
    while True:
        yield node, follower, axis
        step = trace.nodes[node]
        if not passes(step) or trace.users[node] != [follower] or node in trace.outputs:
            return
        before = step.inputs[0]
        moved = carry_back(trace, step, before, axis)
        if moved is None or trace.nodes[before].shape[moved] != step.shape[axis]:
            return
        node, follower, axis = before, node, moved


def _downstream(trace: Trace, merge: Merge, passes: Callable[[Node], bool]) -> Iterator[tuple[int, int]]:
    """A concatenation, and what it becomes by operations that commute with scaling: (node, channel axis)."""
    if merge.axis is None:
        return
    node, axis = merge.node, merge.axis
    while True:
        yield node, axis
        if len(trace.users[node]) != 1 or node in trace.outputs:
            return
        user = trace.users[node][0]
        moved = carry_forward(trace, trace.nodes[user], node, axis) if passes(trace.nodes[user]) else None
        if moved is None or trace.nodes[user].shape[moved] != trace.nodes[node].shape[axis]:
            return
        node, axis = user, moved


def _same_values(step: Node) -> bool:
    return step.name in COPIES | VIEWS and len(step.inputs) == 1


def _commutes(step: Node) -> bool:
    if len(step.inputs) != 1 or step.operands.count(step.inputs[0]) != 1:
        return False
    if step.name == "constant_pad_nd":
        return not any(isinstance(option, int | float) and option != 0 for option in step.options)
    if step.name == "div":
        return step.operands[0] is not None
    return step.name in COMMUTING or step.name.startswith("upsample_")


def _argument(trace: Trace, call: Call, node: int, follower: int) -> Path | None:
    """The way to the node in the arguments of a call that uses it for this merge alone."""
    paths = [path for path, leaf in call.inputs if leaf == node]
    return paths[0] if len(paths) == 1 and not call.pops_list and _is_only_for(trace, call, node, follower) else None


def _parameter(trace: Trace, call: Call | FunctionCall, node: int, follower: int) -> Argument | None:
    """The argument in the text of the call."""
    if isinstance(call, Call):
        path = _argument(trace, call, node, follower)
        if path is None or len(path) != 2:
            return None
        return Argument(int(path[1])) if path[0] == 0 else Argument(keyword=str(path[1]))
    names = [name for name, leaf in call.parameters.items() if leaf == node]
    if len(names) != 1 or not _is_only_for(trace, call, node, follower):
        return None
    return names[0]


def _is_only_for(trace: Trace, call: Call | FunctionCall, node: int, follower: int) -> bool:
    inside = [user for user in trace.users[node] if call.contains(user)]
    passed_on = any(leaf == node for _, leaf in call.outputs)
    return node < call.start and inside == [follower] and not passed_on


def _exclusive_output(trace: Trace, call: Call, node: int, follower: int) -> Path | None:
    """The way to the node in the result of a call, if the merge is all that it is for."""
    paths = [path for path, leaf in call.outputs if leaf == node]
    outside = [user for user in trace.users[node] if user >= call.end]
    if len(paths) != 1 or not call.contains(node) or call.contains(follower) or outside != [follower]:
        return None
    return None if node in trace.outputs else paths[0]


def _consumed(trace: Trace, call: Call, merged: int) -> Path | None:
    """The way to the merge in the arguments of a call, if nothing else uses it."""
    paths = [path for path, leaf in call.inputs if leaf == merged]
    alone = all(call.contains(user) for user in trace.users[merged]) and merged not in trace.outputs
    passed_on = any(leaf == merged for _, leaf in call.outputs)
    if len(paths) != 1 or call.start <= merged or not alone or passed_on or call.pops_list:
        return None
    return paths[0]


def _returned(trace: Trace, call: Call | FunctionCall, merged: int) -> Path | None:
    paths = [path for path, leaf in call.outputs if leaf == merged]
    used_inside = any(user < call.end for user in trace.users[merged])
    return paths[0] if len(paths) == 1 and call.contains(merged) and not used_inside else None
