"""3x3 convolutions with a quarter of the multiplications, for training on a CPU in float32 (Winograd's algorithm).

Direct convolutions are as fast there as the processor can multiply, so that only fewer multiplications help. Lavin and
Gray (2016, arXiv:1509.09308) compute tiles Y of 4x4 outputs from tiles d of 6x6 inputs and a filter g of 3x3:

    Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A

which takes 36 multiplications instead of 144. With many channels ⊙ is a product of matrices for each of the 36 places,
(tiles, inputs) by (inputs, outputs). The transforms are products with small matrices as well: of the entries of a tile,
in one row, with B ⊗ B, G ⊗ G and A ⊗ A.

Rounding errors of outputs are about five times those of a direct convolution, and of the filter's gradient ten times:
1e-5 of the largest value. cuDNN takes the same algorithm. Gradients are the same kind of products: that of the input is
a convolution with the filter turned round, and that of the filter is Gᵀ [Σ (A Y' Aᵀ) ⊙ (Bᵀ d B)] G, the sum over all
tiles.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function

from .cpu import by_autograd, is_ordinary

LEAST_CHANNELS = 128
"""Of inputs and of outputs. With fewer, the transforms take as long as the multiplications that they save."""
LEAST_TILES = 128
"""Of a batch. With fewer, the transform of the filter does."""
TILES_AT_ONCE = 64
"""Images go through in parts of so many tiles for each thread, which bounds the memory that the transforms need."""

_convolution_backward = torch.ops.aten.convolution_backward.default


class WinogradConv2d(nn.Conv2d):
    """nn.Conv2d, but trained on a CPU with fewer multiplications."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002 (torch's name)
        trained = self.training and torch.is_grad_enabled()
        if trained and is_ordinary(input) and pays(input, weight) and is_three_by_three(self):
            return _Convolution.apply(input, weight, bias)  # pyright: ignore[reportReturnType]
        return super()._conv_forward(input, weight, bias)


def multiply_less_(model: nn.Module) -> None:
    """Let the convolutions of a network use Winograd's algorithm, where it pays and they are trained on a CPU."""
    for module in model.modules():
        if type(module) is not nn.Conv2d or not is_three_by_three(module):
            continue
        if min(module.in_channels, module.out_channels) >= LEAST_CHANNELS:
            module.__class__ = WinogradConv2d


def is_three_by_three(layer: nn.Conv2d) -> bool:
    """With outputs of the size of its inputs, and zeros around them."""
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    return sizes == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution of these features, laid out channels last, is faster this way."""
    batch, _, height, width = x.shape if x.dim() == 4 else (0, 0, 1, 1)
    return (
        min(weight.shape[:2]) >= LEAST_CHANNELS
        and height % 4 == width % 4 == 0
        and batch * height * width >= 16 * LEAST_TILES
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.dtype is x.dtype
        and type(weight) in (Tensor, nn.Parameter)
    )


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None):
        ctx.save_for_backward(x, weight, bias)
        return convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # it will be differentiated once more
            return by_autograd(plain_convolution, gradient, x, weight, bias)
        return convolve_backward(gradient, x, weight, bias, ctx.needs_input_grad)


def plain_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution of 3x3, by Winograd's algorithm where that pays. Without gradients of its own."""
    if not pays(x, weight):
        return plain_convolution(x, weight, bias)
    output = _products(x, _filters(weight).transpose(1, 2))
    return output if bias is None else output.add_(bias[:, None, None])


def convolve_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of the weight and of the bias."""
    if not pays(x, weight):
        sizes = None if bias is None else list(bias.shape)
        return _convolution_backward(gradient, x, weight, sizes, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, list(need))
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    by_x = _products(gradient, _filters(weight.flip(2, 3))) if need[0] else None
    by_weight = _filter_gradient(gradient, x) if need[1] else None
    by_bias = gradient.permute(0, 2, 3, 1).flatten(0, 2).sum(0) if need[2] else None
    return by_x, by_weight, by_bias


def _products(x: Tensor, filters: Tensor) -> Tensor:
    """(B, C, H, W) and filters (36, C, O) to (B, O, H, W), both channels last."""
    batch, _, height, width = x.shape
    outputs = filters.shape[2]
    # Not a view of pixels, which autograd would not let others change in place.
    like = {"dtype": x.dtype, "device": x.device, "memory_format": torch.channels_last}
    output = torch.empty(batch, outputs, height, width, **like)
    pixels, transform = output.permute(0, 2, 3, 1), _transforms()[2]
    for part, tiles in _input_tiles(x):
        found = torch.mm(transform, torch.bmm(tiles, filters).flatten(1))
        _in_tiles(pixels[part]).copy_(found.view(4, 4, -1, height // 4, width // 4, outputs))
    return output


def _filter_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    outputs, inputs = gradient.shape[1], x.shape[1]
    _, by_filter, by_output = _transforms()
    total = x.new_zeros(36, outputs, inputs)
    by_pixel = gradient.permute(0, 2, 3, 1)
    for part, tiles in _input_tiles(x):
        found = torch.mm(by_output.t(), _in_tiles(by_pixel[part]).reshape(16, -1)).view(36, -1, outputs)
        total.baddbmm_(found.transpose(1, 2), tiles)
    found = torch.mm(by_filter.t(), total.flatten(1)).view(3, 3, outputs, inputs)
    return found.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)


def _input_tiles(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Bᵀ d B of some images after the other: which ones, and (36, tiles, C)."""
    batch, channels, height, width = x.shape
    down, across = height // 4, width // 4
    transform, images = _transforms()[0], max(1, TILES_AT_ONCE * torch.get_num_threads() // (down * across))
    for start in range(0, batch, images):
        part = slice(start, min(batch, start + images))
        padded = F.pad(x[part].permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
        image, row, pixel, _ = padded.stride()
        tiles = padded.as_strided(
            (6, 6, len(padded), down, across, channels), (row, pixel, image, 4 * row, 4 * pixel, 1)
        )
        yield part, torch.mm(transform, tiles.reshape(36, -1)).view(36, -1, channels)


def _in_tiles(pixels: Tensor) -> Tensor:
    """(B, H, W, C) seen as (4, 4, B, H / 4, W / 4, C)."""
    _, height, width, _ = pixels.shape
    return pixels.unflatten(2, (width // 4, 4)).unflatten(1, (height // 4, 4)).permute(2, 4, 0, 1, 3, 5)


def _filters(weight: Tensor) -> Tensor:
    """G g Gᵀ: (O, C, 3, 3) to (36, O, C)."""
    return torch.mm(_transforms()[1], weight.permute(2, 3, 0, 1).reshape(9, -1)).view(36, *weight.shape[:2])


@cache
def _transforms() -> tuple[Tensor, Tensor, Tensor]:
    """Of input, filter and output, for the rows of a tile behind each other: (36, 36), (36, 9), (16, 36)."""
    inputs = [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
    filters = [[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]
    outputs = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    b, g, a = (torch.tensor(rows, dtype=torch.float64, device="cpu") for rows in (inputs, filters, outputs))
    g = g / 24
    return torch.kron(b, b).float(), torch.kron(g, g).float(), torch.kron(a, a).float()
