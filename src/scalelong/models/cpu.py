"""A transformer block for float32 on a CPU: the operations of its layers, with fewer calls around them.

In a small network most of a step is not arithmetic: modules call modules, and autograd makes a node for every view. So
small blocks (`_small_block`) call the operations themselves, on matrices. Large blocks (`_Block`) are one node of
autograd each, whose gradients are added in place, and which keeps less: the outputs of norms and GELU are computed
again from their inputs, which are kept anyway. So a block keeps a third less.

All compute what the layers compute; `plain_block` is the reference. Where somebody would notice (hooks, adapters,
other types of tensors, transforms, compilation) `is_ordinary` and `is_untouched` say no, and the layers are called one
by one.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.nn.modules.module import _has_any_global_hook

LARGE = 2**17
"""Entries of the features from which a block keeps less and computes more, and its merge makes no concatenation. Of
norms and GELU it would keep six times as many: 3 MiB."""

# What `scaled_dot_product_attention` calls on a CPU. A release of torch may rename it; then blocks call their layers.
_attend: Any = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)
_attend_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_attend_backward = _attend and getattr(_attend_backward, "default", None)
_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_gelu_backward_ = torch.ops.aten.gelu_backward.grad_input


Numbers = tuple[int, float, float, float, float]
"""Heads; ε of the norms before attention and MLP; τ by which their branches are multiplied before they are added."""


def fused_block(
    x: Tensor,
    skip: Tensor | None,
    factors: tuple[float, float],
    merge: Mapping[str, Any],
    numbers: Numbers,
    layers: Sequence[Mapping[str, Any]],
) -> Tensor:
    """A block as one call: x, perhaps merged with a skip, + τ attention(norm(x)), + τ mlp(norm(x)); all (B, L, D).

    `merge` has the parameters of the merge, whose operands are multiplied by `factors`; `layers` has those of both
    norms, of queries, keys and values, the attention's output, the MLP's expansion and reduction.
    """
    weights = [layer[name] for layer in (merge, *layers) if layer for name in ("weight", "bias")]
    if x.numel() >= LARGE and torch.is_grad_enabled():
        return _Block.apply(numbers, factors, x, skip, *weights)  # pyright: ignore[reportReturnType]
    return _small_block(numbers, factors, x, skip, weights)


def _small_block(
    numbers: Numbers, factors: tuple[float, float], x: Tensor, skip: Tensor | None, weights: Sequence[Any]
) -> Tensor:
    """By torch's own nodes, but as few as there can be: all on matrices (B L, D), without views of them in between."""
    heads, eps1, eps2, tau1, tau2 = numbers
    scale1, shift1, scale2, shift2, qkv_weight, qkv_bias, out, out_bias, expand, expand_bias, reduce, reduce_bias = (
        weights[-12:]
    )
    shape = batch, length, dim = x.shape
    x = x.reshape(-1, dim)
    if skip is not None:
        x = merge_features(x, skip.reshape(-1, dim), factors, weights[0], weights[1])
    normed = torch.native_layer_norm(x, (dim,), scale1, shift1, eps1)[0]
    qkv = F.linear(normed, qkv_weight, qkv_bias).view(batch, length, 3, heads, -1)
    attended = _attend(*qkv.permute(2, 0, 3, 1, 4).unbind(0))[0]
    branch = F.linear(attended.transpose(1, 2).reshape(-1, dim), out, out_bias)
    x = branch.add_(x) if tau1 == 1.0 else torch.add(x, branch, alpha=tau1)
    normed = torch.native_layer_norm(x, (dim,), scale2, shift2, eps2)[0]
    branch = F.linear(F.gelu(F.linear(normed, expand, expand_bias)), reduce, reduce_bias)
    x = branch.add_(x) if tau2 == 1.0 else torch.add(x, branch, alpha=tau2)
    return x.view(shape)


class _Block(Function):
    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, factors: tuple[float, float], x: Tensor, skip: Tensor | None, *weights: Any
    ):
        output, kept = _forward(numbers, factors, x, skip, weights)
        ctx.settings = numbers, factors, len(weights)
        ctx.save_for_backward(x, skip, *weights, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        numbers, factors, count = ctx.settings
        x, skip, *rest = ctx.saved_tensors
        weights, kept = rest[:count], rest[count:]
        if torch.is_grad_enabled():  # it will be differentiated once more
            return None, None, *by_autograd(partial(plain_block, numbers, factors), gradient, x, skip, *weights)
        return None, None, *_backward(numbers, factors, gradient, x, skip, weights, kept, ctx.needs_input_grad[2:])


def _forward(
    numbers: Numbers,
    factors: tuple[float, float],
    x: Tensor,
    skip: Tensor | None,
    weights: Sequence[Any],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The output, and what the backward pass needs and cannot compute again at once."""
    heads, eps1, eps2, tau1, tau2 = numbers
    scale1, shift1, scale2, shift2, qkv_weight, qkv_bias, out, out_bias, expand, expand_bias, reduce, reduce_bias = (
        weights[-12:]
    )
    batch, length, dim = x.shape
    stream = x.reshape(-1, dim)
    merged = None
    if skip is not None:
        weight = weights[0].t()
        merged = torch.addmm(weights[1], stream, weight[:dim], alpha=factors[0])
        stream = merged.addmm_(skip.reshape(-1, dim), weight[dim:], alpha=factors[1])
    normed, mean1, deviation1 = torch.native_layer_norm(stream, (dim,), scale1, shift1, eps1)
    qkv = F.linear(normed, qkv_weight, qkv_bias)
    q, k, v = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    attended, logs = _attend(q, k, v)
    branch = F.linear(attended.transpose(1, 2).reshape(-1, dim), out, out_bias)
    middle = branch.add_(stream) if tau1 == 1.0 else torch.add(stream, branch, alpha=tau1)
    normed, mean2, deviation2 = torch.native_layer_norm(middle, (dim,), scale2, shift2, eps2)
    hidden = F.linear(normed, expand, expand_bias)
    branch = F.linear(F.gelu(hidden), reduce, reduce_bias)
    output = branch.add_(middle) if tau2 == 1.0 else torch.add(middle, branch, alpha=tau2)
    kept = (merged, mean1, deviation1, qkv, attended, logs, middle, mean2, deviation2, hidden)
    return output.view(batch, length, dim), kept


def _backward(
    numbers: Numbers,
    factors: tuple[float, float],
    gradient: Tensor,
    x: Tensor,
    skip: Tensor | None,
    weights: Sequence[Any],
    kept: Sequence[Any],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, of the skip and of the weights."""
    heads, eps1, eps2, tau1, tau2 = numbers
    scale1, shift1, scale2, shift2, qkv_weight, _, out, _, expand, _, reduce, _ = weights[-12:]
    merged, mean1, deviation1, qkv, attended, logs, middle, mean2, deviation2, hidden = kept
    batch, length, dim = x.shape
    need = needed[-12:]
    stream = x.reshape(-1, dim) if merged is None else merged
    gradient = gradient.reshape(-1, dim)

    # The MLP
    by_branch = gradient if tau2 == 1.0 else gradient * tau2
    by_hidden = torch.mm(by_branch, reduce)
    _gelu_backward_(by_hidden, hidden, grad_input=by_hidden)
    by_normed = torch.mm(by_hidden, expand)
    by_middle, by_scale2, by_shift2 = _norm_backward(
        by_normed, middle, [dim], mean2, deviation2, scale2, shift2, [True, need[2], need[3]]
    )
    by_middle.add_(gradient)
    normed = torch.native_layer_norm(middle, (dim,), scale2, shift2, eps2)[0]
    mlp = (
        torch.mm(by_hidden.t(), normed) if need[8] else None,
        by_hidden.sum(0) if need[9] else None,
        torch.mm(by_branch.t(), F.gelu(hidden)) if need[10] else None,
        by_branch.sum(0) if need[11] else None,
    )
    del normed, by_hidden

    # The attention
    by_branch = by_middle if tau1 == 1.0 else by_middle * tau1
    by_attended = torch.mm(by_branch, out).view(batch, length, heads, -1).transpose(1, 2)
    q, k, v = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    parts = _attend_backward(by_attended, q, k, v, attended, logs, 0.0, False)
    by_qkv = torch.cat([part.transpose(1, 2).reshape(-1, dim) for part in parts], dim=1)
    by_normed = torch.mm(by_qkv, qkv_weight)
    by_stream, by_scale1, by_shift1 = _norm_backward(
        by_normed, stream, [dim], mean1, deviation1, scale1, shift1, [True, need[0], need[1]]
    )
    by_stream.add_(by_middle)
    normed = torch.native_layer_norm(stream, (dim,), scale1, shift1, eps1)[0]
    joined = attended.transpose(1, 2).reshape(-1, dim)
    attention = (
        torch.mm(by_qkv.t(), normed) if need[4] else None,
        by_qkv.sum(0) if need[5] else None,
        torch.mm(by_branch.t(), joined) if need[6] else None,
        by_branch.sum(0) if need[7] else None,
    )
    found = [by_scale1, by_shift1, by_scale2, by_shift2, *attention, *mlp]

    # The merge
    if skip is None:
        return [by_stream.view_as(x), None, *found]
    main_part, skip_part = weights[0][:, :dim], weights[0][:, dim:]
    by_weight = None
    if needed[2]:
        by_weight, transposed = torch.empty_like(weights[0]), by_stream.t()
        torch.mm(transposed, x.reshape(-1, dim), out=by_weight[:, :dim])
        torch.mm(transposed, skip.reshape(-1, dim), out=by_weight[:, dim:])
        _times_(by_weight[:, :dim], factors[0])
        _times_(by_weight[:, dim:], factors[1])
    by_x = _times_(torch.mm(by_stream, main_part), factors[0]).view_as(x) if needed[0] else None
    by_skip = _times_(torch.mm(by_stream, skip_part), factors[1]).view_as(skip) if needed[1] else None
    return [by_x, by_skip, by_weight, by_stream.sum(0) if needed[3] else None, *found]


def _times_(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x.mul_(factor)


def plain_block(
    numbers: Numbers, factors: tuple[float, float], x: Tensor, skip: Tensor | None, *weights: Any
) -> Tensor:
    """What `fused_block` computes, by torch's own layers."""
    heads, eps1, eps2, tau1, tau2 = numbers
    scale1, shift1, scale2, shift2, qkv_weight, qkv_bias, out, out_bias, expand, expand_bias, reduce, reduce_bias = (
        weights[-12:]
    )
    dim = x.shape[-1]
    if skip is not None:
        both = torch.cat([x * factors[0], skip * factors[1]], dim=-1)
        x = F.linear(both, *weights[:2])
    normed = F.layer_norm(x, (dim,), scale1, shift1, eps1)
    q, k, v = F.linear(normed, qkv_weight, qkv_bias).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    # By products and a softmax: the fused attention cannot be differentiated twice.
    attended = torch.softmax(q @ k.transpose(-2, -1) * (dim // heads) ** -0.5, dim=-1) @ v
    x = x + tau1 * F.linear(attended.transpose(1, 2).flatten(2), out, out_bias)
    normed = F.layer_norm(x, (dim,), scale2, shift2, eps2)
    return x + tau2 * F.linear(F.gelu(F.linear(normed, expand, expand_bias)), reduce, reduce_bias)


def merge_features(main: Tensor, skip: Tensor, factors: tuple[float, float], weight: Tensor, bias: Tensor) -> Tensor:
    """W [f_main main ⊕ f_skip skip] + b for matrices (B L, D) each.

    For large features by two products, which take the factors along: the concatenation is never made. For small ones
    the second product would cost more than it saves.
    """
    dim = main.shape[1]
    if is_small(main):
        main = main if factors[0] == 1.0 else main * factors[0]
        skip = skip if factors[1] == 1.0 else skip * factors[1]
        return F.linear(torch.cat((main, skip), 1), weight, bias)
    main_weight, skip_weight = weight.t().split((dim, weight.shape[1] - dim))
    merged = torch.addmm(bias, main, main_weight, alpha=factors[0])
    return torch.addmm(merged, skip, skip_weight, alpha=factors[1])


class _GatedAddition(Function):
    """base + W (gate ⊙ x), of which x is kept, and not what the gate makes of it."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, x: Tensor, gate: Tensor, weight: Tensor):
        ctx.save_for_backward(x, gate, weight)
        return plain_gated_addition(base, x, gate, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return gradient, *by_autograd(_gated_linear, gradient, x, gate, weight)
        by_weight = gradient.flatten(0, -2).t() @ (x * gate).flatten(0, -2)
        by_gated = gradient @ weight
        by_gate = (by_gated * x).sum_to_size(gate.shape)
        return gradient, by_gated.mul_(gate), by_gate, by_weight


def plain_gated_addition(base: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(base.flatten(0, -2), (x * gate).flatten(0, -2), weight.t()).view_as(base)


def _gated_linear(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x * gate, weight)


def gated_addition(base: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return _GatedAddition.apply(base, x, gate, weight)  # pyright: ignore[reportReturnType]


# Whether anybody would notice


def is_small(x: Tensor) -> bool:
    """Not while a network is compiled or exported: that would fix the sizes of its inputs."""
    return not torch.compiler.is_compiling() and x.numel() < LARGE


def is_ordinary(x: Tensor) -> bool:
    """Float32 on a CPU, computed with for itself: not compiled, transformed, traced or watched."""
    return (
        type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_cpu
        and x.numel() > 0
        and _attend_backward is not None
        and torch._C._get_flash_sdp_enabled()  # a user may have chosen another attention
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch._C._is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not _has_any_global_hook()
    )


def is_untouched(parts: Sequence[nn.Module], kinds: Sequence[type[nn.Module]]) -> bool:
    """Of these kinds, not of others (adapters, quantisation), without hooks, and with ordinary parameters."""
    if len(parts) != len(kinds):
        return False
    for part, kind in zip(parts, kinds, strict=True):
        if (
            type(part) is not kind
            or part._forward_hooks
            or part._forward_pre_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            or "forward" in part.__dict__
        ):
            return False
        for parameter in part._parameters.values():
            if type(parameter) is not nn.Parameter and parameter is not None:
                return False
    return True


def by_autograd(function: Any, gradient: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradient from the plain layers, so that it can be differentiated once more."""
    # Another tensor for each input: one that is given twice has two gradients here.
    inputs = tuple(value.view_as(value) if value is not None and value.requires_grad else value for value in inputs)
    wanted = [value for value in inputs if value is not None and value.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs), wanted, gradient, create_graph=True))
    return tuple(next(found) if value is not None and value.requires_grad else None for value in inputs)
