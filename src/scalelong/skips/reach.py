"""Where an operand of a merge can be got hold of: as an argument or result of a module, best near the merge."""

from collections.abc import Iterator

from .axes import carry_back, carry_forward, channel_axis
from .plan import Attachment, Source
from .rewrite import expression_operand
from .trace import Call, Merge, Node, Path, Trace

# A constant, or a gate over channels, before one of these is the same as behind it.
COMMUTING = frozenset(
    "view _unsafe_view reshape alias contiguous clone detach _to_copy permute transpose unsqueeze squeeze expand slice "
    "narrow lift_fresh pin_memory _reshape_alias mul div".split()
)
# The same for tensors that stay as they are in shape and place.
COPIES = frozenset("alias contiguous clone detach _to_copy lift_fresh".split())


def reach(trace: Trace, merge: Merge, operand: int, repeats: int) -> Attachment | None:
    """The best place to scale an operand, or None."""
    return next(_places(trace, merge, operand, repeats), None)


def obstacle(trace: Trace, merge: Merge) -> str:
    """Why there is no place."""
    if trace.call_count[merge.call.name] > 1:
        return f"{merge.call.name} is called {trace.call_count[merge.call.name]} times in one forward"
    return f"the merge at {merge.site.text} is not the argument or result of a module, and its source is out of reach"


def _places(trace: Trace, merge: Merge, operand: int, repeats: int) -> Iterator[Attachment]:
    steps = _way_back(trace, merge, operand)
    whole = trace.nodes[merge.node].shape[merge.axis] if merge.axis is not None else 0
    for node, follower, axis in steps:
        size = trace.nodes[node].shape[axis]
        here = {"axis": axis, "length": size, "channels": size}
        for call in merge.call.stack():
            if _once(trace, call, repeats) and (path := _argument(trace, call, node, follower)):
                yield Attachment(kind="argument", module=call.name, path=path, **here)
        for call in trace.calls:
            if _once(trace, call, repeats) and (path := _exclusive_output(trace, call, node, follower)) is not None:
                yield Attachment(kind="output", module=call.name, path=path, **here)
    if merge.axis is not None:
        start = sum(shape[merge.axis] for shape in merge.shapes[:operand])
        length = merge.shapes[operand][merge.axis]
        here = {"axis": merge.axis, "start": start, "length": length, "channels": whole}
        for merged, axis in _way_on(trace, merge):
            there = {**here, "axis": axis}
            for call in trace.calls:
                if _once(trace, call, repeats) and (path := _consumed(trace, call, merged)):
                    yield Attachment(kind="concat argument", module=call.name, path=path, **there)
            for call in merge.call.stack():
                if _once(trace, call, repeats) and (path := _returned(trace, call, merged)) is not None:
                    yield Attachment(kind="concat output", module=call.name, path=path, **there)
    source = _source(trace, merge, operand, repeats)
    if source is not None:
        axis, skip = steps[0][2], merge.shapes[operand]
        owner = merge.site.frames[0].module
        assert owner is not None
        if source.operand is None:
            yield Attachment(kind="rewrite", module=owner, source=source, **here)
        else:
            yield Attachment(
                kind="rewrite", module=owner, source=source, axis=axis, length=skip[axis], channels=skip[axis]
            )


def _way_back(trace: Trace, merge: Merge, operand: int) -> list[tuple[int, int, int]]:
    """The operand, and what it was before operations that commute with scaling: (node, its user, channel axis)."""
    node = merge.operands[operand]
    assert node is not None
    axis = merge_axis(trace, merge, node)
    steps = [(node, merge.node, axis)]
    while _commutes(trace.nodes[node]):
        if trace.users[node] != [steps[-1][1]] or node in trace.outputs:
            break
        before = trace.nodes[node].inputs[0]
        moved = carry_back(trace, trace.nodes[node], before, axis)
        if moved is None or trace.nodes[before].shape[moved] != trace.nodes[node].shape[axis]:
            break
        steps.append((before, node, moved))
        node, axis = before, moved
    return steps


def _commutes(step: Node) -> bool:
    if len(step.inputs) != 1 or step.operands.count(step.inputs[0]) != 1:
        return False
    if step.name == "constant_pad_nd":
        return not any(isinstance(option, int | float) and option != 0 for option in step.options)
    if step.name == "div":
        return step.operands[0] is not None
    return step.name in COMMUTING or step.name.startswith("upsample_")


def merge_axis(trace: Trace, merge: Merge, node: int) -> int:
    if merge.axis is not None:
        return merge.axis
    found = channel_axis(trace, merge.node)
    if found is None:
        found = channel_axis(trace, node)
    return found if found is not None else (1 if len(trace.nodes[node].shape) > 3 else len(trace.nodes[node].shape) - 1)


def _once(trace: Trace, call: Call, repeats: int) -> bool:
    return trace.call_count[call.name] == repeats


def _argument(trace: Trace, call: Call, node: int, follower: int) -> Path | None:
    """The way to the node in the arguments of a call that uses it for this merge alone."""
    paths = [path for path, leaf in call.inputs if leaf == node]
    inside = [user for user in trace.users[node] if call.contains(user)]
    passed_on = any(leaf == node for _, leaf in call.outputs)
    if len(paths) != 1 or node >= call.start or inside != [follower] or passed_on or call.emptied:
        return None
    return paths[0]


def _exclusive_output(trace: Trace, call: Call, node: int, follower: int) -> Path | None:
    """The way to the node in the result of a call, if the merge is all that it is for."""
    paths = [path for path, leaf in call.outputs if leaf == node]
    outside = [user for user in trace.users[node] if user >= call.end]
    if len(paths) != 1 or not call.contains(node) or call.contains(follower) or outside != [follower]:
        return None
    return None if node in trace.outputs else paths[0]


def _way_on(trace: Trace, merge: Merge) -> Iterator[tuple[int, int]]:
    """A concatenation, and what it becomes by operations that commute with scaling: (node, channel axis)."""
    assert merge.axis is not None
    node, axis = merge.node, merge.axis
    while True:
        yield node, axis
        if len(trace.users[node]) != 1 or node in trace.outputs:
            return
        user = trace.users[node][0]
        moved = carry_forward(trace, trace.nodes[user], node, axis) if _commutes(trace.nodes[user]) else None
        if moved is None or trace.nodes[user].shape[moved] != trace.nodes[node].shape[axis]:
            return
        node, axis = user, moved


def _consumed(trace: Trace, call: Call, merged: int) -> Path | None:
    """The way to the merge in the arguments of a call, if nothing else uses it."""
    paths = [path for path, leaf in call.inputs if leaf == merged]
    alone = all(call.contains(user) for user in trace.users[merged]) and merged not in trace.outputs
    passed_on = any(leaf == merged for _, leaf in call.outputs)
    if len(paths) != 1 or call.start <= merged or not alone or passed_on or call.emptied:
        return None
    return paths[0]


def _returned(trace: Trace, call: Call, merged: int) -> Path | None:
    paths = [path for path, leaf in call.outputs if leaf == merged]
    used_inside = any(user < call.end for user in trace.users[merged])
    return paths[0] if len(paths) == 1 and call.contains(merged) and not used_inside else None


def _source(trace: Trace, merge: Merge, operand: int, repeats: int) -> Source | None:
    """The expression of the merge, if it stands in a method that runs once in each call of its module."""
    frame = merge.site.frames[0]
    if len(merge.site.frames) > 1 or frame.module is None or trace.call_count[frame.module] != repeats:
        return None
    position = frame.position
    if any(number is None for number in position):
        return None
    same = [
        other
        for other in trace.merges
        if other.site.frames[0].code is frame.code and other.site.frames[0].position == position
    ]
    runs = {other.site.frames[0].invocation for other in same if other.site.frames[0].module == frame.module}
    if len(runs) != repeats:
        return None
    mine = [other.node for other in same if other.site.frames[0].invocation == frame.invocation]
    module = trace.model.get_submodule(frame.module)
    found, wrapped = expression_operand(module, frame.code, position, merge.kind, operand)
    if not found:
        return None
    return Source(
        method=frame.code.co_name,
        file=merge.site.text.rpartition(":")[0],
        line=position[0] or 0,
        position=position,  # pyright: ignore[reportArgumentType]
        operand=wrapped,
        execution=mine.index(merge.node),
        executions=len(mine),
    )
