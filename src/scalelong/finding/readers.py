"""The layers that read a merge: which can take a constant into their weights, and which norm cancels one."""

from torch import nn

from ..tracing import Call, Node, Trace
from .axes import COPIES, VIEWS, carry, merge_axis
from .candidates import Candidate
from .plan import FoldTarget, Readers

FOLDING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""The layers that can take a constant factor of a skip into their weights exactly."""
# f(κx) = κ f(x) for κ >= 0, channel by channel.
_HOMOGENEOUS = {"relu", "relu_", "leaky_relu", "leaky_relu_", "avg_pool1d", "avg_pool2d", "avg_pool3d"}
# Each channel by itself, whatever the factor: after one of these the channels of the skip are still its own.
_CHANNELWISE = ("group_norm", "batch_norm", "layer_norm", "rms_norm")
_ACTIVATIONS = {"silu", "gelu", "elu", "mish", "hardswish", "sigmoid", "tanh", "softplus", "native_dropout"}
# What an RMSNorm is made of: each channel times a statistic. None of these mixes channels otherwise.
_STATISTICS = COPIES | {
    *("pow", "square", "abs", "mean", "sum", "linalg_vector_norm", "norm", "rsqrt", "sqrt", "reciprocal"),
    *("add", "add_", "mul", "mul_", "div", "div_", "clamp", "clamp_min", "expand"),
}


def readers_of(trace: Trace, candidate: Candidate, repeats: int) -> Readers:
    """Follow a concatenation through the operations after it, to the layers that read the skip."""
    merge = candidate.merge
    if merge.axis is None:
        before = _layer_before(trace, candidate, repeats)
        return Readers(fold=before, unfoldable="" if before else "its merge is an addition")
    start, length = merge.starts[candidate.operand], merge.shapes[candidate.operand][merge.axis]
    main_start, main_length = merge.starts[candidate.main], merge.shapes[candidate.main][merge.axis]
    layers: list[str] = []
    unfoldable, beyond_reach, bypass = "", False, False
    norm, norm_module, cancelled = "", "", 0.0
    # A tensor, its channel axis, and whether it is still the merge itself.
    front = [(merge.node, merge.axis, True)]
    while front:
        node, axis, itself = front.pop()
        if node in trace.outputs:
            unfoldable, beyond_reach = unfoldable or "the merge is an output of the model", True
        for user in trace.users[node]:
            step = trace.nodes[user]
            if step.name.endswith(" output") and not trace.users[user] and user not in trace.outputs:
                continue  # a further result that nothing reads, such as the statistics of a norm
            call, moved, rms = step.call, carry(trace, step, node, axis), _rms_norm(trace, node, step)
            found = _norm(step, rms, axis, start, start + length) if itself else None
            if found is not None:
                (norm, cancelled), norm_call = found, rms or call
                norm_module = norm_call.name if norm_call is not None else ""
            is_copy = step.name in COPIES | VIEWS and moved is not None
            bypass |= itself and found is None and not is_copy
            obstacle = f"{step.name.removeprefix('native_')} comes first{f' ({call.name})' if call else ''}"
            if rms is not None:
                unfoldable = unfoldable or obstacle
                front.append((rms.outputs[0][1], axis, False))
            elif call and isinstance(call.module, FOLDING) and call.inputs and call.inputs[0] == ((0, 0), node):
                summed = len(trace.nodes[node].shape) - 1 if isinstance(call.module, nn.Linear) else 1
                problem = _obstacle(trace, call, repeats)
                if problem or axis != summed:
                    unfoldable = unfoldable or problem or f"{call.name} works on a different axis"
                    beyond_reach = True
                else:
                    layers.append(call.name)
            elif moved is not None and (is_copy or _is_homogeneous(step)):
                front.append((user, moved, itself and is_copy))
            else:
                unfoldable = unfoldable or obstacle
                if moved is not None and (_is_channelwise(step) or _modulates(trace, step, node, axis)):
                    front.append((user, moved, False))
                else:
                    beyond_reach = True
    everything = tuple(
        FoldTarget(module=name, start=start, length=length, main_start=main_start, main_length=main_length)
        for name in dict.fromkeys(layers)
    )
    fold = everything if everything and not unfoldable else _layer_before(trace, candidate, repeats)
    return Readers(
        behind_norm=everything if norm and not beyond_reach else (),
        fold=fold,
        unfoldable="" if fold else unfoldable or "nothing reads it",
        norm=norm,
        norm_module=norm_module,
        cancelled=cancelled,
        bypass=bypass and bool(norm),
    )


def _layer_before(trace: Trace, candidate: Candidate, repeats: int) -> tuple[FoldTarget, ...]:
    """The layer that makes the skip and nothing else: its weights and bias take the factor."""
    node, follower = candidate.skip_node, candidate.merge.node
    axis = merge_axis(trace, candidate.merge, node)
    while trace.users[node] == [follower] and node not in trace.outputs:
        step = trace.nodes[node]
        for call in trace.calls:
            made = isinstance(call.module, FOLDING) and [leaf for _, leaf in call.outputs] == [node]
            if made and call.contains(node) and not _obstacle(trace, call, repeats):
                expected = len(step.shape) - 1 if isinstance(call.module, nn.Linear) else 1
                target = FoldTarget(module=call.name, start=0, length=step.shape[axis], output=True)
                return (target,) if axis == expected else ()
        if not _is_homogeneous(step) and step.name not in COPIES:
            return ()
        node, follower = step.inputs[0], node
    return ()


def _obstacle(trace: Trace, call: Call, repeats: int) -> str:
    """Why the weights of this layer cannot take a factor."""
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


def _is_homogeneous(step: Node) -> bool:
    if step.name == "constant_pad_nd" and any(isinstance(o, int | float) and o != 0 for o in step.options):
        return False
    known = step.name in _HOMOGENEOUS or step.name == "constant_pad_nd" or step.name.startswith("upsample_")
    return known and len(step.inputs) == 1


def _is_channelwise(step: Node) -> bool:
    known = any(norm in step.name for norm in _CHANNELWISE) or step.name.rstrip("_") in _ACTIVATIONS
    return known and len(step.inputs) == 1


def _modulates(trace: Trace, step: Node, node: int, axis: int) -> bool:
    """True if a condition multiplies the features or is added to them: a number for each channel of each image."""
    others = [trace.nodes[other].shape for other in step.inputs if other != node]
    if step.name.rstrip("_") not in ("mul", "add") or len(others) != 1 or step.shape != trace.nodes[node].shape:
        return False
    sizes = dict(zip(range(len(step.shape) - len(others[0]), len(step.shape)), others[0], strict=True))
    return all(size == 1 for place, size in sizes.items() if place not in (0, axis))


def _norm(step: Node, rms: Call | None, axis: int, start: int, stop: int) -> tuple[str, float] | None:
    """A norm over the channels, and the share of channels start..stop whose statistics contain no others.

    For these channels dividing by the statistics removes a constant κ.
    """
    module = step.call.module if step.call is not None else None
    if step.name == "native_group_norm" and axis == 1:
        groups = [option for option in step.options if isinstance(option, int)][3]
        size = step.shape[1] // groups
        whole = stop // size - -(-start // size)
        return f"GroupNorm({groups})", max(whole, 0) * size / (stop - start)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return "InstanceNorm", 1.0
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "BatchNorm, in training", 1.0
    if step.name == "native_layer_norm":
        normed = next(option for option in step.options if isinstance(option, list | tuple))
        return ("LayerNorm", 0.0) if axis >= len(step.shape) - len(normed) else None
    return ("RMSNorm", 0.0) if step.name.endswith("rms_norm") or rms is not None else None


def _rms_norm(trace: Trace, node: int, step: Node) -> Call | None:
    """The call of a module that is an RMSNorm by its name and by all of its operations, and takes this node."""
    for call in step.call.stack() if step.call is not None else ():
        if "rmsnorm" in type(call.module).__name__.lower().replace("_", ""):
            takes = [leaf for _, leaf in call.inputs] == [node] and len(call.outputs) == 1
            plain = takes and all(each.name in _STATISTICS for each in trace.nodes[call.start : call.end])
            return call if plain and trace.nodes[call.outputs[0][1]].shape == trace.nodes[node].shape else None
    return None
