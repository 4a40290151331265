"""Dropout that draws fewer random numbers, for training on a CPU.

torch draws one number there for each entry, one after the other. Here one number decides about four entries.
"""

import torch
from torch import Tensor, nn

BITS = 16
"""For each entry: a probability is rounded to a multiple of 1 / 65536."""


class PackedDropout(nn.Dropout):
    """nn.Dropout, but on a CPU with other random numbers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if not (self.training and 0 < self.p < 1 and _is_ordinary(input)):
            return super().forward(input)
        factors = draw_kept(input, self.p).to(input.dtype).div_(1 - self.p)
        return input.mul_(factors) if self.inplace else input * factors


def draw_kept(x: Tensor, p: float) -> Tensor:
    """For each entry of x, False with probability p; laid out in memory as x is."""
    count, levels = x.numel(), 2**BITS
    numbers = torch.empty(-(-count * BITS // 64), dtype=torch.int64).random_(-(2**63), None)
    kept = numbers.view(torch.int16)[:count] >= round(p * levels) - levels // 2
    return kept.as_strided(x.shape, x.stride())


def pack_dropout_(model: nn.Module) -> None:
    """Exchange the dropouts of a network."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, PackedDropout(child.p, child.inplace).train(child.training))


def _is_ordinary(x: Tensor) -> bool:
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    return type(x) is Tensor and x.device.type == "cpu" and dense and not torch.compiler.is_compiling()
