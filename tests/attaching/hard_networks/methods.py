"""Kind 6, methods that need more than a factor: gates, norms, both operands."""

import math

import einops
import torch
import torch.nn.functional as F
from torch import nn

from .base import Blocks, C, Net, Pyramid, UpBlock, WidePyramid

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class MagnitudeAliased(Pyramid):
    """The sum in place, seen through another name."""

    kind = "6"
    judge = "magnitude"

    def join(self, i, h, skip):
        if self.k.ms is not None:
            return self.k.main(i, h) + self.k(i, skip)
        total = h
        total += skip
        return h


class MagnitudeOfASum(Pyramid):
    kind = "6"
    judge = "magnitude"

    def join(self, i, h, skip):
        return sum([self.k.main(i, h), self.k(i, skip)])


class MagnitudeInPlaceByName(Pyramid):
    kind = "6"
    judge = "magnitude"

    def join(self, i, h, skip):
        return torch.Tensor.add_(self.k.main(i, h), self.k(i, skip))


class MagnitudeInALoop(Pyramid):
    kind = "6"
    judge = "magnitude"
    must = True

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(self.k(i, skips.pop()) + self.k.main(i, up(h))))
        return self.head(h)


class GatesSequenceFirst(Net):
    """(L, B, C) with recurrent layers."""

    kind = "6"
    judge = "gates"
    N = 2
    axis = -1

    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleList(nn.GRU(5 if n == 0 else 8, 8) for n in range(2))
        self.dec = nn.ModuleList(nn.GRU(16, 8) for _ in range(2))
        self.mid, self.head = nn.GRU(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        x, skips = x.transpose(0, 1), []
        for enc in self.enc:
            x = enc(x)[0]
            skips.append(x)
        x = self.mid(x)[0]
        for dec in self.dec:
            i = len(skips)
            x = dec(torch.cat([x, self.k(i, skips.pop())], -1))[0]
        return self.head(x).transpose(0, 1)

    @staticmethod
    def inputs():
        return (torch.randn(3, 7, 5),)


class NormSequenceFirst(GatesSequenceFirst):
    judge = "norm"


class NormLastAxisOfImages(Pyramid):
    """Channels last, (B, H, W, C), joined by an addition."""

    kind = "6"
    judge = "norm"
    axis = -1

    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(C, C) for _ in range(4))
        self.ends = nn.ModuleList([nn.Linear(3, C), nn.Linear(C, 3)])
        self.small = nn.ModuleList(nn.Linear(4 * C, C) for _ in range(2))
        self.large = nn.ModuleList(nn.Linear(C, 4 * C) for _ in range(2))

    N = 2

    def forward(self, x):
        h, skips = self.ends[0](x.movedim(1, -1)), []
        for n in range(2):
            h = F.silu(self.lin[n](h))
            skips.append(h)
            h = self.small[n](einops.rearrange(h, "b (h y) (w x) c -> b h w (y x c)", y=2, x=2))
        for n in range(2):
            h = einops.rearrange(self.large[n](h), "b h w (y x c) -> b (h y) (w x) c", y=2, x=2)
            h = F.silu(self.lin[2 + n](h + self.k(2 - n, skips[1 - n])))
        return self.ends[1](h).movedim(-1, 1)


class GatesOnCroppedSkips(WidePyramid):
    """The original U-Net: what is cropped away does not count."""

    kind = "6"
    judge = "gates"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h, skip = len(skips), up(h)[:, :, 1:-1, 1:-1], skips.pop()
            edge = (skip.shape[-1] - h.shape[-1]) // 2
            skip = skip[:, :, edge : edge + h.shape[-1], edge : edge + h.shape[-1]]
            h = F.silu(dec(torch.cat([h, self.k(i, skip)], 1)))
        return self.head(h)

    @staticmethod
    def inputs():
        return (torch.randn(3, 3, 32, 32),)


class CroppingBlock(UpBlock):
    """The skip comes whole, and is cropped inside."""

    def forward(self, h, skip, i):
        h = self.up(h)[:, :, 1:-1, 1:-1]
        edge = (skip.shape[-1] - h.shape[-1]) // 2
        skip = skip[:, :, edge : edge + h.shape[-1], edge : edge + h.shape[-1]]
        return F.silu(self.conv(h + self.k(i, skip)))


class GatesWithCroppingBlocks(Blocks):
    kind = "6"
    judge = "gates"
    block = CroppingBlock

    @staticmethod
    def inputs():
        return (torch.randn(3, 3, 32, 32),)


class WeighingBlock(UpBlock):
    """The block weighs the skip itself, before it joins."""

    def forward(self, h, skip, i):
        return F.silu(self.conv(0.8 * self.up(h) + self.k(i, 0.6 * skip)))


class GatesWithWeighingBlocks(Blocks):
    kind = "6"
    judge = "gates"
    block = WeighingBlock

    @staticmethod
    def inputs():
        return (torch.randn(3, 3, 16, 16),)


class NormWithWeighingBlocks(Blocks):
    kind = "6"
    judge = "norm"
    block = WeighingBlock


class NormOnResizedSkips(WidePyramid):
    """The skip is resized to the main path before it is joined."""

    kind = "6"
    judge = "norm"

    def join(self, i, h, skip):
        return torch.cat([h, self.k(i, F.interpolate(skip, scale_factor=0.5).repeat(1, 1, 2, 2))], 1)


class NormBehindAFactor(WidePyramid):
    """The network weighs its operands, as EDM2 does. A method that looks at the data sees the weighted skip."""

    kind = "6"
    judge = "norm"

    def join(self, i, h, skip):
        return torch.cat([math.sqrt(1.5) * h, self.k(i, math.sqrt(0.5) * skip + 0.1)], 1)


class GatesBehindAFactor(NormBehindAFactor):
    judge = "gates"

    @staticmethod
    def inputs():
        return (torch.randn(3, 3, 16, 16),)


class GatesUnbatched(WidePyramid):
    """(C, H, W): a single image, as layers of torch allow."""

    kind = "6"
    judge = "unbatched"

    def join(self, i, h, skip):
        return torch.cat([h, self.k(i, skip)], -3)


class NormUnbatched(GatesUnbatched):
    judge = "norm"
    axis = -3

    @staticmethod
    def inputs():
        return (torch.randn(3, 16, 16),)


class GatesFromMeta(WidePyramid):
    """Built on the meta device, scaled, made real with to_empty, loaded."""

    kind = "6"
    judge = "meta"


class AddedGatesFromMeta(Pyramid):
    kind = "6"
    judge = "meta"


class GatesOnBlocks(Blocks):
    kind = "6"
    judge = "gates"
    must = True

    @staticmethod
    def inputs():
        return (torch.randn(3, 3, 16, 16),)
