"""The branches of a transformer block with less to remember, for training in float32 on a CPU.

Autograd keeps the output of every layer for the backward pass. Those of the norms and of the GELU are cheap to compute
again from their inputs, which are kept anyway: without them, a block keeps a third less. Small features are left to
the plain layers: there the calls cost more than they save.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

SMALLEST = 2**16
"""Entries of the features from which remembering less costs no time; below it the calls of Python show."""


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
            return gradient, *_by_autograd(_gated_linear, gradient, x, gate, weight)
        by_weight = gradient.flatten(0, -2).t() @ (x * gate).flatten(0, -2)
        by_gated = gradient @ weight
        by_gate = (by_gated * x).sum_to_size(gate.shape)
        return gradient, by_gated.mul_(gate), by_gate, by_weight


class _NormedLinear(Function):
    """W norm(x) + b, of which x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor, bias: Tensor | None):
        normed, mean, deviation = torch.native_layer_norm(x, scale.shape, scale, shift, eps)
        ctx.save_for_backward(x, scale, shift, weight, bias, mean, deviation)
        ctx.eps = eps
        return F.linear(normed, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, shift, weight, bias, mean, deviation = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _by_autograd(plain_normed_linear, gradient, x, scale, shift, ctx.eps, weight, bias)
        normed = torch.native_layer_norm(x, scale.shape, scale, shift, ctx.eps)[0]
        by_normed = F.linear(gradient, weight.t())
        by_x, by_scale, by_shift = _norm_backward(by_normed, x, mean, deviation, scale, shift)
        return by_x, by_scale, by_shift, None, _weight_gradient(gradient, normed), _bias_gradient(gradient, bias)


class _NormedMLP(Function):
    """W_2 gelu(W_1 norm(x) + b_1) + b_2, of which x and the input of the GELU are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, eps: float, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
    ):
        normed, mean, deviation = torch.native_layer_norm(x, scale.shape, scale, shift, eps)
        hidden = F.linear(normed, w1, b1)
        ctx.save_for_backward(x, scale, shift, w1, b1, w2, b2, hidden, mean, deviation)
        ctx.eps = eps
        return F.linear(F.gelu(hidden), w2, b2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, shift, w1, b1, w2, b2, hidden, mean, deviation = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _by_autograd(plain_normed_mlp, gradient, x, scale, shift, ctx.eps, w1, b1, w2, b2)
        by_w2, by_b2 = _weight_gradient(gradient, F.gelu(hidden)), _bias_gradient(gradient, b2)
        by_gelu = F.linear(gradient, w2.t())
        by_hidden = torch.ops.aten.gelu_backward.grad_input(by_gelu, hidden, grad_input=by_gelu)
        normed = torch.native_layer_norm(x, scale.shape, scale, shift, ctx.eps)[0]
        by_w1, by_b1 = _weight_gradient(by_hidden, normed), _bias_gradient(by_hidden, b1)
        by_normed = F.linear(by_hidden, w1.t())
        by_x, by_scale, by_shift = _norm_backward(by_normed, x, mean, deviation, scale, shift)
        return by_x, by_scale, by_shift, None, by_w1, by_b1, by_w2, by_b2


def plain_gated_addition(base: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(base.flatten(0, -2), (x * gate).flatten(0, -2), weight.t()).view_as(base)


def _gated_linear(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x * gate, weight)


def plain_normed_linear(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor, bias: Tensor | None):
    return F.linear(F.layer_norm(x, scale.shape, scale, shift, eps), weight, bias)


def plain_normed_mlp(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor
) -> Tensor:
    return F.linear(F.gelu(plain_normed_linear(x, scale, shift, eps, w1, b1)), w2, b2)


def gated_addition(base: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return _GatedAddition.apply(base, x, gate, weight)  # pyright: ignore[reportReturnType]


def normed_linear(x: Tensor, norm: nn.LayerNorm, linear: nn.Linear) -> Tensor:
    return _NormedLinear.apply(x, norm.weight, norm.bias, norm.eps, linear.weight, linear.bias)  # pyright: ignore[reportReturnType]


def normed_mlp(x: Tensor, norm: nn.LayerNorm, expand: nn.Linear, reduce: nn.Linear) -> Tensor:
    return _NormedMLP.apply(  # pyright: ignore[reportReturnType]
        x, norm.weight, norm.bias, norm.eps, expand.weight, expand.bias, reduce.weight, reduce.bias
    )


def can_fuse(x: Tensor, *layers: nn.Module) -> bool:
    """Whether the lean path pays, and computes the same: ordinary float32 tensors in training, layers without hooks."""
    return (
        x.numel() >= SMALLEST
        and type(x) is Tensor
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not _is_transformed()
        and all(_is_plain(layer) for layer in layers)
    )


def _is_transformed() -> bool:
    """Under torch.func, forward-mode derivatives, tracing, or a mode that watches every operation (FLOP counters)."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or bool(nn.modules.module._has_any_global_hook())
    )


def _is_plain(layer: nn.Module) -> bool:
    """Not replaced by another kind (adapters, quantisation), and without hooks."""
    parameters = layer._parameters.values()
    return (
        type(layer) in (nn.Linear, nn.LayerNorm)
        and all(p is None or (type(p) is nn.Parameter and p.dtype == torch.float32) for p in parameters)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_gradient(gradient: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else gradient.flatten(0, -2).sum(0)


def _norm_backward(gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, scale: Tensor, shift: Tensor):
    return torch.ops.aten.native_layer_norm_backward(
        gradient, x, list(scale.shape), mean, deviation, scale, shift, [True, True, True]
    )


def _by_autograd(function: Any, gradient: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    """The same gradient from the plain layers, so that it can be differentiated once more."""
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs), wanted, gradient, create_graph=True))
    return tuple(next(found) if isinstance(v, Tensor) and v.requires_grad else None for v in inputs)


# Dropout that draws fewer random numbers, for training on a CPU.
#
# torch draws one number there for each entry, one after the other. Here one number decides about four entries.

BITS = 16
"""For each entry: a probability is rounded to a multiple of 1 / 65536."""


class PackedDropout(nn.Dropout):
    """nn.Dropout, but on a CPU with other random numbers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if not (self.training and 0 < self.p < 1 and _is_ordinary(input)):
            return super().forward(input)
        factors = draw_factors(input, self.p)
        return input.mul_(factors) if self.inplace else input * factors


def draw_factors(x: Tensor, p: float) -> Tensor:
    """For each entry of x, 0 with probability p and 1 / (1 - p) otherwise; laid out in memory as x is."""
    count, levels = x.numel(), 2**BITS
    numbers = torch.empty(-(-count * BITS // 64), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[:count] >= round(p * levels) - levels // 2
    return kept.to(x.dtype).div_(1 - p).as_strided(x.shape, x.stride())


def pack_dropout_(model: nn.Module) -> None:
    """Exchange the dropouts of a network."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, PackedDropout(child.p, child.inplace).train(child.training))


def _is_ordinary(x: Tensor) -> bool:
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return type(x) is Tensor and x.device.type == "cpu" and dense and not torch.compiler.is_compiling()
