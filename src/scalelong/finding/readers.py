"""What lies behind a merge: the layers that read it and could take a constant, and the norms that cancel one."""

from collections.abc import Callable

from torch import nn

from ..tracing import Call, Node, Trace
from .candidates import Candidate
from .plan import FoldTarget, Readers
from .reach import COPIES, VIEWS, carry_forward, merge_axis

# Which layers can take a constant factor of a skip into their weights exactly.

FOLDING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# f(κx) = κ f(x) for κ >= 0, channel by channel.
_HOMOGENEOUS = COPIES | VIEWS | {"relu", "relu_", "leaky_relu", "leaky_relu_", "avg_pool1d", "avg_pool2d", "avg_pool3d"}

# Each channel by itself, whatever the factor: behind one of these the channels of the skip are still its own.
_ACTIVATIONS = {"silu", "gelu", "elu", "mish", "hardswish", "sigmoid", "tanh", "softplus", "native_dropout"}


def readers_of(trace: Trace, candidate: Candidate, repeats: int) -> Readers:
    """The layers that read the merge of a skip, and the norm that cancels a constant."""
    norm, module, cancelled, bypass = _norm_after(trace, candidate)
    fold, unfoldable = _fold_targets(trace, candidate, repeats)
    return Readers(
        direct=_direct(trace, candidate, repeats),
        behind_norm=_behind_norms(trace, candidate, repeats) if norm else (),
        fold=fold,
        unfoldable=unfoldable,
        norm=norm,
        norm_module=module,
        cancelled=cancelled,
        bypass=bypass,
    )


def _fold_targets(trace: Trace, candidate: Candidate, repeats: int) -> tuple[tuple[FoldTarget, ...], str]:
    """All layers that see the skip behind the merge, or the one that makes it; otherwise why there are none."""
    behind, reason = _behind(trace, candidate, repeats, _homogeneous)
    if behind:
        return behind, ""
    before = _before(trace, candidate, repeats)
    return (before, "") if before else ((), reason)


def _behind_norms(trace: Trace, candidate: Candidate, repeats: int) -> tuple[FoldTarget, ...]:
    """All layers that read the skip, also after norms and activations. None if something else reads it too."""
    return _behind(trace, candidate, repeats, _channelwise)[0]


def _direct(trace: Trace, candidate: Candidate, repeats: int) -> tuple[FoldTarget, ...]:
    """The layers that take the merge as it is, whatever else takes it too, such as a normalisation."""
    merge = candidate.merge
    targets: dict[str, FoldTarget] = {}
    front = [] if merge.axis is None else [(merge.node, merge.axis)]
    while front:
        node, axis = front.pop()
        for user in trace.users[node]:
            call, step = _layer_call(trace, node, user), trace.nodes[user]
            if call is not None and not _obstacle(trace, call, repeats) and axis == _input_axis(trace, node, call):
                targets[call.name] = _target(call, candidate)
            elif step.name in COPIES | VIEWS and (moved := carry_forward(trace, step, node, axis)) is not None:
                front.append((user, moved))
    return tuple(targets.values())


def _target(call: Call, candidate: Candidate) -> FoldTarget:
    merge = candidate.merge
    assert merge.axis is not None
    widths = [shape[merge.axis] for shape in merge.shapes]
    return FoldTarget(
        module=call.name,
        start=merge.starts[candidate.operand],
        length=widths[candidate.operand],
        main_start=merge.starts[candidate.main],
        main_length=widths[candidate.main],
    )


def _input_axis(trace: Trace, node: int, call: Call) -> int:
    return len(trace.nodes[node].shape) - 1 if isinstance(call.module, nn.Linear) else 1


def _behind(
    trace: Trace, candidate: Candidate, repeats: int, passes: Callable[[Node], bool]
) -> tuple[tuple[FoldTarget, ...], str]:
    merge = candidate.merge
    if merge.axis is None:
        return (), "its merge is an addition"
    targets: dict[str, FoldTarget] = {}
    front = [(merge.node, merge.axis)]
    while front:
        node, axis = front.pop()
        if node in trace.outputs:
            return (), "the merge is an output of the model"
        for user in trace.users[node]:
            call = _layer_call(trace, node, user)
            step = trace.nodes[user]
            if _unused(trace, step):
                continue
            if passes is _channelwise and (normed := _norm_call(trace, node, step)) is not None:
                front.append((normed.outputs[0][1], axis))
                continue
            if call is not None:
                obstacle = _obstacle(trace, call, repeats)
                if obstacle or axis != _input_axis(trace, node, call):
                    return (), obstacle or f"{call.name} works on another axis"
                targets[call.name] = _target(call, candidate)
            elif passes(step) and (moved := carry_forward(trace, step, node, axis)) is not None:
                front.append((user, moved))
            elif passes is _channelwise and _modulates(trace, step, node, axis):
                front.append((user, axis))
            else:
                where = step.call.name if step.call is not None else ""
                return (), f"{step.name.removeprefix('native_')} comes first{f' ({where})' if where else ''}"
    return tuple(targets.values()), "nothing comes behind it"


def _before(trace: Trace, candidate: Candidate, repeats: int) -> tuple[FoldTarget, ...]:
    """The layer that makes the skip and nothing else: its weights and bias take the factor."""
    node, follower = candidate.skip_node, candidate.merge.parts[candidate.operand].node
    axis = merge_axis(trace, candidate.merge, node)
    while trace.users[node] == [follower] and node not in trace.outputs:
        step = trace.nodes[node]
        for call in trace.calls:
            made = isinstance(call.module, FOLDING) and [leaf for _, leaf in call.outputs] == [node]
            if made and call.contains(node) and not _obstacle(trace, call, repeats):
                expected = len(step.shape) - 1 if isinstance(call.module, nn.Linear) else 1
                length = step.shape[axis]
                return (FoldTarget(module=call.name, start=0, length=length, output=True),) if axis == expected else ()
        if not _homogeneous(step) or step.name in VIEWS:
            return ()
        node, follower = step.inputs[0], node
    return ()


def _layer_call(trace: Trace, node: int, user: int) -> Call | None:
    call = trace.nodes[user].call
    if call is None or not isinstance(call.module, FOLDING):
        return None
    return call if call.inputs and call.inputs[0] == ((0, 0), node) else None


def _obstacle(trace: Trace, call: Call, repeats: int) -> str:
    module = call.module
    plain = next(cls for cls in FOLDING if isinstance(module, cls))
    if type(module).forward is not plain.forward:
        return f"{call.name} is a {type(module).__name__}"
    weight = module._parameters.get("weight")
    if weight is None or hasattr(module, "parametrizations"):
        return f"the weight of {call.name} is computed"
    if trace.owners[id(weight)] > 1 or trace.call_count[call.name] != repeats:
        return f"{call.name} is used more than once"
    return ""


def _homogeneous(step: Node) -> bool:
    if len(step.inputs) != 1:
        return False
    if step.name == "constant_pad_nd":
        return not any(isinstance(option, int | float) and option != 0 for option in step.options)
    return step.name in _HOMOGENEOUS or step.name.startswith("upsample_")


def _channelwise(step: Node) -> bool:
    normalises = any(norm in step.name for norm in ("group_norm", "batch_norm", "layer_norm", "rms_norm"))
    return _homogeneous(step) or (len(step.inputs) == 1 and (normalises or step.name.rstrip("_") in _ACTIVATIONS))


def _modulates(trace: Trace, step: Node, node: int, axis: int) -> bool:
    """Whether a condition multiplies the features or is added to them: a number for each channel of each image."""
    others = [trace.nodes[other].shape for other in step.inputs if other != node]
    if step.name.rstrip("_") not in ("mul", "add") or len(others) != 1 or step.shape != trace.nodes[node].shape:
        return False
    sizes = dict(zip(range(len(step.shape) - len(others[0]), len(step.shape)), others[0], strict=True))
    return all(size == 1 for place, size in sizes.items() if place not in (0, axis))


def _unused(trace: Trace, step: Node) -> bool:
    """A further result of an operation that nothing looks at, such as the statistics of a norm."""
    return step.name.endswith(" output") and not trace.users[step.index] and step.index not in trace.outputs


# The normalisation right after a merge, and how much of a constant κ survives it.


def _norm_after(trace: Trace, candidate: Candidate) -> tuple[str, str, float, bool]:
    """The norm and its module; the share of the skip's channels whose statistics contain the skip alone, so that
    dividing by them removes κ; and whether another layer reads the merge without the norm.
    """
    merge = candidate.merge
    if merge.axis is None:
        return "", "", 0.0, False
    start = merge.starts[candidate.operand]
    stop = start + merge.shapes[candidate.operand][merge.axis]
    front, name, module, share, bypass = [(merge.node, merge.axis)], "", "", 0.0, False
    while front:
        node, axis = front.pop()
        for user in trace.users[node]:
            step = trace.nodes[user]
            found = _norm(trace, node, step, axis, start, stop)
            if found is not None:
                name, share = found
                call = _norm_call(trace, node, step) or step.call
                module = call.name if call is not None else ""
            elif step.name in COPIES | VIEWS and (moved := carry_forward(trace, step, node, axis)) is not None:
                front.append((user, moved))
            elif not _unused(trace, step):
                bypass = True
    return name, module, share, bypass and bool(name)


def _norm(trace: Trace, node: int, step: Node, axis: int, start: int, stop: int) -> tuple[str, float] | None:
    """A norm over the channels, and the share of channels start..stop for which it cancels a constant."""
    module = step.call.module if step.call is not None else None
    if step.name == "native_group_norm" and axis == 1:
        groups = [option for option in step.options if isinstance(option, int)][3]
        return f"GroupNorm({groups})", _whole_groups(start, stop, step.shape[1] // groups)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return "InstanceNorm", 1.0
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "BatchNorm, in training", 1.0
    if step.name == "native_layer_norm":
        normed = next(option for option in step.options if isinstance(option, list | tuple))
        return ("LayerNorm", 0.0) if axis >= len(step.shape) - len(normed) else None
    if step.name.endswith("rms_norm") or _norm_call(trace, node, step) is not None:
        return "RMSNorm", 0.0
    return None


# What an RMSNorm is made of: each channel times a statistic. None of these mixes channels otherwise.
_STATISTICS = COPIES | {
    *("pow", "square", "abs", "mean", "sum", "linalg_vector_norm", "norm", "rsqrt", "sqrt", "reciprocal"),
    *("add", "add_", "mul", "mul_", "div", "div_", "clamp", "clamp_min", "expand"),
}


def _norm_call(trace: Trace, node: int, step: Node) -> Call | None:
    """The call of a module that is an RMSNorm by its name and by all of its operations, and takes this node."""
    for call in step.call.stack() if step.call is not None else ():
        if "rmsnorm" in type(call.module).__name__.lower().replace("_", ""):
            takes = [leaf for _, leaf in call.inputs] == [node] and len(call.outputs) == 1
            inside = trace.nodes[call.start : call.end]
            plain = takes and all(each.name in _STATISTICS for each in inside)
            return call if plain and trace.nodes[call.outputs[0][1]].shape == trace.nodes[node].shape else None
    return None


def _whole_groups(start: int, stop: int, size: int) -> float:
    """The share of channels start..stop that lie in groups wholly inside."""
    first, last = -(-start // size), stop // size
    return max(last - first, 0) * size / (stop - start)
