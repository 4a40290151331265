"""U-ViT's blocks on a CPU, each as one node of autograd: less memory in float32, twice the speed in bfloat16.

    fuse_(model)      # blocks of a U-ViT on a CPU become fused ones; any other model stays as it is
    unfuse_(model)    # the ordinary blocks again

Weights, their names and their objects stay the same, so optimisers, averages and checkpoints do not notice.

- Large features in float32: outputs of norms and GELU are computed again from their inputs, which are kept anyway, and
  merges make no concatenation. So a block keeps a third less.
- Under `torch.autocast("cpu", torch.bfloat16)`: products are of bfloat16; the stream between them, norms and the scores
  of the attention stay in float32. torch's attention takes several times as long backward in bfloat16 as in float32
  where sequences are short, so that it is never called there.

Small features in float32 take the ordinary layers: there fusing gains nothing. The layers themselves are called where a
block has hooks or adapters inside, and for other types of tensors, transforms and compilation. A gradient of a gradient
needs the ordinary blocks, as most of torch's own attention does.
"""

import ctypes
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function, once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from ..scaling import UNSCALED, Constants, ResidualBranch
from .uvit import MLP, Attention, Block, SkipMerge, UViT

logger = logging.getLogger(__name__)

LARGE = 2**17
"""Entries of the features from which a block in float32 is fused."""

LOW_SPACE = 6.0
"""An attention of products keeps its weights, L for each token and head. So many times D may be kept."""

# Names of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST = 2**31 - 1

# What `scaled_dot_product_attention` calls on a CPU. A release of torch may rename it; then blocks call their layers.
_attend: Any = getattr(torch, "_scaled_dot_product_flash_attention_for_cpu", None)
_attend_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_attend_backward = _attend and getattr(_attend_backward, "default", None)
_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_gelu_backward_ = torch.ops.aten.gelu_backward.grad_input
_softmax_backward = torch.ops.aten._softmax_backward_data.default


# Networks with fused blocks

Model = TypeVar("Model", bound=nn.Module)


def fuse_(model: Model) -> Model:
    """Make the blocks of a U-ViT on a CPU fused ones, and return the model. `unfuse_` restores them.

    Left as they are: other networks and subclasses, other devices and types, and networks with gradient checkpointing.
    """
    if (
        type(model) is not UViT
        or model.checkpointing
        or any(value.device.type != "cpu" or value.dtype is not torch.float32 for value in model.parameters())
    ):
        return model
    for module in model.modules():
        if type(module) is Block:
            module.__class__ = FusedBlock
    logger.debug("the blocks of a U-ViT of depth %d are fused", model.depth)
    return model


def unfuse_(model: Model) -> Model:
    """Undo `fuse_`; other models stay as they are."""
    for module in model.modules():
        if type(module) is FusedBlock:
            module.__class__ = Block  # type: ignore[assignment]
    return model


@contextmanager
def fused(model: nn.Module) -> Iterator[nn.Module]:
    """The model with fused blocks; afterwards it is as it was."""
    before = any(type(module) is FusedBlock for module in model.modules())
    try:
        yield fuse_(model)
    finally:
        if not before:
            unfuse_(model)


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
                return fused_block(*parts, x, skip, factors)
            assert self.merge is not None
            x = self.merge(x, skip, factors, gate)
        parts = parts_of(self)
        return super().forward(x) if parts is None else fused_block(*parts, x)


FusedBlock.__name__ = Block.__name__  # as it is printed


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


_KINDS: tuple[type[nn.Module], ...] = (Attention, MLP, *2 * (ResidualBranch,), *2 * (nn.LayerNorm,), *4 * (nn.Linear,))
"""The types of a block's parts, in the order in which `parts_of` asks for them."""


def parts_of(block: Block, merges: bool = False) -> tuple[Numbers, Weights] | None:
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
        if merge is None or not is_untouched((merge,), (SkipMerge,)) or any(merge._modules.values()):
            return None
        merge_weights = (merge._parameters["weight"], merge._parameters["bias"])
    numbers = Numbers(attention.heads, norms[0].eps, norms[1].eps, residuals[0].tau, residuals[1].tau)
    weights = Weights(*merge_weights, *(layer._parameters[name] for layer in layers for name in ("weight", "bias")))
    # Autocast goes with weights of any type, fused blocks with those that it is made for.
    if torch.is_autocast_enabled("cpu") and any(v is not None and v.dtype is not torch.float32 for v in weights):
        return None
    return numbers, weights


# A block as a node of autograd

Factors = tuple[float, float]
"""By these both operands of a merge are multiplied."""


class _Way(NamedTuple):
    """How a block is computed."""

    shape: Sequence[int]
    """(B, L, D)."""
    numbers: Numbers
    factors: Factors
    low: bool
    """Products are of bfloat16."""
    products: bool
    """The attention is batched products, but for its scores in bfloat16; else torch's kernel."""


def fused_block(
    numbers: Numbers, weights: Weights, x: Tensor, skip: Tensor | None = None, factors: Factors = (1.0, 1.0)
) -> Tensor:
    """x, perhaps merged with a skip, + τ attention(norm(x)), + τ mlp(norm(x)); all (B, L, D)."""
    low = torch.is_autocast_enabled("cpu")
    products = low and _low_products_are_faster(x, numbers.heads)
    way = _Way(x.shape, numbers, factors, low, products)
    if low:
        x, skip = x.float(), None if skip is None else skip.float()
    with without_autocast():
        if torch.is_grad_enabled():
            output: Any = _Block.apply(way, x, skip, *weights)
        else:
            output = _forward(way, x, skip, weights)[0]
        # Made a view here and not inside of the node: so it can be changed in place.
        return output.view(way.shape)


class _Kept(NamedTuple):
    """What the backward pass of a block needs, besides its inputs. Matrices are (B L, D)."""

    both: Tensor | None
    """The concatenation of a merge in bfloat16."""
    x: Tensor
    """What comes out of the merge."""
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


class _Block(Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, x: Tensor, skip: Tensor | None, *weights: Any):
        output, kept = _forward(way, x, skip, Weights(*weights))
        ctx.way = way
        ctx.save_for_backward(x, skip, *weights, *kept)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        count = 2 + len(Weights._fields)
        inputs, kept = ctx.saved_tensors[:count], _Kept(*ctx.saved_tensors[count:])
        with without_autocast():
            return None, *_backward(ctx.way, gradient, inputs, kept, ctx.needs_input_grad[1:])


def _forward(way: _Way, x: Tensor, skip: Tensor | None, weights: Weights) -> tuple[Tensor, _Kept]:
    """The output as a matrix (B L, D), and what the backward pass needs."""
    _, eps1, eps2, tau1, tau2 = way.numbers
    w, dim, both = _as_multiplied(way, weights), (way.shape[2],), None
    x = x.reshape(-1, *dim)
    if skip is not None and way.low:  # a sum of two products would be rounded twice
        both = torch.cat((_low(way, x * way.factors[0]), _low(way, skip.reshape(x.shape) * way.factors[1])), 1)
        x = F.linear(both, w.merge, w.merge_bias).float()
    elif skip is not None:
        weight = w.merge.t()
        merged = torch.addmm(w.merge_bias, x, weight[: dim[0]], alpha=way.factors[0])
        x = merged.addmm_(skip.reshape(x.shape), weight[dim[0] :], alpha=way.factors[1])
    normed, mean1, deviation1 = torch.native_layer_norm(x, dim, w.scale1, w.shift1, eps1)
    attended, remembered = _attention(way, F.linear(_low(way, normed), w.qkv, w.qkv_bias))
    middle = _plus(way, x, F.linear(attended, w.out, w.out_bias), tau1)
    normed, mean2, deviation2 = torch.native_layer_norm(middle, dim, w.scale2, w.shift2, eps2)
    hidden = F.linear(_low(way, normed), w.expand, w.expand_bias)
    output = _plus(way, middle, F.linear(F.gelu(hidden), w.reduce, w.reduce_bias), tau2)
    return output, _Kept(both, x, mean1, deviation1, *remembered, middle, mean2, deviation2, hidden)


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


def _backward(
    way: _Way, gradient: Tensor, inputs: Sequence[Any], kept: _Kept, needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x, of the skip and of the weights."""
    _, eps1, eps2, tau1, tau2 = way.numbers
    w, need, dim = _as_multiplied(way, Weights(*inputs[2:])), Weights(*needs[2:]), (way.shape[2],)

    # The MLP
    by_branch = _low(way, _times(gradient, tau2))
    by_reduce = torch.mm(by_branch.t(), F.gelu(kept.hidden)) if need.reduce else None
    by_reduce_bias = by_branch.sum(0) if need.reduce_bias else None
    by_hidden = torch.mm(by_branch, w.reduce)
    _gelu_backward_(by_hidden, kept.hidden, grad_input=by_hidden)
    by_expand = None
    if need.expand:
        normed = torch.native_layer_norm(kept.middle, dim, w.scale2, w.shift2, eps2)[0]
        by_expand = torch.mm(by_hidden.t(), _low(way, normed))
    by_expand_bias = by_hidden.sum(0) if need.expand_bias else None
    by_normed, statistics = torch.mm(by_hidden, w.expand).float(), (kept.mean2, kept.deviation2)
    wanted = (True, need.scale2, need.shift2)
    by_middle, by_scale2, by_shift2 = _norm_backward(
        by_normed, kept.middle, dim, *statistics, w.scale2, w.shift2, wanted
    )
    by_middle.add_(gradient)
    del by_hidden, by_normed

    # The attention
    by_branch = _low(way, _times(by_middle, tau1))
    by_out = torch.mm(by_branch.t(), _attended(way, kept.attended)) if need.out else None
    by_out_bias = by_branch.sum(0) if need.out_bias else None
    by_qkv = _attention_backward(way, torch.mm(by_branch, w.out), kept)
    by_qkv_weight = None
    if need.qkv:
        normed = torch.native_layer_norm(kept.x, dim, w.scale1, w.shift1, eps1)[0]
        by_qkv_weight = torch.mm(by_qkv.t(), _low(way, normed))
    by_qkv_bias = by_qkv.sum(0) if need.qkv_bias else None
    by_normed, statistics = torch.mm(by_qkv, w.qkv).float(), (kept.mean1, kept.deviation1)
    wanted = (True, need.scale1, need.shift1)
    by_x, by_scale1, by_shift1 = _norm_backward(by_normed, kept.x, dim, *statistics, w.scale1, w.shift1, wanted)
    by_x.add_(by_middle)
    found = [by_scale1, by_shift1, by_scale2, by_shift2, by_qkv_weight, by_qkv_bias, by_out, by_out_bias]
    found += [by_expand, by_expand_bias, by_reduce, by_reduce_bias]
    by_merge = _merge_backward(way, by_x, inputs, kept.both, w.merge, need)
    return [None if each is None else each.float() for each in (*by_merge, *found)]


def _merge_backward(
    way: _Way, gradient: Tensor, inputs: Sequence[Any], both: Tensor | None, weight: Tensor | None, need: Weights
) -> list[Tensor | None]:
    """The gradients of x, of the skip, and of the merge's weight and bias."""
    if weight is None:
        return [gradient.view(way.shape), None, None, None]
    by_bias, by_weight, dim = gradient.sum(0) if need.merge_bias else None, None, way.shape[2]
    gradient = _low(way, gradient)
    if both is not None:
        by_weight = torch.mm(gradient.t(), both) if need.merge else None
    elif need.merge:
        by_weight = torch.empty_like(weight)
        for source, factor, part in zip(inputs, way.factors, by_weight.split(dim, dim=1), strict=False):
            torch.mm(gradient.t(), source.reshape(gradient.shape), out=part)
            part.mul_(factor)
    operands = [
        _times(torch.mm(gradient, part), factor).view(way.shape)
        for part, factor in zip(weight.split(dim, dim=1), way.factors, strict=True)
    ]
    return [*operands, by_weight, by_bias]


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


# Attention, from (B L, 3 D) to (B L, D). torch's kernel is slow in bfloat16: it is called in float32, or there are
# batched products instead.


def _low_products_are_faster(x: Tensor, heads: int) -> bool:
    """In bfloat16 products of short sequences are slow, and weights of long ones would take too much memory."""
    _, length, dim = x.shape
    return length >= 48 and heads * length <= LOW_SPACE * dim


def _attention(way: _Way, qkv: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What is attended to, and what the backward pass needs."""
    (batch, length, dim), heads = way.shape, way.numbers.heads
    qkv = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    if not way.products:
        qkv = qkv.float()
        attended, logs = _attend(*qkv.unbind(0))
        return _low(way, attended.transpose(1, 2).reshape(-1, dim)), (qkv, attended, logs)
    # softmax(Q K^T / √d) V
    qkv = qkv.reshape(3, batch * heads, length, -1)
    q, k, v = qkv.unbind(0)
    scores = torch.bmm(q.float() * q.shape[2] ** -0.5, k.float().mT)  # rounded to bfloat16, large ones would be alike
    shares = torch.softmax(scores, -1).to(v.dtype)
    attended = torch.bmm(shares, v).view(batch, heads, length, -1).transpose(1, 2).reshape(-1, dim)
    return attended, (qkv, attended, shares)


def _attended(way: _Way, attended: Tensor) -> Tensor:
    return attended if way.products else _low(way, attended.transpose(1, 2).reshape(-1, way.shape[2]))


def _attention_backward(way: _Way, gradient: Tensor, kept: _Kept) -> Tensor:
    (batch, length, dim), heads = way.shape, way.numbers.heads
    q, k, v = kept.qkv.unbind(0)
    gradient = gradient.to(kept.qkv.dtype).view(batch, length, heads, -1).transpose(1, 2)
    if not way.products:
        parts = _attend_backward(gradient, q, k, v, kept.attended, kept.shares, 0.0, False)
        return torch.cat([_low(way, part.transpose(1, 2).reshape(-1, dim)) for part in parts], dim=1)
    gradient, scale = gradient.reshape(v.shape), q.shape[2] ** -0.5
    by_shares = torch.bmm(gradient, v.mT)
    by_scores = _softmax_backward(by_shares, kept.shares, -1, by_shares.dtype) * scale
    found = torch.stack([torch.bmm(by_scores, k), torch.bmm(by_scores.mT, q), torch.bmm(kept.shares.mT, gradient)])
    return found.view(3, batch, heads, length, -1).permute(1, 3, 0, 2, 4).reshape(-1, 3 * dim)


# Where fused blocks apply


def is_fusible(x: Tensor) -> bool:
    """Large features of float32, or any under autocast to bfloat16; on a CPU, not compiled, transformed or watched."""
    if torch.is_autocast_enabled("cpu"):
        mixed = torch.get_autocast_dtype("cpu") is torch.bfloat16
        return mixed and x.dtype in (torch.float32, torch.bfloat16) and _is_eager(x)
    # The size is not asked while a network is compiled or exported: that would fix it.
    return x.dtype is torch.float32 and _is_eager(x) and x.numel() >= LARGE


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


def keep_freed_memory() -> bool:
    """For loops on a CPU: keep what a step frees for the next one; False where the C library is not glibc.

    Call it once, before the first step; it holds for the whole process. `scalelong train` does so itself. A step
    allocates the same large tensors again and again. By default, glibc takes each from the system and gives it back:
    the system must clear every page, and each time one thread gives memory back, the others wait.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, LARGEST))


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
