"""Methods that need more than a factor, and weights that cannot be folded into."""

import math

import einops
import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Net, Pyramid, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class GatesSequenceFirst(Net):
    """(L, B, C) with recurrent layers."""

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


class NormLastAxisOfImages(Pyramid):
    """Channels last, (B, H, W, C), joined by an addition."""

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


class NormBehindAFactor(WidePyramid):
    """The network weighs its operands, as EDM2 does. A method that looks at the data sees the weighted skip."""

    judge = "norm"

    def join(self, i, h, skip):
        return torch.cat([math.sqrt(1.5) * h, self.k(i, math.sqrt(0.5) * skip + 0.1)], 1)


class GatesFromMeta(WidePyramid):
    """Built on the meta device, scaled, made real with to_empty, loaded."""

    judge = "meta"


class Folded(WidePyramid):
    """Every decoder convolution is made by `layer`."""

    judge = "folding"

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList(self.layer() for _ in range(3))

    def layer(self) -> nn.Module:
        return conv(2 * C, C)


class WeightNorm(Folded):
    def layer(self):
        return nn.utils.parametrizations.weight_norm(conv(2 * C, C))


class StandardisedByHook(Folded):
    """A pre-hook writes the weight that the layer uses."""

    def layer(self):
        layer = conv(2 * C, C)
        layer.raw = nn.Parameter(layer.weight.detach().clone())
        del layer.weight
        layer.register_forward_pre_hook(self.standardise)
        self.standardise(layer, ())
        return layer

    @staticmethod
    def standardise(layer, _):
        raw = layer.raw
        layer.weight = (raw - raw.mean((1, 2, 3), keepdim=True)) / (raw.std((1, 2, 3), keepdim=True) + 1e-5)


class TiedWeights(Folded):
    """Two decoder levels share one weight, but not the layer."""

    def __init__(self):
        super().__init__()
        self.dec[1].weight = self.dec[0].weight


class SharedLayer(Folded):
    """One layer at all levels."""

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList([conv(2 * C, C)] * 3)


class WeightReadElsewhere(Folded):
    """The weight is a part of the result, as a penalty."""

    def forward(self, x):
        return super().forward(x), sum(dec.weight.square().mean() for dec in self.dec)


class BehindAPower(Folded):
    """A square between merge and layer: the factor comes out squared."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1).square()))
        return self.head(h)


class FoldedAcrossPadding(Folded):
    """Padding with ones, which do not scale."""

    def layer(self):
        return nn.Conv2d(2 * C, C, 3)

    def join(self, i, h, skip):
        return F.pad(torch.cat([h, self.k(i, skip)], 1), (1, 1, 1, 1), value=1.0)
