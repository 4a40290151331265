"""Ways to write a merge."""

import functools
import operator

import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Pyramid, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class AddWithAlpha(Pyramid):
    """The skip is the first operand, and the main path has a weight."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.add(self.k(i, skips.pop()), up(h), alpha=0.5)))
        return self.head(h)


class ThreeTerms(Pyramid):
    """A side branch of the decoder is added in the same expression, between main path and skip."""

    def __init__(self):
        super().__init__()
        self.side = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in range(3))

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(h + self.side[i - 1](h) + self.k(i, skips.pop())))
        return self.head(h)


class Concatenations(WidePyramid):
    """The other names of torch.cat, and the skip first."""

    must = True

    def join(self, i, h, skip):
        concatenate = (torch.concat, torch.hstack, torch.concatenate)[i - 1]
        pair = (self.k(i, skip), h)
        return concatenate(pair) if concatenate is torch.hstack else concatenate(pair, dim=1)


class ThreePartConcat(WidePyramid):
    """Main path, skip, and an embedding as a map."""

    wide = 3
    must = True

    def __init__(self):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(3, C, 1, 1))

    def join(self, i, h, skip):
        return torch.cat([self.maps[i - 1].expand_as(h), self.k(i, skip), h], 1)


class Reach(Pyramid):
    must = True


class WideReach(WidePyramid):
    must = True


class ParallelStem(WidePyramid):
    """Imagen: the stem is a concatenation of convolutions with kernels of several sizes."""

    must = True

    def __init__(self):
        super().__init__()
        self.stem = nn.ModuleList(nn.Conv2d(3, C // 3, size, padding=size // 2) for size in (3, 5, 7))

    def encode(self, x):
        h, skips = F.silu(torch.cat([stem(x) for stem in self.stem], 1)), []
        for down in self.down:
            skips.append(h)
            h = F.silu(down(h))
        return F.silu(self.mid(h)), skips


class CombinedOutputs(WidePyramid):
    """The maps of all decoder levels are resized and concatenated at the end: no skip comes from the encoder there."""

    must = False  # refused as ambiguous, with all candidates

    def __init__(self):
        super().__init__()
        self.head = conv(3 * C, 3)

    def forward(self, x):
        h, skips = self.encode(x)
        maps = []
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
            maps.append(h)
        return self.head(torch.cat([F.interpolate(h, size=x.shape[2:]) for h in maps], 1))


class AddedBehindTheConcat(WidePyramid):
    """Each skip is used twice: concatenated, and added behind the convolution."""

    must = False  # refused as ambiguous, with all candidates

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            skip = self.k(i, skips.pop())
            h = F.silu(dec(torch.cat([up(h), skip], 1))) + skip
        return self.head(h)


class Reduced(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(functools.reduce(operator.add, [up(h), self.k(i, skips.pop())])))
        return self.head(h)


class SumsWithAStart(Reach):
    """The skip is what a sum begins with, or what is added to that."""

    def join(self, i, h, skip):
        skip = self.k(i, skip)
        if i == 1:
            return sum([h], start=skip)
        return functools.reduce(operator.add, [skip], h) if i == 2 else sum((h, skip), 0)


class AddedByName(Reach):
    """Not in place, in spite of the underscores."""

    def join(self, i, h, skip):
        return self.k(i, skip).__add__(h)


class PlusEqualsOnTheSkip(Reach):
    """The skip passed a layer of its own, and collects the sum."""

    def __init__(self):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in range(3))

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec, lateral in zip(self.up, self.dec, self.lateral, strict=True):
            i = len(skips)
            total = self.k(i, lateral(skips.pop()))
            total += up(h)
            h = F.silu(dec(total))
        return self.head(h)


class Starred(Reach):
    def join(self, i, h, skip):
        pair = (h, self.k(i, skip))
        return torch.add(*pair)


class Addcmul(Reach):
    """The skip is weighted for each channel in one operation."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.rand(3, C, 1, 1))

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.addcmul(up(h), self.k(i, skips.pop()), self.weights[i - 1])))
        return self.head(h)


class Lerp(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.lerp(up(h), self.k(i, skips.pop()), 0.4)))
        return self.head(h)
