"""Other paths than the planned one, and what blocks share or a model keeps."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Pyramid, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class LevelDroppedInTraining(Pyramid):
    """Stochastic depth: a whole level of the decoder, and its skip, is left out at random."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h, skip = len(skips), up(h), skips.pop()
            if self.training and torch.rand(()) < 0.5:
                continue
            h = F.silu(dec(h + self.k(i, skip)))
        return self.head(h)


class AuxiliaryHeads(WidePyramid):
    """In training, heads read the features of the encoder, which are not scaled."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(C, 3, 1) for _ in range(3))

    def forward(self, x):
        h, skips = self.encode(x)
        extra = [head(skip) for head, skip in zip(self.heads, skips, strict=True)] if self.training else []
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return [self.head(h), *extra]


class DepthBySize(WidePyramid):
    """Small images skip the innermost level: one merge fewer, and the first to come is another."""

    def forward(self, x):
        levels = 3 if x.shape[-1] >= 16 else 2
        h, skips = F.silu(self.stem(x)), []
        for down in self.down[:levels]:
            skips.append(h)
            h = F.silu(down(h))
        h = F.silu(self.mid(h))
        for n in range(3 - levels, 3):
            h = F.silu(self.dec[n](torch.cat([self.up[n](h), self.k(3 - n, skips.pop())], 1)))
        return self.head(h)

    @staticmethod
    def others():
        return [(torch.randn(2, 3, 8, 8),)]


class AddedDepthBySize(DepthBySize):
    """The same with additions in one line of a loop."""

    wide = 1

    def forward(self, x):
        levels = 3 if x.shape[-1] >= 16 else 2
        h, skips = F.silu(self.stem(x)), []
        for down in self.down[:levels]:
            skips.append(h)
            h = F.silu(down(h))
        h = F.silu(self.mid(h))
        for n in range(3 - levels, 3):
            h = F.silu(self.dec[n](self.up[n](h) + self.k(3 - n, skips.pop())))
        return self.head(h)


class Tiles(WidePyramid):
    """Large images are cut into two tiles, one after the other."""

    def forward(self, x):
        if x.shape[-1] > 16:
            return torch.cat([self.tile(part) for part in x.chunk(2, -1)], -1)
        return self.tile(x)

    def tile(self, x):
        return super().forward(x)

    @staticmethod
    def others():
        return [(torch.randn(2, 3, 16, 32),)]


class TakingBlock(nn.Module):
    """Takes its skip out of what all blocks share, and leaves something in it."""

    def __init__(self, k):
        super().__init__()
        self.up, self.conv, self.k = nn.ConvTranspose2d(C, C, 2, 2), conv(2 * C, C), k

    def take(self, shared) -> Any:
        return shared.pop()

    def forward(self, h, shared, i):
        return F.silu(self.conv(torch.cat([self.up(h), self.k(i, self.take(shared))], 1)))


class Sharing(Pyramid):
    block: Any = TakingBlock

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList(self.block(self.k) for _ in range(3))

    def pack(self, skips) -> Any:
        return skips

    def forward(self, x):
        h, skips = self.encode(x)
        shared = self.pack(skips)
        for i, dec in zip((3, 2, 1), self.dec, strict=True):
            h = dec(h, shared, i)
        return self.finish(h, shared)

    def finish(self, h, shared) -> Any:
        return self.head(h)


@dataclasses.dataclass
class State:
    h: torch.Tensor
    skips: list[torch.Tensor]


class StateBlock(TakingBlock):
    def forward(self, state):
        i = len(state.skips)
        state.h = F.silu(self.conv(torch.cat([self.up(state.h), self.k(i, state.skips.pop())], 1)))


class StateObject(Sharing):
    """One object goes through all blocks, and they change it."""

    block = StateBlock

    def forward(self, x):
        state = State(*self.encode(x))
        for dec in self.dec:
            dec(state)
        return self.head(state.h)


class Levels(NamedTuple):
    fine: torch.Tensor
    middle: torch.Tensor
    coarse: torch.Tensor


class NamedTaking(TakingBlock):
    def forward(self, h, shared, i):
        assert isinstance(shared, Levels)
        skip = (shared.fine, shared.middle, shared.coarse)[i - 1]
        return F.silu(self.conv(torch.cat([self.up(h), self.k(i, skip)], 1)))


class NamedTupleOfSkips(Sharing):
    block = NamedTaking

    def pack(self, skips):
        return Levels(*skips)
