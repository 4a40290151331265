"""U-ViT on a CPU, in float32 or mixed precision: the operations of its layers, with fewer calls around them.

    fuse_(model)      # blocks of a U-ViT on a CPU become fused ones; any other model stays as it is
    unfuse_(model)    # the ordinary blocks again

Weights, their names and their objects stay the same, so optimisers, averages and checkpoints do not notice.

In a small network most of a step is not arithmetic: modules call modules, and autograd makes a node for every operation
and every view. Fused blocks call the operations themselves, on matrices, and are one node of autograd, whose backward
pass is written out below: for one block, or for a row of them. There are two sizes.

- Small blocks keep whatever the backward pass needs, and a whole row of them is one node.
- Large blocks are nodes of their own, so that each is forgotten as soon as its gradient is there, and keep less: the
  outputs of norms and GELU are computed again from their inputs, which are kept anyway. So a block keeps a third less.

Under `torch.autocast("cpu", torch.bfloat16)` products are of bfloat16, and the stream between them, norms and the
scores of the attention stay in float32. torch's attention takes several times as long backward in bfloat16 as in
float32 where sequences are short, so that it is never called there.

All compute what the layers compute; `plain_block` is the reference. The layers themselves are called where a block has
hooks or adapters inside, and for other types of tensors, transforms and compilation.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.nn.modules.module import _has_any_global_hook

from ..scaling import UNSCALED, Constants, ResidualBranch
from .uvit import MLP, Attention, Block, SkipMerge, UViT

logger = logging.getLogger(__name__)

LARGE = 2**17
"""Entries of the features from which a block keeps less and computes more, and its merge makes no concatenation."""

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


# Networks with fused blocks

Model = TypeVar("Model", bound=nn.Module)


def fuse_(model: Model) -> Model:
    """Make the blocks of a U-ViT on a CPU fused ones, and return the model. `unfuse_` restores them.

    Left as they are: other networks and subclasses, other devices and types, and networks with gradient checkpointing.
    """
    parameters = list(model.parameters())
    if (
        type(model) is not UViT
        or model.checkpointing
        or any(value.device.type != "cpu" or value.dtype is not torch.float32 for value in parameters)
    ):
        return model
    for module in model.modules():
        if type(module) in _FUSED:
            module.__class__ = _FUSED[type(module)]
    logger.debug("the blocks of a U-ViT of depth %d are fused", model.depth)
    return model


def unfuse_(model: Model) -> Model:
    """Undo `fuse_`; other models stay as they are."""
    for module in model.modules():
        if type(module) in _PLAIN:
            module.__class__ = _PLAIN[type(module)]
    return model


@contextmanager
def fused(model: nn.Module) -> Iterator[nn.Module]:
    """The model with fused blocks; afterwards it is as it was."""
    before = type(model)
    try:
        yield fuse_(model)
    finally:
        if before is UViT:
            unfuse_(model)


class FusedUViT(UViT):
    """A U-ViT that calls small blocks in rows, and cuts patches by a product while it is trained."""

    def _blocks(self, x: Tensor) -> Tensor:
        if not (is_small(x) and is_fusible(x)) or (self.checkpointing and torch.is_grad_enabled()):
            return super()._blocks(x)
        blocks = [*self.encoder, self.middle]
        row = fused_row(blocks)
        if row is not None:
            *skips, x = fused_blocks(row, x)
        else:
            skips = []
            for block in blocks:
                x = block(x)
                skips.append(x)
            skips.pop()
        scaling, merges = self.skip_scaling, range(len(skips), 0, -1)
        row = None if any(map(scaling.scales_main, merges)) else fused_row(self.decoder, merges=True)
        if row is not None:
            scaled = [scaling.prepare(self._merge(index).norm_skip(skips.pop()), index) for index in merges]
            gated = [(skip if gate is None else skip * gate, factors) for skip, factors, gate in scaled]
            return fused_blocks(row, x, *zip(*gated, strict=True))[-1]
        for position, block in enumerate(self.decoder):
            x = block(*self._operands(x, skips.pop(), len(self.decoder) - position))
        return x

    def _patches(self, x: Tensor) -> Tensor:
        # If the kernel is as large as its step, the convolution is a product. The gradient of that takes less time.
        layer, size = self.patch_embedding, (self.patch_size, self.patch_size)
        if not (
            torch.is_grad_enabled()
            and is_ordinary(x)
            and is_untouched((layer,), (nn.Conv2d,))
            and layer.kernel_size == layer.stride == size
            and (layer.padding, layer.dilation, layer.groups) == ((0, 0), (1, 1), 1)
        ):
            return super()._patches(x)
        return F.linear(cut_patches(x, self.patch_size), layer.weight.flatten(1), layer.bias)


class FusedBlock(Block):
    """A block as one node of autograd, with its merge if that has no gate."""

    def forward(
        self, x: Tensor, skip: Tensor | None = None, factors: Constants = UNSCALED, gate: Tensor | None = None
    ) -> Tensor:
        # A subclass (FSDP2 makes one) may look at what goes in and comes out.
        if type(self) is not FusedBlock or not is_fusible(x):
            return super().forward(x, skip, factors, gate)
        if skip is not None:
            parts = parts_of(self, merges=True) if gate is None else None
            if parts is not None:
                return fused_block(parts, x, skip, factors)
            assert self.merge is not None
            x = self.merge(x, skip, factors, gate)
        parts = parts_of(self)
        return super().forward(x) if parts is None else fused_block(parts, x)


class FusedMerge(SkipMerge):
    """A merge that concatenates small features, and keeps no second copy of a skip that a gate multiplies."""

    def forward(self, main: Tensor, skip: Tensor, factors: Constants, gate: Tensor | None = None) -> Tensor:
        weight = self.weight
        if self.main_norm is not None:
            main = self.main_norm(main).to(main.dtype)
        if gate is not None and is_small(skip):
            skip, gate = skip * gate.to(skip.dtype), None
        if gate is not None and gate.dim() == 0:
            main_weight, skip_weight = weight.split(self.dim, dim=1)
            weight, gate = torch.cat([main_weight, skip_weight * gate], dim=1), None
        if gate is not None and torch.is_grad_enabled() and is_ordinary(skip) and type(weight) is nn.Parameter:
            main_weight, skip_weight = weight.split(self.dim, dim=1)
            merged = F.linear(main * factors.main if factors.main != 1.0 else main, main_weight, self.bias)
            return gated_addition(merged, skip, gate * factors.skip if factors.skip != 1.0 else gate, skip_weight)
        if gate is not None:
            skip = skip * gate.to(skip.dtype)
        operands = main.flatten(0, 1), skip.flatten(0, 1)
        merged = merge_features(*operands, factors, weight, self.bias, concatenate=is_small(main))
        return merged.view_as(main)


_FUSED: dict[type[nn.Module], type[nn.Module]] = {UViT: FusedUViT, Block: FusedBlock, SkipMerge: FusedMerge}
_PLAIN = {fused: plain for plain, fused in _FUSED.items()}
for _fused, _plain in _PLAIN.items():
    _fused.__name__ = _plain.__name__  # as it is printed, and written into config.json


class Numbers(NamedTuple):
    """What a block has besides weights."""

    heads: int
    eps1: float
    """ε of the norm before the attention."""
    eps2: float
    tau1: float
    """The factor of the attention's branch."""
    tau2: float


class Weights(NamedTuple):
    """The weights of a block. Without a merge, its two are None; other biases may be None, too."""

    merge: Any
    merge_bias: Any
    scale1: Any
    shift1: Any
    scale2: Any
    shift2: Any
    qkv: Any
    qkv_bias: Any
    out: Any
    out_bias: Any
    expand: Any
    expand_bias: Any
    reduce: Any
    reduce_bias: Any


class BlockParts(NamedTuple):
    """A block as `fused_blocks` takes it."""

    numbers: Numbers
    weights: Weights


_KINDS: tuple[type[nn.Module], ...] = (Attention, MLP, *2 * (ResidualBranch,), *2 * (nn.LayerNorm,), *4 * (nn.Linear,))
"""The types of a block's parts, in the order in which `parts_of` asks for them."""


def parts_of(block: Block, merges: bool = False) -> BlockParts | None:
    """The parts of a block, with its merge or without; None if a part has hooks or was exchanged.

    This is asked at every call. So parts are taken from their dictionaries: `nn.Module.__getattr__` is slow.
    """
    parts: dict[str, Any] = block._modules
    attention, mlp = parts["attention"], parts["mlp"]
    norms = (parts["attention_norm"], parts["mlp_norm"])
    residuals = (parts["attention_residual"], parts["mlp_residual"])
    layers = (*norms, *attention._modules.values(), *mlp._modules.values())
    if not is_untouched((attention, mlp, *residuals, *layers), _KINDS) or any(each._parameters for each in residuals):
        return None
    merge_weights = (None, None)
    if merges:
        merge = parts.get("merge")
        if merge is None or not is_untouched((merge,), (FusedMerge,)) or merge._modules:
            return None
        merge_weights = (merge._parameters["weight"], merge._parameters["bias"])
    numbers = Numbers(attention.heads, norms[0].eps, norms[1].eps, residuals[0].tau, residuals[1].tau)
    weights = Weights(*merge_weights, *(layer._parameters[name] for layer in layers for name in ("weight", "bias")))
    # Autocast goes with weights of any type, fused blocks with those that it is made for.
    if torch.is_autocast_enabled("cpu") and any(v is not None and v.dtype is not torch.float32 for v in weights):
        return None
    return BlockParts(numbers, weights)


def fused_row(blocks: Iterable[nn.Module], merges: bool = False) -> list[BlockParts] | None:
    """Blocks for one call of `fused_blocks`; None if one of them has hooks or was exchanged."""
    row, trained = [], torch.is_grad_enabled()
    for block in blocks:
        parts = parts_of(block, merges) if is_untouched((block,), (FusedBlock,)) else None  # pyright: ignore
        # Where weights are frozen, autograd may stop early, which a row does not.
        if parts is None or (trained and not all(v is None or v.requires_grad for v in parts.weights)):
            return None
        row.append(parts)
    return row


def cut_patches(x: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) to (B, rows·columns, C·p·p): a row of a convolution's weights for each patch."""
    batch, channels, height, width = x.shape
    rows, columns = height // patch_size, width // patch_size
    cut = x.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)


# One or several blocks as a node of autograd

Factors = tuple[float, float]
"""By these both operands of a merge are multiplied."""


def fused_block(block: BlockParts, x: Tensor, skip: Tensor | None = None, factors: Factors = (1.0, 1.0)) -> Tensor:
    """x, perhaps merged with a skip, + τ attention(norm(x)), + τ mlp(norm(x)); all (B, L, D)."""
    return _apply([block], x, () if skip is None else (skip,), [factors], is_small(x))[-1]


def fused_blocks(
    blocks: Sequence[BlockParts], x: Tensor, skips: Sequence[Tensor] = (), factors: Sequence[Factors] = ()
) -> Sequence[Tensor]:
    """The output of each block, one after the other, as one node. With skips each merges one of them first.

    For small features: all blocks are remembered until the last gradient is there.
    """
    return _apply(blocks, x, skips, factors or [(1.0, 1.0)] * len(blocks), True)


def _apply(
    blocks: Sequence[BlockParts], x: Tensor, skips: Sequence[Tensor], factors: Sequence[Factors], keeps: bool
) -> Sequence[Tensor]:
    numbers, heads, trained = [block.numbers for block in blocks], blocks[0].numbers.heads, torch.is_grad_enabled()
    low, attention = torch.is_autocast_enabled("cpu"), "kernel"
    room = keeps or heads * x.shape[1] <= ROOM * x.shape[2]
    if low and _low_products_are_faster(x, heads):
        attention = "low products"
    elif _products_are_faster(x, heads) and (room if trained else torch.get_num_threads() > 1):
        attention = "products"
    way = _Way(x.shape, keeps, low, attention)
    if low:
        x, skips = x.float(), [skip.float() for skip in skips]
    with without_autocast():
        if not trained:
            return _without_gradients(way, blocks, x, skips, factors)
        weights = [value for block in blocks for value in block.weights]
        outputs: Any = _Blocks.apply(_Row(way, numbers, factors, bool(skips)), x, *skips, *weights)
        # Made a view here and not inside of the node: so it can be changed in place.
        return [output.view(way.shape) for output in outputs]


class _Way(NamedTuple):
    """How blocks are computed."""

    shape: Sequence[int]
    """(B, L, D)."""
    keeps: bool
    """The outputs of norms, GELU and concatenations are kept."""
    low: bool
    """Products are of bfloat16."""
    attention: Literal["kernel", "products", "low products"]
    """torch's kernel for long sequences, batched products in float32, or those in bfloat16 but for the scores."""

    @property
    def concatenates(self) -> bool:
        """Merges concatenate. A sum of two products would be rounded twice in bfloat16."""
        return self.keeps or self.low


class _Row(NamedTuple):
    """What a node knows about its blocks besides tensors."""

    way: _Way
    numbers: Sequence[Numbers]
    factors: Sequence[Factors]
    merges: bool

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Any], list[Weights]]:
        """The skips, or what belongs to them, one for each block or none; and the weights of each block."""
        size, blocks = len(Weights._fields), len(self.numbers)
        count = blocks if self.merges else 0
        return values[:count], [Weights(*values[count + size * i : count + size * (i + 1)]) for i in range(blocks)]


class _Kept(NamedTuple):
    """What the backward pass of a block needs. Matrices are (B L, D)."""

    both: Tensor | None
    """The concatenation of a merge."""
    x: Tensor
    mean1: Tensor
    deviation1: Tensor
    qkv: Tensor
    attended: Tensor
    shares: Tensor
    """The weights of the attention, or their logarithms' sums."""
    middle: Tensor
    """The stream between attention and MLP."""
    mean2: Tensor
    deviation2: Tensor
    hidden: Tensor
    normed1: Tensor | None
    normed2: Tensor | None
    active: Tensor | None


class _Blocks(Function):
    @staticmethod
    def forward(ctx: Any, row: _Row, x: Tensor, *rest: Any):
        dim = row.way.shape[2]
        stream, outputs, kept = x.reshape(-1, dim), [], []
        skips, weights = row.split(rest)
        for i, numbers in enumerate(row.numbers):
            skip = skips[i].reshape(-1, dim) if skips else None
            stream, needed = _forward(row.way, numbers, row.factors[i], stream, skip, weights[i])
            outputs.append(stream)
            kept += needed
        ctx.row = row
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *rest, *kept)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        row: _Row = ctx.row
        count = len(ctx.needs_input_grad) - 2
        x, *saved = ctx.saved_tensors
        rest, kept = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # it will be differentiated once more
            given = [i for i, gradient in enumerate(gradients) if gradient is not None]
            function = partial(plain_blocks, row, given)
            with torch.autocast("cpu", torch.bfloat16, enabled=row.way.low):
                return None, *by_autograd(function, [gradients[i] for i in given], x, *rest)
        with without_autocast():
            return None, *_gradients(row, gradients, x, rest, kept, ctx.needs_input_grad[1:])


def _gradients(
    row: _Row,
    gradients: Sequence[Tensor | None],
    x: Tensor,
    rest: Sequence[Any],
    kept: Sequence[Any],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of x, of the skips and of all weights."""
    way, size = row.way, len(_Kept._fields)
    skips, weights = row.split(rest)
    need_skips, need_weights = row.split(needs[1:])
    by_skips, by_weights, by_x = [], [], None
    for i in reversed(range(len(row.numbers))):
        # The gradient of what this block gives: to the next block, and to a skip.
        gradient = gradients[i]
        if by_x is not None:
            gradient = by_x if gradient is None else gradient + by_x
        if gradient is None:
            by_skips[:0], by_weights[:0] = [None] * row.merges, [None] * len(weights[i])
            continue
        need = (i > 0 or needs[0], row.merges and need_skips[i])
        separate = row.merges and not way.concatenates
        sources = (x.reshape(gradient.shape), skips[i].reshape(gradient.shape)) if separate else None
        own = _Kept(*kept[size * i : size * (i + 1)])
        by_x, by_skip, *found = _backward(
            way, row.numbers[i], row.factors[i], gradient, sources, weights[i], own, need, need_weights[i]
        )
        by_skips[:0] = [None if by_skip is None else by_skip.reshape(way.shape)] if row.merges else []
        by_weights[:0] = found
    by_x = None if by_x is None else by_x.reshape(way.shape)
    return [by_x, *by_skips, *by_weights]


def _forward(
    way: _Way, numbers: Numbers, factors: Factors, x: Tensor, skip: Tensor | None, weights: Weights
) -> tuple[Tensor, _Kept]:
    """The output, and what the backward pass needs. All features are matrices (B L, D)."""
    heads, eps1, eps2, tau1, tau2 = numbers
    w = _as_multiplied(way, weights)
    dim, both = (way.shape[2],), None
    if skip is not None and way.concatenates:
        both = _concatenated(_low(way, x), _low(way, skip), factors)
        x = F.linear(both, w.merge, w.merge_bias).float()
    elif skip is not None:
        weight = w.merge.t()
        merged = torch.addmm(w.merge_bias, x, weight[: dim[0]], alpha=factors[0])
        x = merged.addmm_(skip, weight[dim[0] :], alpha=factors[1])
    normed1, mean1, deviation1 = torch.native_layer_norm(x, dim, w.scale1, w.shift1, eps1)
    normed1 = _low(way, normed1)
    attended, remembered = _attention(way, heads, F.linear(normed1, w.qkv, w.qkv_bias))
    middle = _plus(way, x, F.linear(attended, w.out, w.out_bias), tau1)
    normed2, mean2, deviation2 = torch.native_layer_norm(middle, dim, w.scale2, w.shift2, eps2)
    normed2 = _low(way, normed2)
    hidden = F.linear(normed2, w.expand, w.expand_bias)
    active = F.gelu(hidden)
    output = _plus(way, middle, F.linear(active, w.reduce, w.reduce_bias), tau2)
    again = (normed1, normed2, active) if way.keeps else (None, None, None)
    return output, _Kept(both, x, mean1, deviation1, *remembered, middle, mean2, deviation2, hidden, *again)


def _plus(way: _Way, x: Tensor, branch: Tensor, tau: float) -> Tensor:
    """x + τ branch, in float32."""
    return branch.add_(x) if tau == 1.0 and not way.low else torch.add(x, branch, alpha=tau)


def _low(way: _Way, x: Tensor) -> Tensor:
    """What is multiplied, in the type of products."""
    return x.bfloat16() if way.low else x


def _as_multiplied(way: _Way, weights: Weights) -> Weights:
    """All weights but those of norms in the type of products."""
    if not way.low:
        return weights
    norms = ("scale1", "shift1", "scale2", "shift2")
    pairs = zip(Weights._fields, weights, strict=True)
    return Weights(*(each if each is None or name in norms else each.bfloat16() for name, each in pairs))


def _without_gradients(
    way: _Way, blocks: Sequence[BlockParts], x: Tensor, skips: Sequence[Tensor], factors: Sequence[Factors]
) -> list[Tensor]:
    """The outputs of blocks, of which nothing is kept: the next operation finds freed memory in the cache."""
    dim, outputs, x = (way.shape[2],), [], x.reshape(-1, way.shape[2])
    for i, ((heads, eps1, eps2, tau1, tau2), weights) in enumerate(blocks):
        w = _as_multiplied(way, weights)
        if skips:
            operands = _low(way, x), _low(way, skips[i].reshape(-1, *dim))
            x = merge_features(*operands, factors[i], w.merge, w.merge_bias, concatenate=way.concatenates).float()
        values = F.linear(_low(way, torch.native_layer_norm(x, dim, w.scale1, w.shift1, eps1)[0]), w.qkv, w.qkv_bias)
        x = _plus(way, x, F.linear(_attention(way, heads, values)[0], w.out, w.out_bias), tau1)
        normed = _low(way, torch.native_layer_norm(x, dim, w.scale2, w.shift2, eps2)[0])
        values = F.linear(normed, w.expand, w.expand_bias)
        x = _plus(way, x, F.linear(_gelu_(values), w.reduce, w.reduce_bias), tau2)
        outputs.append(x.view(way.shape))
    return outputs


def _backward(
    way: _Way,
    numbers: Numbers,
    factors: Factors,
    gradient: Tensor,
    sources: tuple[Tensor, Tensor] | None,
    weights: Weights,
    kept: _Kept,
    need_operands: tuple[bool, bool],
    need: Weights,
) -> list[Tensor | None]:
    """The gradients of x, of the skip and of the weights. `sources` are x and the skip, if there was a merge and their
    concatenation was not kept."""
    heads, eps1, eps2, tau1, tau2 = numbers
    w = _as_multiplied(way, weights)
    both, x, mean1, deviation1, *remembered, middle, mean2, deviation2, hidden, normed1, normed2, active = kept
    dim = (way.shape[2],)

    # The MLP
    by_branch = _low(way, _times(gradient, tau2))
    active = F.gelu(hidden) if active is None else active
    by_reduce = torch.mm(by_branch.t(), active) if need.reduce else None
    by_reduce_bias = by_branch.sum(0) if need.reduce_bias else None
    del active
    by_hidden = torch.mm(by_branch, w.reduce)
    _gelu_backward_(by_hidden, hidden, grad_input=by_hidden)
    if normed2 is None:
        normed2 = _low(way, torch.native_layer_norm(middle, dim, w.scale2, w.shift2, eps2)[0])
    by_expand = torch.mm(by_hidden.t(), normed2) if need.expand else None
    by_expand_bias = by_hidden.sum(0) if need.expand_bias else None
    del normed2
    by_middle, by_scale2, by_shift2 = _norm_backward(
        torch.mm(by_hidden, w.expand).float(),
        middle,
        dim,
        mean2,
        deviation2,
        w.scale2,
        w.shift2,
        (True, need.scale2, need.shift2),
    )
    by_middle.add_(gradient)
    del by_hidden

    # The attention
    by_branch = _low(way, _times(by_middle, tau1))
    by_out = torch.mm(by_branch.t(), _attended(way, remembered[1])) if need.out else None
    by_out_bias = by_branch.sum(0) if need.out_bias else None
    by_qkv = _attention_backward(way, heads, torch.mm(by_branch, w.out), remembered)
    if normed1 is None:
        normed1 = _low(way, torch.native_layer_norm(x, dim, w.scale1, w.shift1, eps1)[0])
    by_qkv_weight = torch.mm(by_qkv.t(), normed1) if need.qkv else None
    by_qkv_bias = by_qkv.sum(0) if need.qkv_bias else None
    del normed1
    by_x, by_scale1, by_shift1 = _norm_backward(
        torch.mm(by_qkv, w.qkv).float(), x, dim, mean1, deviation1, w.scale1, w.shift1, (True, need.scale1, need.shift1)
    )
    by_x.add_(by_middle)
    found = [by_scale1, by_shift1, by_scale2, by_shift2, by_qkv_weight, by_qkv_bias, by_out, by_out_bias]
    found += [by_expand, by_expand_bias, by_reduce, by_reduce_bias]
    if way.low:
        found = [None if each is None else each.float() for each in found]

    # The merge
    if w.merge is None:
        return [by_x, None, None, None, *found]
    by_bias = by_x.sum(0) if need.merge_bias else None
    if sources is None:
        by_x = _low(way, by_x)
        assert both is not None
        by_weight = torch.mm(by_x.t(), both).float() if need.merge else None
        by_main, by_skip = torch.mm(by_x, w.merge).float().split(dim[0], dim=1)
        return [_times(by_main, factors[0]), _times(by_skip, factors[1]), by_weight, by_bias, *found]
    by_weight = None
    if need.merge:
        by_weight, transposed = torch.empty_like(w.merge), by_x.t()
        for source, factor, part in zip(sources, factors, by_weight.split(dim[0], dim=1), strict=True):
            torch.mm(transposed, source, out=part)
            _times_(part, factor)
    parts = w.merge.split(dim[0], dim=1)
    by_main = _times_(torch.mm(by_x, parts[0]), factors[0]) if need_operands[0] else None
    by_skip = _times_(torch.mm(by_x, parts[1]), factors[1]) if need_operands[1] else None
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
    """By the size alone (`scalelong lab bench network`). With one head torch's kernel is faster."""
    batch, length, _ = x.shape
    return heads > 1 and batch * heads >= 16 and length <= 128 and batch * heads * length**2 <= 2**20


def _attention(way: _Way, heads: int, qkv: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What is attended to, and what the backward pass needs."""
    batch, length, dim = way.shape
    qkv = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    if way.low and way.attention != "low products":
        qkv = qkv.float()
    if way.attention == "kernel":
        attended, logs = _attend(*qkv.unbind(0))
        return _low(way, attended.transpose(1, 2).reshape(-1, dim)), (qkv, attended, logs)
    # softmax(Q K^T / √d) V
    qkv = qkv.reshape(3, batch * heads, length, -1)
    q, k, v = qkv.unbind(0)
    if way.attention == "low products":  # rounded to bfloat16, large scores would be alike
        q, k = q.float(), k.float()
    shares = q.new_empty(batch * heads, length, length)
    torch.baddbmm(shares, q, k.transpose(1, 2), beta=0, alpha=q.shape[2] ** -0.5, out=shares)
    shares = torch.softmax(shares, -1).to(v.dtype)
    attended = torch.bmm(shares, v).view(batch, heads, length, -1).transpose(1, 2).reshape(-1, dim)
    attended = _low(way, attended)
    return attended, (qkv, attended, shares)


def _attended(way: _Way, attended: Tensor) -> Tensor:
    if way.attention != "kernel":
        return attended
    return _low(way, attended.transpose(1, 2).reshape(-1, way.shape[2]))


def _attention_backward(way: _Way, heads: int, gradient: Tensor, remembered: Sequence[Tensor]) -> Tensor:
    batch, length, dim = way.shape
    qkv, attended, shares = remembered
    q, k, v = qkv.unbind(0)
    gradient = gradient.to(qkv.dtype).view(batch, length, heads, -1).transpose(1, 2)
    if way.attention == "kernel":
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


def plain_blocks(row: _Row, wanted: Sequence[int], x: Tensor, *rest: Any) -> list[Tensor]:
    """What `fused_blocks` computes: the outputs of some blocks, (B L, D) each."""
    outputs, (skips, weights) = [], row.split(rest)
    for i, numbers in enumerate(row.numbers):
        x = plain_block(numbers, row.factors[i], x, skips[i] if skips else None, weights[i])
        outputs.append(x.flatten(0, 1))
    return [outputs[i] for i in wanted]


def plain_block(numbers: Numbers, factors: Factors, x: Tensor, skip: Tensor | None, w: Weights) -> Tensor:
    heads, eps1, eps2, tau1, tau2 = numbers
    dim = x.shape[-1]
    if skip is not None:
        x = F.linear(torch.cat([x * factors[0], skip * factors[1]], dim=-1), w.merge, w.merge_bias).float()
    normed = F.layer_norm(x, (dim,), w.scale1, w.shift1, eps1)
    q, k, v = F.linear(normed, w.qkv, w.qkv_bias).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    # By products and a softmax: the fused attention cannot be differentiated twice.
    attended = torch.softmax(q @ k.transpose(-2, -1) * (dim // heads) ** -0.5, dim=-1) @ v
    x = x + tau1 * F.linear(attended.transpose(1, 2).flatten(2), w.out, w.out_bias)
    normed = F.layer_norm(x, (dim,), w.scale2, w.shift2, eps2)
    return x + tau2 * F.linear(F.gelu(F.linear(normed, w.expand, w.expand_bias)), w.reduce, w.reduce_bias)


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


# Where fused blocks apply


def is_small(x: Tensor) -> bool:
    """Not while a network is compiled or exported: that would fix the sizes of its inputs."""
    return not torch.compiler.is_compiling() and x.numel() < LARGE


def is_ordinary(x: Tensor) -> bool:
    """Float32 on a CPU, not compiled, transformed, traced or watched."""
    return x.dtype is torch.float32 and not torch.is_autocast_enabled("cpu") and _is_eager(x)


def is_fusible(x: Tensor) -> bool:
    """Ordinary features, or such under autocast to bfloat16."""
    if not torch.is_autocast_enabled("cpu"):
        return is_ordinary(x)
    return torch.get_autocast_dtype("cpu") is torch.bfloat16 and x.dtype in _MIXED and _is_eager(x)


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


def _is_eager(x: Tensor) -> bool:
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
