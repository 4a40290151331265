"""diffusers' residual blocks, trained on a CPU in float32: what they compute, with less kept for the backward pass.

    y = x + conv(dropout(silu(norm(h)))),  h = conv(silu(norm(x))) + W time

Autograd keeps what each layer needs: up to eight tensors of the size of x. Here norm, SiLU, dropout and convolution are
one node, which keeps its input and a mask of one byte per entry, and computes the rest again. That takes less time than
is saved elsewhere: diffusers lays the features out anew before the convolution of the shortcut, and divides by 1.

Random numbers are those of the layers. Where somebody would notice, and without gradients, the layers are called one by
one.
"""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

from .cpu import by_autograd, is_ordinary, is_untouched
from .dropout import PackedDropout, draw_kept
from .winograd import WinogradConv2d, convolve, convolve_backward, is_three_by_three

_silu_backward_ = torch.ops.aten.silu_backward.grad_input
_norm_backward = torch.ops.aten.native_group_norm_backward.default


def keep_less_(model: nn.Module) -> None:
    """Let residual blocks and attention of diffusers' UNets keep less, where they are trained on a CPU."""
    for module in model.modules():
        # By name, because diffusers takes seconds to import.
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if kind == "diffusers.models.resnet.ResnetBlock2D":
            module.__class__ = _lean_class(type(module))
        elif kind == "diffusers.models.attention_processor.Attention" and type(module.group_norm) is nn.GroupNorm:
            module.group_norm.__class__ = PixelGroupNorm


class PixelGroupNorm(nn.GroupNorm):
    """nn.GroupNorm that leaves features (B, C, L) as they lie in memory, while it is trained.

    Those of attention lie channels last. torch's norm of three dimensions lays them out anew, and so does each of the
    three layers behind it: four copies that are kept.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        trained = self.training and torch.is_grad_enabled() and is_ordinary(input)
        if trained and input.dim() == 3 and input.mT.is_contiguous():
            return super().forward(input.unsqueeze(2)).squeeze(2)
        return super().forward(input)


class LeanBlock(nn.Module):
    """What comes before diffusers' class among the bases of a block that keeps less."""

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not _is_plain(self, input_tensor):
            return super().forward(input_tensor, temb, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return _residual_block(self, input_tensor, temb)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the name of diffusers' class: a class that is made when it is needed cannot be found by its own.
        _, _, *state = super().__reduce_ex__(protocol)
        bases = type(self).__mro__
        return _new_block, (bases[bases.index(LeanBlock) + 1],), *state


@cache
def _lean_class(kind: type[nn.Module]) -> Any:
    return type(kind.__name__, (LeanBlock, kind), {"__doc__": kind.__doc__})


def _new_block(kind: type[nn.Module]) -> nn.Module:
    lean = _lean_class(kind)
    return lean.__new__(lean)


def _residual_block(block: Any, x: Tensor, time: Tensor | None) -> Tensor:
    hidden, dropout = _normed_convolution(x, block.norm1, block.conv1), block.dropout
    if block.time_emb_proj is not None and time is not None:
        time = time if block.skip_time_act else F.silu(time)
        hidden.add_(block.time_emb_proj(time)[:, :, None, None])
    kept = draw_kept(hidden, dropout.p) if dropout.training and dropout.p > 0 else None
    branch = _normed_convolution(hidden, block.norm2, block.conv2, dropout.p, kept)
    if block.conv_shortcut is not None:  # 1x1: a product of matrices, whose rows are pixels
        layer = block.conv_shortcut
        x = F.linear(x.permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias).permute(0, 3, 1, 2)
    output = branch.add_(x)
    return output if block.output_scale_factor == 1.0 else output / block.output_scale_factor


def _is_plain(block: Any, x: Tensor) -> bool:
    """Whether it is trained with these layers, and nobody would notice that they are not called."""
    if not (block.training and torch.is_grad_enabled() and is_ordinary(x) and _is_channels_last(x)):
        return False
    if block.upsample is not None or block.downsample is not None or block.time_embedding_norm != "default":
        return False
    parts = [block.nonlinearity, block.norm1, block.norm2, block.conv1, block.conv2]
    kinds: list[type[nn.Module]] = [nn.SiLU, nn.GroupNorm, nn.GroupNorm]
    kinds += [WinogradConv2d if isinstance(layer, WinogradConv2d) else nn.Conv2d for layer in parts[3:]]
    # torch's own dropout draws its numbers in another way.
    packed = isinstance(block.dropout, PackedDropout) and block.dropout.p < 1
    parts, kinds = [*parts, block.dropout], [*kinds, PackedDropout if packed else nn.Dropout]
    if block.conv_shortcut is not None:
        parts, kinds = [*parts, block.conv_shortcut], [*kinds, nn.Conv2d]
    return (
        is_untouched(parts, kinds)
        and (packed or block.dropout.p == 0)
        and is_three_by_three(block.conv1)
        and is_three_by_three(block.conv2)
        and (block.conv_shortcut is None or _is_one_by_one(block.conv_shortcut))
    )


def _is_one_by_one(layer: nn.Conv2d) -> bool:
    return (layer.kernel_size, layer.stride, layer.padding, layer.groups) == ((1, 1), (1, 1), (0, 0), 1)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


# Norm, SiLU, dropout and convolution as one node

Numbers = tuple[int, float, float]
"""Groups and ε of the norm, and the probability of the dropout."""


def _normed_convolution(
    x: Tensor, norm: nn.GroupNorm, convolution: nn.Conv2d, p: float = 0.0, kept: Tensor | None = None
) -> Tensor:
    numbers = (norm.num_groups, norm.eps, p)
    return _NormedConvolution.apply(  # pyright: ignore[reportReturnType]
        numbers, x, kept, norm.weight, norm.bias, convolution.weight, convolution.bias
    )


def plain_normed_convolution(
    numbers: Numbers, x: Tensor, kept: Tensor | None, scale: Any, shift: Any, weight: Tensor, bias: Any
) -> Tensor:
    """What `_NormedConvolution` computes, by torch's own layers."""
    groups, eps, p = numbers
    activated = F.silu(F.group_norm(x, groups, scale, shift, eps))
    if kept is not None:
        activated = activated * _factors(kept, p)
    return F.conv2d(activated, weight, bias, padding=1)


class _NormedConvolution(Function):
    @staticmethod
    def forward(
        ctx: Any, numbers: Numbers, x: Tensor, kept: Tensor | None, scale: Any, shift: Any, weight: Tensor, bias: Any
    ):
        normed, mean, deviation = _group_norm(numbers, x, scale, shift)
        activated = F.silu(normed, inplace=True)
        if kept is not None:
            activated.mul_(_factors(kept, numbers[2]))
        ctx.numbers = numbers
        ctx.save_for_backward(x, kept, scale, shift, weight, bias, mean, deviation)
        return convolve(activated, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, kept, scale, shift, weight, bias, mean, deviation = ctx.saved_tensors
        numbers, need = ctx.numbers, ctx.needs_input_grad
        if torch.is_grad_enabled():  # it will be differentiated once more
            function = partial(plain_normed_convolution, numbers)
            return None, *by_autograd(function, gradient, x, kept, scale, shift, weight, bias)
        normed = _group_norm(numbers, x, scale, shift)[0]
        activated = F.silu(normed)
        if kept is not None:
            activated.mul_(_factors(kept, numbers[2]))
        by_activated, by_weight, by_bias = convolve_backward(gradient, activated, weight, bias, (True, *need[5:7]))
        assert by_activated is not None
        del activated
        if kept is not None:
            by_activated.mul_(_factors(kept, numbers[2]))
        _silu_backward_(by_activated, normed, grad_input=by_activated)
        batch, channels, height, width = x.shape
        by_x, by_scale, by_shift = _norm_backward(
            by_activated, x, mean, deviation, scale, batch, channels, height * width, numbers[0], [need[1], *need[3:5]]
        )
        return None, by_x, None, by_scale, by_shift, by_weight, by_bias


def _group_norm(numbers: Numbers, x: Tensor, scale: Any, shift: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, height, width = x.shape
    return torch.native_group_norm(x, scale, shift, batch, channels, height * width, numbers[0], numbers[1])


def _factors(kept: Tensor, p: float) -> Tensor:
    """For each entry, 0 where it is dropped and 1 / (1 - p) where it is kept."""
    return kept.float().div_(1 - p)
