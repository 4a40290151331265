"""Kind 4, another path: in training, at another size, with another keyword."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Blocks, C, Pyramid, Tokens, UpBlock, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class LevelDroppedInTraining(Pyramid):
    """Stochastic depth: a whole level of the decoder, and its skip, is left out at random."""

    kind = "4"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h, skip = len(skips), up(h), skips.pop()
            if self.training and torch.rand(()) < 0.5:
                continue
            h = F.silu(dec(h + self.k(i, skip)))
        return self.head(h)


class ConcatOrZeros(WidePyramid):
    """In training, zeros take the place of a skip at random."""

    kind = "4"

    def join(self, i, h, skip):
        if self.training and torch.rand(()) < 0.5:
            return torch.cat([h, torch.zeros_like(skip)], 1)
        return torch.cat([h, self.k(i, skip)], 1)


class AuxiliaryHeads(WidePyramid):
    """In training, heads read the features of the encoder, which are not scaled."""

    kind = "4"

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


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([conv(3, C), conv(C, C, 2), conv(C, C, 2), conv(C, C, 2)])

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(F.silu(layer(features[-1])))
        return features[1:]


class DepthBySize(WidePyramid):
    """Small images skip the innermost level: one merge fewer, and the first to come is another."""

    kind = "4"

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


class WithoutSkipsByKeyword(Pyramid):
    kind = "4"

    def forward(self, x, use_skips=True):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h, skip = len(skips), up(h), skips.pop()
            h = F.silu(dec(h + self.k(i, skip))) if use_skips else F.silu(dec(h + h))
        return self.head(h)

    @staticmethod
    def others():
        return [{"x": torch.randn(2, 3, 16, 16), "use_skips": False}]


class Tiles(WidePyramid):
    """Large images are cut into two tiles, one after the other."""

    kind = "4"

    def forward(self, x):
        if x.shape[-1] > 16:
            return torch.cat([self.tile(part) for part in x.chunk(2, -1)], -1)
        return self.tile(x)

    def tile(self, x):
        return super().forward(x)

    @staticmethod
    def others():
        return [(torch.randn(2, 3, 16, 32),)]


class CachedDepth(Pyramid):
    """DeepCache: given the inner features of another step, only the outermost level runs."""

    kind = "4"

    def forward(self, x, cache=None):
        if cache is None:
            h, skips = self.encode(x)
            for n in range(2):
                h = F.silu(self.dec[n](self.up[n](h) + self.k(3 - n, skips[2 - n])))
        else:
            h, skips = cache, [F.silu(self.stem(x))]
        return self.head(F.silu(self.dec[2](self.up[2](h) + self.k(1, skips[0]))))

    @staticmethod
    def others():
        return [{"x": torch.randn(2, 3, 16, 16), "cache": torch.randn(2, C, 8, 8)}]


class EarlyExit(Tokens):
    """The data decide how deep the network is."""

    kind = "4"
    N = 3

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
            if x.abs().mean() > 5:
                break
        x = self.mid(x)
        while skips:
            i = len(skips)
            x = self.dec[i - 1](self.fuse[i - 1](torch.cat([x, self.k(i, skips.pop())], -1)))
        return self.head(x)

    @staticmethod
    def others():
        return [(100 * torch.randn(2, 12, 5),)]


class BranchByLabel(Blocks):
    """A second decoder for another task, which works like the first."""

    kind = "4"

    def __init__(self):
        super().__init__()
        self.other = nn.ModuleList(UpBlock(self.k) for _ in range(3))

    def forward(self, x, task="first"):
        h, skips = self.encode(x)
        for dec in self.dec if task == "first" else self.other:
            i = len(skips)
            h = dec(h, skips.pop(), i)
        return self.head(h)

    @staticmethod
    def others():
        return [{"x": torch.randn(2, 3, 16, 16), "task": "second"}]
