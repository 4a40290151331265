"""Which axis of a tensor holds the channels: the one that the next layer sums over."""

from ..tracing import Merge, Node, Trace

COPIES = frozenset(("alias", "contiguous", "clone", "detach", "_to_copy", "lift_fresh"))
"""The same tensor in other memory."""
_PERMUTATIONS = frozenset(("permute", "transpose", "t", "movedim"))
_RESHAPES = frozenset(("view", "_unsafe_view", "_reshape_alias", "reshape", "unsqueeze", "squeeze"))
VIEWS = _RESHAPES | {"permute", "transpose"}
_REDUCTIONS = ("sum", "mean", "amax", "max", "argmax", "var", "std", "norm", "linalg_vector_norm")


def channel_axis(trace: Trace, node: int) -> int | None:
    """The channel axis of a node by the next layer after it, else by the layer that made it; None if unknown."""
    for forward in (True, False):
        axes = _axes_of_a_layer(trace, node, forward) or set()
        if len(axes) == 1:
            return axes.pop()
    return None


def joins_channels(trace: Trace, merge: Merge) -> bool:
    """True if a concatenation joins channels, by the layer or norm after it or the layers that made its operands.

    Otherwise tokens are appended to a sequence, as a text to the keys of attention, or images to a batch. Either side
    will do: next to a merge there may be a layer that mixes positions.
    """
    assert merge.axis is not None
    after = _axes_of_a_layer(trace, merge.node, forward=True)
    made = [_axes_of_a_layer(trace, node, forward=False) for node in merge.operands if node is not None]
    known = [merge.axis in axes for axes in made if axes is not None]
    if after is None and not known:
        return merge.axis != 0
    return after == {merge.axis} or (len(known) > 0 and all(known))


def _axes_of_a_layer(trace: Trace, node: int, forward: bool) -> set[int] | None:
    """The axes of a node that the next layer or norm sums over, or that the layer before made; None without a layer.

    Every axis is followed through the operations in between. A view may split it (into heads) or join it with others.
    """
    front = [(node, {axis: {axis} for axis in range(len(trace.nodes[node].shape))})]
    seen = {node}
    while front:
        current, axes = front.pop(0)
        made = trace.nodes[current]
        if not forward and _is_learned(made):
            there = 1 if "conv" in made.name else len(made.shape) - 1
            return {axis for axis, now in axes.items() if there in now}
        for other in trace.users[current] if forward else made.inputs:
            if other in seen:
                continue
            seen.add(other)
            step = trace.nodes[other if forward else current]
            if forward:
                summed, is_norm = _summed_axis(step, current, len(made.shape))
                found = {axis for axis, now in axes.items() if summed in now}
                if len(found) == 1:
                    return found
                if not is_norm and _is_learned(step):
                    continue
            moves = _axis_moves(trace, step, current if forward else other, forward)
            moved = {axis: {new for old in now for new in moves.get(old, ())} for axis, now in axes.items()}
            if any(moved.values()):
                front.append((other, moved))
    return None


def _is_learned(step: Node) -> bool:
    """True if a layer multiplies a feature by weights, not two features by each other (attention) or none (Fourier)."""
    return step.is_layer and ("conv" in step.name or None in step.operands) and "fft" not in step.name


def _summed_axis(step: Node, operand: int, ndim: int) -> tuple[int | None, bool]:
    """The axis over which a layer sums this operand, or for which a norm has weights; and whether it is a norm."""
    if step.name in ("native_layer_norm", "_fused_rms_norm"):
        sizes = next((option for option in step.options if isinstance(option, list | tuple)), ())
        return (len(step.shape) - 1, True) if len(sizes) == 1 else (None, False)
    if step.name.endswith(("group_norm", "batch_norm", "_batch_norm_no_training")) and len(step.shape) > 2:
        return 1, True
    if not _is_learned(step) or operand not in step.operands:
        return None, False
    position = step.operands.index(operand)
    if "conv" in step.name:
        return (1 if position == 0 else None), False
    matrices = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
    if step.name in matrices:
        return {0: ndim - 1, 1: ndim - 2}.get(position - matrices[step.name]), False
    return ndim - 1, False


def _axis_moves(trace: Trace, step: Node, source: int, forward: bool) -> dict[int, set[int]]:
    """The way of each axis through one operation: from its input to its output, or backward."""
    before, after = trace.nodes[source].shape, step.shape
    ndim = len(before)
    numbers = [option for option in step.options if isinstance(option, int)]
    lists = [option for option in step.options if isinstance(option, list | tuple)]
    same = {axis: axis for axis in range(min(ndim, len(after)))}
    if step.is_layer and len(step.inputs) > 1 and source in step.operands:
        # A product of two features, as in attention: rows come from the first, columns from the last, sums are gone.
        position, first = step.operands.index(source), 0
        if step.name in ("mm", "bmm", "addmm", "baddbmm"):
            first, last = len(step.operands) - 2, len(step.operands) - 1
        else:
            last = 2
        gone = {first: ndim - 1, last: ndim - 2}.get(position)
        kept = same if ndim == len(after) and gone is not None else {}
        moves = {axis: axis for axis in kept if axis != gone}
    elif step.name == "permute" and lists:
        moves = {axis % ndim: place for place, axis in enumerate(lists[0])}
    elif step.name in _PERMUTATIONS:
        first, second = (numbers[0] % ndim, numbers[1] % ndim) if len(numbers) >= 2 else (0, ndim - 1)
        moves = {axis: {first: second, second: first}.get(axis, axis) for axis in range(ndim)}
    elif step.name in ("view_as_real", "view_as_complex", "_neg_view", "_conj"):
        moves = same
    elif step.name == "select":
        moves = {axis: axis - (axis > numbers[0] % ndim) for axis in range(ndim) if axis != numbers[0] % ndim}
    elif step.name in _RESHAPES | COPIES | {"expand"} or ndim != len(after):
        ours, theirs = _extents(before), _extents(after)
        pairs = [(a, b) for a, (n, below) in ours.items() for b, (m, low) in theirs.items() if low < n and below < m]
        return _grouped(pairs if forward else [(b, a) for a, b in pairs])
    elif step.name in _REDUCTIONS:
        moves = {}
    else:
        moves = same
    return _grouped(list(moves.items()) if forward else [(new, old) for old, new in moves.items()])


def _grouped(pairs: list[tuple[int, int]]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for one, other in pairs:
        groups.setdefault(one, set()).add(other)
    return groups


def _extents(shape: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """For each axis longer than 1: the distance in memory to the end of it, and of one step along it."""
    extents, step = {}, 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            extents[axis] = (step * shape[axis], step)
        step *= shape[axis]
    return extents


def carry(trace: Trace, step: Node, source: int, axis: int, *, forward: bool = True) -> int | None:
    """The axis of the output of an operation that was this axis of its input, or backward; None if it is not whole."""
    moved = _axis_moves(trace, step, source, forward).get(axis, set())
    before, after = trace.nodes[source].shape, step.shape
    here, there = (before, after) if forward else (after, before)
    place = next(iter(moved), None)
    return place if place is not None and len(moved) == 1 and here[axis] == there[place] else None


def merge_axis(trace: Trace, merge: Merge, node: int) -> int:
    """The channel axis of an operand."""
    ndim = len(trace.nodes[node].shape)
    if merge.axis is not None:
        return merge.axis
    if merge.named is not None:
        return merge.named[1] % ndim
    found = channel_axis(trace, merge.node)
    if found is None:
        found = channel_axis(trace, node)
    return found if found is not None else (1 if ndim > 3 else ndim - 1)
