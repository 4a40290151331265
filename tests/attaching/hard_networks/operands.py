"""Kind 1, the wrong operand: additions and concatenations through objects, modules and other names."""

import operator

import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Pyramid, WidePyramid

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class TensorAdd(Pyramid):
    kind = "1"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.Tensor.add(up(h), self.k(i, skips.pop()))))
        return self.head(h)


class LocallyImportedTorch(Pyramid):
    kind = "1"

    def forward(self, x):
        import torch as th

        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(th.add(up(h), self.k(i, skips.pop()))))
        return self.head(h)


class AddFromAModule(Pyramid):
    kind = "1"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(operator.add(self.k(i, skips.pop()), up(h))))
        return self.head(h)


class Adder:
    def add(self, skip, onto):
        return onto + skip


class AddThroughAnObject(Pyramid):
    """A plain object adds, and takes the skip first."""

    kind = "1"

    def __init__(self):
        super().__init__()
        self.merge = Adder()

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(self.merge.add(self.k(i, skips.pop()), onto=up(h))))
        return self.head(h)


class AddFromTheRight(Pyramid):
    kind = "1"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(self.k(i, skips.pop()).__radd__(up(h))))
        return self.head(h)


class AddWithAlpha(Pyramid):
    """The skip is the first operand, and the main path has a weight."""

    kind = "1"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.add(self.k(i, skips.pop()), up(h), alpha=0.5)))
        return self.head(h)


class ThreeTerms(Pyramid):
    """A side branch of the decoder is added in the same expression, between main path and skip."""

    kind = "1"

    def __init__(self):
        super().__init__()
        self.side = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in range(3))

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(h + self.side[i - 1](h) + self.k(i, skips.pop())))
        return self.head(h)


class Difference(Pyramid):
    kind = "1"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) - self.k(i, skips.pop())))
        return self.head(h)


class Concatenations(WidePyramid):
    """The other names of torch.cat, and the skip first."""

    kind = "1"
    must = True

    def join(self, i, h, skip):
        concatenate = (torch.concat, torch.hstack, torch.concatenate)[i - 1]
        pair = (self.k(i, skip), h)
        return concatenate(pair) if concatenate is torch.hstack else concatenate(pair, dim=1)


class ThreePartConcat(WidePyramid):
    """Main path, skip, and an embedding as a map."""

    kind = "1"
    wide = 3
    must = True

    def __init__(self):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(3, C, 1, 1))

    def join(self, i, h, skip):
        return torch.cat([self.maps[i - 1].expand_as(h), self.k(i, skip), h], 1)
