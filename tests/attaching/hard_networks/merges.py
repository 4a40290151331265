"""Reach: the ways to write a merge."""

import functools
import operator

import einops
import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Plain, Pyramid, Tokens, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class PlainSum(Plain):
    must = True


class PlainConcat(WidePyramid):
    must = True

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h)


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


class MultipliedBehindTheConcat(WidePyramid):
    must = False  # refused: a product cannot be scaled

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            skip = self.k(i, skips.pop())
            h = F.silu(dec(torch.cat([up(h), skip], 1))) * skip
        return self.head(h)


class ResidualOfTheStem(WidePyramid):
    """The feature of the outermost skip alone is added at the end: a residual around the U, which is no long skip."""

    must = True

    def forward(self, x):
        h, skips = self.encode(x)
        first = skips[0]
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h + first)


class ConditionEncoder(WidePyramid):
    """A second encoder, for the condition, which is added in the middle."""

    def __init__(self):
        super().__init__()
        self.other = nn.ModuleList([conv(3, C), *(conv(C, C, 2) for _ in range(3))])

    def forward(self, x, condition):
        h, skips = self.encode(x)
        for layer in self.other:
            condition = F.silu(layer(condition))
        h = h + condition
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h)

    @staticmethod
    def inputs():
        return torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)


class ConditionReadsTheImage(ConditionEncoder):
    """The second encoder looks at the first at each level, so that both ways down lead from one feature."""

    def __init__(self):
        super().__init__()
        self.reads = nn.ModuleList(conv(C, C) for _ in range(3))

    def forward(self, x, condition):
        h, c, skips = F.silu(self.stem(x)), F.silu(self.other[0](condition)), []
        for n in range(3):
            c = c * self.reads[n](h).sigmoid()
            skips.append(h)
            h, c = F.silu(self.down[n](h)), F.silu(self.other[n + 1](c))
        h = F.silu(self.mid(h + c))
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h)


class SumOfATuple(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(sum((self.k(i, skips.pop()), up(h)))))
        return self.head(h)


class SumFromAStart(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(sum([self.k(i, skips.pop())], start=up(h))))
        return self.head(h)


class Reduced(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(functools.reduce(operator.add, [up(h), self.k(i, skips.pop())])))
        return self.head(h)


class ReducedByLambda(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(functools.reduce(lambda a, b: a + b, (self.k(i, skips.pop()), up(h)))))
        return self.head(h)


class AddOther(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.add(up(h), other=self.k(i, skips.pop()))))
        return self.head(h)


class AddSwapped(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.add(other=up(h), input=self.k(i, skips.pop()))))
        return self.head(h)


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


class IAddMethod(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h).add_(self.k(i, skips.pop()))))
        return self.head(h)


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


class AddcmulByMethod(Addcmul):
    def join(self, i, h, skip):
        return h.addcmul(self.weights[i - 1].expand_as(h), self.k(i, skip), value=0.5)


class Lerp(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.lerp(up(h), self.k(i, skips.pop()), 0.4)))
        return self.head(h)


class SliceAssignment(WideReach):
    def join(self, i, h, skip):
        joined = torch.zeros(len(h), 2 * C, *h.shape[2:])
        joined[:, :C] = h
        joined[:, C:] = self.k(i, skip)
        return joined


class SliceAssignmentSkipFirst(WideReach):
    def join(self, i, h, skip):
        joined = h.new_empty((h.shape[0], 2 * C, h.shape[2], h.shape[3]))
        joined[:, :C] = self.k(i, skip)
        joined[:, C:] = h
        return F.silu(joined)


class CopyIntoABuffer(WideReach):
    def join(self, i, h, skip):
        joined = h.new_zeros(len(h), 2 * C, *h.shape[2:])
        joined.narrow(1, 0, C).copy_(h)
        joined.narrow(1, C, C).copy_(self.k(i, skip))
        return joined


class StackAndSum(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.stack([up(h), self.k(i, skips.pop())]).sum(0)))
        return self.head(h)


class StackAndMean(Reach):
    def join(self, i, h, skip):
        return torch.stack((self.k(i, skip), h), dim=1).mean(dim=1)


class StackOnTheChannels(WideReach):
    """A stack behind the channels, flattened: the channels alternate."""

    must = False

    def join(self, i, h, skip):
        return torch.stack([h, self.k(i, skip)], 2).flatten(1, 2)


class PackTokens(Tokens):
    """einops.pack along the channels of tokens."""

    must = True

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for fuse, block in zip(self.fuse, self.dec, strict=True):
            i = len(skips)
            x, _ = einops.pack((self.k(i, skips.pop()), x), "b l *")
            x = block(fuse(x))
        return self.head(x)


class EinopsReduce(Reach):
    must = False

    def join(self, i, h, skip):
        return einops.reduce([h, self.k(i, skip)], "n b c h w -> b c h w", "sum")
