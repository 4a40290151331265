"""Transformer blocks on a CPU, in float32 or mixed precision: the operations of their layers, with fewer calls around
them.

In a small network most of a step is not arithmetic: modules call modules, and autograd makes a node for every operation
and every view. So `fused_blocks` calls the operations themselves, on matrices, and is one node of autograd, whose
backward pass is written out below: for one block, or for a row of them. It knows two sizes.

- Small blocks keep whatever the backward pass needs, and a whole row of them is one node.
- Large blocks are nodes of their own, so that each is forgotten as soon as its gradient is there, and keep less: the
  outputs of norms and GELU are computed again from their inputs, which are kept anyway. So a block keeps a third less.

Under `torch.autocast("cpu", torch.bfloat16)` products are of bfloat16, and the stream between them, norms and the
scores of the attention stay in float32. torch's attention takes several times as long backward in bfloat16 as in
float32 where sequences are short, so that it is never called there.

All compute what the layers compute; `plain_block` is the reference. Where somebody would notice (hooks, adapters,
other types of tensors, transforms, compilation) `is_ordinary` and `is_untouched` say no, and the layers are called one
by one.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.nn.modules.module import _has_any_global_hook

LARGE = 2**17
"""Entries of the features from which a block keeps less and computes more, and its merge makes no concatenation. Of
norms and GELU it would keep six times as many: 3 MiB."""

ROOM = 2.0
"""An attention of products keeps its weights, L for each token and head. Large blocks have room for so many times D:
they keep 10 D else, and stock modules 17 D."""

LOW_ROOM = 6.0
"""The same in bfloat16."""

# What `scaled_dot_product_attention` calls on a CPU. A release of torch may rename it; then blocks call their layers.
_attend: Any = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)
_attend_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_attend_backward = _attend and getattr(_attend_backward, "default", None)
_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_gelu_ = torch.ops.aten.gelu_.default
_gelu_backward_ = torch.ops.aten.gelu_backward.grad_input
_softmax_backward = torch.ops.aten._softmax_backward_data.default


class Numbers(NamedTuple):
    """What a block has besides weights."""

    heads: int
    eps1: float
    """ε of the norm before the attention."""
    eps2: float
    tau1: float
    """By this the attention's branch is multiplied before it is added."""
    tau2: float


class FusedBlock(NamedTuple):
    """A block as `fused_blocks` takes it: numbers, and weight and bias of each layer.

    The layers are the merge, if it has one, both norms, queries, keys and values, the attention's output, the MLP's
    expansion and reduction.
    """

    numbers: Numbers
    weights: Sequence[Any]


Factors = tuple[float, float]
"""By these both operands of a merge are multiplied."""


def fused_block(block: FusedBlock, x: Tensor, skip: Tensor | None = None, factors: Factors = (1.0, 1.0)) -> Tensor:
    """x, perhaps merged with a skip, + τ attention(norm(x)), + τ mlp(norm(x)); all (B, L, D)."""
    return _apply([block], x, () if skip is None else (skip,), [factors], is_small(x))[-1]


def fused_blocks(
    blocks: Sequence[FusedBlock], x: Tensor, skips: Sequence[Tensor] = (), factors: Sequence[Factors] = ()
) -> Sequence[Tensor]:
    """The output of each block, one after the other, as one node. With skips each merges one of them first.

    For small features: all blocks are remembered until the last gradient is there.
    """
    return _apply(blocks, x, skips, factors or [(1.0, 1.0)] * len(blocks), True)


def _apply(
    blocks: Sequence[FusedBlock], x: Tensor, skips: Sequence[Tensor], factors: Sequence[Factors], keeps: bool
) -> Sequence[Tensor]:
    numbers, heads, trained = [block.numbers for block in blocks], blocks[0].numbers.heads, torch.is_grad_enabled()
    low = torch.is_autocast_enabled("cpu")
    room = keeps or heads * x.shape[1] <= ROOM * x.shape[2]
    products = _products_are_faster(x, heads) and (room if trained else torch.get_num_threads() > 1)
    way = _Way(x.shape, keeps, products, low, low and _low_products_are_faster(x, heads))
    if low:
        x, skips = x.float(), [skip.float() for skip in skips]
    with without_autocast():
        if not trained:
            return _without_gradients(way, blocks, x, skips, factors)
        weights = [value for block in blocks for value in block.weights]
        return _Blocks.apply(way, numbers, factors, x, *skips, *weights)  # pyright: ignore[reportReturnType]


class _Way(NamedTuple):
    """How blocks are computed."""

    shape: Sequence[int]
    """Of the features: (B, L, D)."""
    keeps: bool
    """Whether the outputs of norms, GELU and concatenations are kept."""
    products: bool
    """Whether an attention in float32 is made of batched products, and not torch's kernel for long sequences."""
    low: bool
    """Whether products are of bfloat16."""
    low_attention: bool
    """Whether those of the attention are, too, but for its scores."""

    @property
    def concatenates(self) -> bool:
        """Whether merges concatenate. A sum of two products would be rounded twice in bfloat16."""
        return self.keeps or self.low


class _Blocks(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, numbers: Sequence[Numbers], factors: Sequence[Factors], x: Tensor, *rest: Any):
        stream, outputs, kept = x.reshape(-1, way.shape[2]), [], []
        skips, weights = _split(rest, len(numbers))
        for i, own in enumerate(numbers):
            skip = skips[i].reshape(-1, way.shape[2]) if skips else None
            stream, needed = _forward(way, own, factors[i], stream, skip, weights[i])
            outputs.append(stream.view(way.shape))
            kept += needed
        ctx.settings = way, numbers, factors
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *rest, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        way, numbers, factors = ctx.settings
        blocks, count = len(numbers), len(ctx.needs_input_grad) - 4
        x, *saved = ctx.saved_tensors
        rest, kept = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # it will be differentiated once more
            given = [i for i in range(blocks) if gradients[i] is not None]
            function = partial(plain_blocks, numbers, factors, given)
            with torch.autocast("cpu", torch.bfloat16, enabled=way.low):
                return None, None, None, *by_autograd(function, [gradients[i] for i in given], x, *rest)
        with without_autocast():
            return None, None, None, *_Blocks._gradients(ctx, way, numbers, factors, gradients, x, rest, kept)

    @staticmethod
    def _gradients(
        ctx: Any,
        way: _Way,
        numbers: Sequence[Numbers],
        factors: Sequence[Factors],
        gradients: Sequence[Tensor | None],
        x: Tensor,
        rest: Sequence[Any],
        kept: Sequence[Any],
    ) -> list[Tensor | None]:
        """Of x, of the skips and of all weights."""
        blocks = len(numbers)
        skips, weights = _split(rest, blocks)
        need_skips, needed = _split(ctx.needs_input_grad[4:], blocks)
        by_skips, by_weights, by_x = [], [], None
        for i in reversed(range(blocks)):
            # The gradient of what this block gives: to the next block, and to whoever took it besides.
            gradient = gradients[i]
            gradient = None if gradient is None else gradient.reshape(-1, way.shape[2])
            if by_x is not None:
                gradient = by_x if gradient is None else gradient + by_x
            if gradient is None:
                by_skips[:0], by_weights[:0] = [None] * bool(skips), [None] * len(weights[i])
                continue
            need = (i > 0 or ctx.needs_input_grad[3], bool(skips) and need_skips[i], *needed[i])
            merges = skips and not way.concatenates
            sources = (x.reshape(gradient.shape), skips[i].reshape(gradient.shape)) if merges else None
            own = kept[KEPT * i : KEPT * (i + 1)]
            by_x, by_skip, *found = _backward(way, numbers[i], factors[i], gradient, sources, weights[i], own, need)
            by_skips[:0] = [None if by_skip is None else by_skip.reshape(way.shape)] if skips else []
            by_weights[:0] = found
        by_x = None if by_x is None else by_x.reshape(way.shape)
        return [by_x, *by_skips, *by_weights]


def _split(values: Sequence[Any], blocks: int) -> tuple[Sequence[Any], list[Sequence[Any]]]:
    """Skips, or whatever is said of them, one for each block or none; and the weights of each block."""
    count = blocks * (len(values) // blocks % 2)  # a block has an even number of weights
    size = (len(values) - count) // blocks
    return values[:count], [values[count + size * i : count + size * (i + 1)] for i in range(blocks)]


KEPT = 14
"""Entries that `_forward` keeps of a block."""


def _forward(
    way: _Way, numbers: Numbers, factors: Factors, x: Tensor, skip: Tensor | None, weights: Sequence[Any]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The output, and what the backward pass needs. All features are matrices (B L, D)."""
    heads, eps1, eps2, tau1, tau2 = numbers
    weights = _as_multiplied(way, weights)
    scale1, shift1, scale2, shift2, qkv_weight, qkv_bias, out, out_bias, expand, expand_bias, reduce, reduce_bias = (
        weights[-12:]
    )
    dim, both = (way.shape[2],), None
    if skip is not None and way.concatenates:
        both = _concatenated(_low(way, x), _low(way, skip), factors)
        x = F.linear(both, weights[0], weights[1]).float()
    elif skip is not None:
        weight = weights[0].t()
        merged = torch.addmm(weights[1], x, weight[: dim[0]], alpha=factors[0])
        x = merged.addmm_(skip, weight[dim[0] :], alpha=factors[1])
    normed1, mean1, deviation1 = torch.native_layer_norm(x, dim, scale1, shift1, eps1)
    normed1 = _low(way, normed1)
    attended, remembered = _attention(way, heads, F.linear(normed1, qkv_weight, qkv_bias))
    middle = _plus(way, x, F.linear(attended, out, out_bias), tau1)
    normed2, mean2, deviation2 = torch.native_layer_norm(middle, dim, scale2, shift2, eps2)
    normed2 = _low(way, normed2)
    hidden = F.linear(normed2, expand, expand_bias)
    active = F.gelu(hidden)
    output = _plus(way, middle, F.linear(active, reduce, reduce_bias), tau2)
    again = (normed1, normed2, active) if way.keeps else (None, None, None)
    return output, (both, x, mean1, deviation1, *remembered, middle, mean2, deviation2, hidden, *again)


def _plus(way: _Way, x: Tensor, branch: Tensor, tau: float) -> Tensor:
    """x + τ branch, in float32."""
    return branch.add_(x) if tau == 1.0 and not way.low else torch.add(x, branch, alpha=tau)


def _low(way: _Way, x: Tensor) -> Tensor:
    """What is multiplied, in the type of products."""
    return x.bfloat16() if way.low else x


def _as_multiplied(way: _Way, weights: Sequence[Any]) -> Sequence[Any]:
    """All weights but those of norms in the type of products."""
    if not way.low:
        return weights
    norms = range(len(weights) - 12, len(weights) - 8)
    return [each if each is None or i in norms else each.bfloat16() for i, each in enumerate(weights)]


def _without_gradients(
    way: _Way, blocks: Sequence[FusedBlock], x: Tensor, skips: Sequence[Tensor], factors: Sequence[Factors]
) -> list[Tensor]:
    """The outputs of blocks, of which nothing is kept: the next operation finds freed memory in the cache."""
    dim, outputs, x = (way.shape[2],), [], x.reshape(-1, way.shape[2])
    for i, ((heads, eps1, eps2, tau1, tau2), weights) in enumerate(blocks):
        weights = _as_multiplied(way, weights)
        scale1, shift1, scale2, shift2, qkv, qkv_bias, out, out_bias, expand, expand_bias, reduce, reduce_bias = (
            weights[-12:]
        )
        if skips:
            operands = _low(way, x), _low(way, skips[i].reshape(-1, *dim))
            x = merge_features(*operands, factors[i], *weights[:2], concatenate=way.concatenates).float()
        values = F.linear(_low(way, torch.native_layer_norm(x, dim, scale1, shift1, eps1)[0]), qkv, qkv_bias)
        x = _plus(way, x, F.linear(_attention(way, heads, values)[0], out, out_bias), tau1)
        values = F.linear(_low(way, torch.native_layer_norm(x, dim, scale2, shift2, eps2)[0]), expand, expand_bias)
        x = _plus(way, x, F.linear(_gelu_(values), reduce, reduce_bias), tau2)
        outputs.append(x.view(way.shape))
    return outputs


def _backward(
    way: _Way,
    numbers: Numbers,
    factors: Factors,
    gradient: Tensor,
    sources: tuple[Tensor, Tensor] | None,
    weights: Sequence[Any],
    kept: Sequence[Any],
    need: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, of the skip and of the weights. `sources` are x and the skip, if there was a merge and their
    concatenation was not kept."""
    heads, eps1, eps2, tau1, tau2 = numbers
    weights = _as_multiplied(way, weights)
    scale1, shift1, scale2, shift2, qkv_weight, _, out, _, expand, _, reduce, _ = weights[-12:]
    both, x, mean1, deviation1, *remembered, middle, mean2, deviation2, hidden, normed1, normed2, active = kept
    dim = (way.shape[2],)
    need_norm1, need_norm2, *needs = need[-12:-10], need[-10:-8], *need[-8:]

    # The MLP
    by_branch = _low(way, _times(gradient, tau2))
    active = F.gelu(hidden) if active is None else active
    by_reduce = torch.mm(by_branch.t(), active) if needs[6] else None
    by_reduce_bias = by_branch.sum(0) if needs[7] else None
    del active
    by_hidden = torch.mm(by_branch, reduce)
    _gelu_backward_(by_hidden, hidden, grad_input=by_hidden)
    if normed2 is None:
        normed2 = _low(way, torch.native_layer_norm(middle, dim, scale2, shift2, eps2)[0])
    by_expand = torch.mm(by_hidden.t(), normed2) if needs[4] else None
    by_expand_bias = by_hidden.sum(0) if needs[5] else None
    del normed2
    by_middle, by_scale2, by_shift2 = _norm_backward(
        torch.mm(by_hidden, expand).float(), middle, dim, mean2, deviation2, scale2, shift2, (True, *need_norm2)
    )
    by_middle.add_(gradient)
    del by_hidden

    # The attention
    by_branch = _low(way, _times(by_middle, tau1))
    by_out = torch.mm(by_branch.t(), _attended(way, remembered)) if needs[2] else None
    by_out_bias = by_branch.sum(0) if needs[3] else None
    by_qkv = _attention_backward(way, heads, torch.mm(by_branch, out), remembered)
    if normed1 is None:
        normed1 = _low(way, torch.native_layer_norm(x, dim, scale1, shift1, eps1)[0])
    by_qkv_weight = torch.mm(by_qkv.t(), normed1) if needs[0] else None
    by_qkv_bias = by_qkv.sum(0) if needs[1] else None
    del normed1
    by_x, by_scale1, by_shift1 = _norm_backward(
        torch.mm(by_qkv, qkv_weight).float(), x, dim, mean1, deviation1, scale1, shift1, (True, *need_norm1)
    )
    by_x.add_(by_middle)
    found = [by_scale1, by_shift1, by_scale2, by_shift2, by_qkv_weight, by_qkv_bias, by_out, by_out_bias]
    found += [by_expand, by_expand_bias, by_reduce, by_reduce_bias]
    if way.low:
        found = [None if each is None else each.float() for each in found]

    # The merge
    if len(weights) == 12:
        return [by_x, None, *found]
    need_x, need_skip, need_weight, need_bias = need[:4]
    by_bias = by_x.sum(0) if need_bias else None
    if sources is None:
        by_x = _low(way, by_x)
        by_weight = torch.mm(by_x.t(), both).float() if need_weight else None
        by_main, by_skip = torch.mm(by_x, weights[0]).float().split(dim[0], dim=1)
        return [_times(by_main, factors[0]), _times(by_skip, factors[1]), by_weight, by_bias, *found]
    by_weight = None
    if need_weight:
        by_weight, transposed = torch.empty_like(weights[0]), by_x.t()
        for source, factor, part in zip(sources, factors, by_weight.split(dim[0], dim=1), strict=True):
            torch.mm(transposed, source, out=part)
            _times_(part, factor)
    parts = weights[0].split(dim[0], dim=1)
    by_main = _times_(torch.mm(by_x, parts[0]), factors[0]) if need_x else None
    by_skip = _times_(torch.mm(by_x, parts[1]), factors[1]) if need_skip else None
    return [by_main, by_skip, by_weight, by_bias, *found]


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _times_(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x.mul_(factor)


def _concatenated(main: Tensor, skip: Tensor, factors: Factors) -> Tensor:
    return torch.cat((_times(main, factors[0]), _times(skip, factors[1])), 1)


# Attention, from (B L, 3 D) to (B L, D). torch's kernel goes through the images and heads one by one, in tiles that are
# made for long sequences. Many short ones are faster as batched products, most of all on several cores.


def _low_products_are_faster(x: Tensor, heads: int) -> bool:
    """In bfloat16 products of short sequences are slow, and weights of long ones would take too much memory."""
    _, length, dim = x.shape
    return length >= 48 and heads * length <= LOW_ROOM * dim


def _products_are_faster(x: Tensor, heads: int) -> bool:
    """By the size alone (`scalelong bench network`). With one head torch's kernel needs no copies, and is faster."""
    batch, length, _ = x.shape
    return heads > 1 and batch * heads >= 16 and length <= 128 and batch * heads * length**2 <= 2**20


def _attention(way: _Way, heads: int, qkv: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What is attended to, and what the backward pass needs."""
    batch, length, dim = way.shape
    qkv = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    if way.low and not way.low_attention:
        qkv = qkv.float()
    if not (way.products or way.low_attention):
        attended, logs = _attend(*qkv.unbind(0))
        return _low(way, attended.transpose(1, 2).reshape(-1, dim)), (qkv, attended, logs)
    # softmax(Q K^T / √d) V
    qkv = qkv.reshape(3, batch * heads, length, -1)
    q, k, v = qkv.unbind(0)
    if way.low_attention:  # rounded to bfloat16, large scores would be alike
        q, k = q.float(), k.float()
    shares = q.new_empty(batch * heads, length, length)
    torch.baddbmm(shares, q, k.transpose(1, 2), beta=0, alpha=q.shape[2] ** -0.5, out=shares)
    shares = torch.softmax(shares, -1).to(v.dtype)
    attended = torch.bmm(shares, v).view(batch, heads, length, -1).transpose(1, 2).reshape(-1, dim)
    attended = _low(way, attended)
    return attended, (qkv, attended, shares)


def _attended(way: _Way, remembered: Sequence[Tensor]) -> Tensor:
    attended = remembered[1]
    if way.products or way.low_attention:
        return attended
    return _low(way, attended.transpose(1, 2).reshape(-1, way.shape[2]))


def _attention_backward(way: _Way, heads: int, gradient: Tensor, remembered: Sequence[Tensor]) -> Tensor:
    batch, length, dim = way.shape
    qkv, attended, shares = remembered
    q, k, v = qkv.unbind(0)
    gradient = gradient.to(qkv.dtype).view(batch, length, heads, -1).transpose(1, 2)
    if not (way.products or way.low_attention):
        parts = _attend_backward(gradient, q, k, v, attended, shares, 0.0, False)
        return torch.cat([_low(way, part.transpose(1, 2).reshape(-1, dim)) for part in parts], dim=1)
    gradient, scale = gradient.reshape(v.shape), q.shape[2] ** -0.5
    found = torch.empty_like(qkv)
    by_q, by_k, by_v = found.unbind(0)
    torch.bmm(shares.transpose(1, 2), gradient, out=by_v)
    by_scores = _softmax_backward(torch.bmm(gradient, v.transpose(1, 2)), shares, -1, shares.dtype)
    torch.baddbmm(by_q, by_scores, k, beta=0, alpha=scale, out=by_q)
    torch.baddbmm(by_k, by_scores.transpose(1, 2), q, beta=0, alpha=scale, out=by_k)
    return _low(way, found.view(3, batch, heads, length, -1).permute(1, 3, 0, 2, 4).reshape(-1, 3 * dim))


# The same by torch's own layers


def plain_blocks(
    numbers: Sequence[Numbers], factors: Sequence[Factors], wanted: Sequence[int], x: Tensor, *rest: Any
) -> list[Tensor]:
    """What `fused_blocks` computes: the outputs of some blocks."""
    outputs, (skips, weights) = [], _split(rest, len(numbers))
    for i, own in enumerate(numbers):
        x = plain_block(own, factors[i], x, skips[i] if skips else None, *weights[i])
        outputs.append(x)
    return [outputs[i] for i in wanted]


def plain_block(numbers: Numbers, factors: Factors, x: Tensor, skip: Tensor | None, *weights: Any) -> Tensor:
    heads, eps1, eps2, tau1, tau2 = numbers
    scale1, shift1, scale2, shift2, qkv_weight, qkv_bias, out, out_bias, expand, expand_bias, reduce, reduce_bias = (
        weights[-12:]
    )
    dim = x.shape[-1]
    if skip is not None:
        both = torch.cat([x * factors[0], skip * factors[1]], dim=-1)
        x = F.linear(both, *weights[:2]).float()
    normed = F.layer_norm(x, (dim,), scale1, shift1, eps1)
    q, k, v = F.linear(normed, qkv_weight, qkv_bias).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    # By products and a softmax: the fused attention cannot be differentiated twice.
    attended = torch.softmax(q @ k.transpose(-2, -1) * (dim // heads) ** -0.5, dim=-1) @ v
    x = x + tau1 * F.linear(attended.transpose(1, 2).flatten(2), out, out_bias)
    normed = F.layer_norm(x, (dim,), scale2, shift2, eps2)
    return x + tau2 * F.linear(F.gelu(F.linear(normed, expand, expand_bias)), reduce, reduce_bias)


def merge_features(
    main: Tensor, skip: Tensor, factors: Factors, weight: Tensor, bias: Tensor, *, concatenate: bool
) -> Tensor:
    """W [f_main main ⊕ f_skip skip] + b for matrices (B L, D) each.

    For large features by two products, which take the factors along: the concatenation is never made. For small ones
    the second product would cost more than it saves.
    """
    dim = main.shape[1]
    if concatenate:
        return F.linear(_concatenated(main, skip, factors), weight, bias)
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
    return x.dtype is torch.float32 and not torch.is_autocast_enabled("cpu") and _is_for_itself(x)


def is_fusible(x: Tensor) -> bool:
    """Whether blocks may be fused: ordinary features, or such under autocast to bfloat16."""
    if not torch.is_autocast_enabled("cpu"):
        return is_ordinary(x)
    return torch.get_autocast_dtype("cpu") is torch.bfloat16 and x.dtype in _MIXED and _is_for_itself(x)


_MIXED = (torch.float32, torch.bfloat16)


def without_autocast() -> Any:
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def gain_of_bfloat16(size: int = 512, tries: int = 5) -> float:
    """How many times as fast this machine multiplies matrices of bfloat16 as of float32, measured now.

    Processors with instructions for it (AVX512-BF16, AMX) are about twice as fast or more, others much slower.
    """

    def seconds(dtype: torch.dtype) -> float:
        a, found = torch.ones(size, size, dtype=dtype), []
        for _ in range(tries):
            start = time.perf_counter()
            torch.mm(a, a)
            found.append(time.perf_counter() - start)
        return min(found)

    with torch.no_grad(), without_autocast():
        return seconds(torch.float32) / seconds(torch.bfloat16)


def _is_for_itself(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.numel() > 0
        and _attend_backward is not None
        and torch._C._get_flash_sdp_enabled()  # a user may have chosen another attention
        and not torch.compiler.is_compiling()
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


def by_autograd(function: Any, gradient: Tensor | Sequence[Any], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradient from the plain layers, so that it can be differentiated once more."""
    # Another tensor for each input: one that is given twice has two gradients here.
    inputs = tuple(value.view_as(value) if value is not None and value.requires_grad else value for value in inputs)
    wanted = [value for value in inputs if value is not None and value.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs), wanted, gradient, create_graph=True, allow_unused=True))
    return tuple(next(found) if value is not None and value.requires_grad else None for value in inputs)
