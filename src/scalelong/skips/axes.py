"""Which axis of a tensor holds the channels: the one that the next layer sums over."""

from .trace import Node, Trace

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
    """The channel axis of a node by the next layer behind it, else by the layer that made it; None if unknown."""
    after = _search(trace, node, forward=True)
    return after if after is not None else _search(trace, node, forward=False)


def next_layer_axis(trace: Trace, node: int) -> int | None:
    return _search(trace, node, forward=True)


def _search(trace: Trace, node: int, forward: bool) -> int | None:
    """Follow every axis of the node through the operations until a layer says which one it works on."""
    front: list[tuple[int, dict[int, int]]] = [(node, {axis: axis for axis in range(len(trace.nodes[node].shape))})]
    seen = {node}
    while front:
        current, axes = front.pop(0)
        if not forward and trace.nodes[current].is_layer:
            return axes.get(_made_by(trace.nodes[current]))
        neighbours = trace.users[current] if forward else trace.nodes[current].inputs
        for other in neighbours:
            if other in seen:
                continue
            seen.add(other)
            step = trace.nodes[other if forward else current]
            if forward and step.is_layer:
                axis = _summed_by(step, current, len(trace.nodes[current].shape))
                if axis is not None and axis in axes:
                    return axes[axis]
                continue
            moved = _carry(trace, step, current if forward else other, forward)
            kept = {new: axes[old] for old, new in moved.items() if old in axes}
            if kept:
                front.append((other, kept))
    return None


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
    if step.name in ("permute", "transpose", "t", "movedim"):
        mapping = _permutation(step, len(before))
    elif step.name in _VIEWS or len(before) != len(after):
        mapping = _matching(before, after)
    elif step.name in _REDUCTIONS:
        mapping = {}
    else:
        mapping = {axis: axis for axis in range(len(after))}
    return mapping if forward else {new: old for old, new in mapping.items()}


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
