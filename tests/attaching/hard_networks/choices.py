"""Kind 8, ambiguous networks: every candidate is listed, and any can be chosen."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .base import Blocks, C, Dial, Pyramid, UpBlock, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# ruff: noqa: RUF012
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class Decoders(WidePyramid):
    """One encoder, several decoders. `chosen` is the one that the user means."""

    kind = "8"
    judge = "number"
    names: ClassVar[dict[str, int]] = {"first": 3, "second": 3, "third": 3}
    chosen = "second"
    scaled = None

    def __init__(self):
        super().__init__()
        del self.dec, self.up
        for name, levels in self.names.items():
            self.add_module(f"{name}_up", nn.ModuleList(nn.ConvTranspose2d(C, C, 2, 2) for _ in range(levels)))
            self.add_module(name, nn.ModuleList(conv(2 * C, C) for _ in range(levels)))

    def forward(self, x):
        h, skips = self.encode(x)
        return [self.decode(name, h, skips) for name in self.names]

    def decode(self, name, h, skips):
        ups, decs = self.get_submodule(f"{name}_up"), self.get_submodule(name)
        for i, up, dec in zip((3, 2, 1), ups, decs, strict=False):
            skip = self.k(i, skips[i - 1]) if self.scaled in (None, name) else skips[i - 1]
            h = F.silu(dec(torch.cat([up(h), skip], 1)))
        return h


class ThreeDecoders(Decoders):
    pass


class DecodersOfTwoDepths(Decoders):
    """The second task needs no full resolution."""

    names = {"first": 3, "second": 2}
    chosen = "first"


class SeriesOfTwo(WidePyramid):
    """A W-Net: two U-Nets, one behind the other. The second is meant."""

    kind = "8"
    judge = "number"
    names: ClassVar[dict[str, int]] = {"one": 3, "two": 3}
    chosen = "two"
    scaled = None

    def __init__(self):
        super().__init__()
        self.one, self.two = WidePyramid(), WidePyramid()
        self.k, self.one.k, self.two.k = (Twin(self, name) for name in ("", "one", "two"))

    def forward(self, x):
        return self.two(self.one(x))


class Twin(Dial):
    """Scales only where its network is meant."""

    ks_of_all: Any = None

    def __init__(self, net, name):
        self.net, self.name, self.ms = [net], name, None

    @property
    def ks(self):
        net = self.net[0]
        return net.k.ks_of_all if net.scaled in (None, self.name) else None

    @ks.setter
    def ks(self, value):
        self.ks_of_all = value


class TaskDecoders(Blocks):
    """Two additive decoders of blocks, merged inside the blocks, the second of which is meant."""

    kind = "8"
    judge = "number"
    names: ClassVar[dict[str, int]] = {"dec": 3, "other": 3}
    chosen = "other"
    scaled = None

    def __init__(self):
        super().__init__()
        self.other = nn.ModuleList(UpBlock(self.k) for _ in range(3))
        self.k = Twin(self, "")
        for name in ("dec", "other"):
            for block in self.get_submodule(name).children():
                block.k = Twin(self, name)

    def forward(self, x):
        h, skips = self.encode(x)
        g = h
        for n in range(3):
            i, skip = len(skips), skips.pop()
            h, g = self.dec[n](h, skip, i), self.other[n](g, skip, i)
        return self.head(h), self.head(g)


class Node(nn.Module):
    """A node of UNet++: everything that its level has found so far, and the level below."""

    def __init__(self, k, name, count):
        super().__init__()
        self.up, self.conv, self.k, self.name = nn.ConvTranspose2d(C, C, 2, 2), conv((count + 1) * C, C), k, name

    def forward(self, below, *level):
        level = [self.k((self.name, n), skip) for n, skip in enumerate(level)]
        return F.silu(self.conv(torch.cat([*level, self.up(below)], 1)))


class Nested(Pyramid):
    """UNet++ in modules. Each operand of each concatenation is a candidate, and the user may choose any."""

    kind = "8"
    judge = "listing"
    counts: ClassVar[dict[str, int]] = {"n01": 1, "n11": 1, "n21": 1, "n02": 2, "n12": 2, "n03": 3}

    def __init__(self):
        super().__init__()
        self.k = Chosen()
        for name, count in self.counts.items():
            self.add_module(name, Node(self.k, name, count))

    def forward(self, x):
        h, (a, b, c) = self.encode(x)
        a1, b1, c1 = self.n01(b, a), self.n11(c, b), self.n21(F.silu(h), c)
        a2, b2 = self.n02(b1, a, a1), self.n12(c1, b, b1)
        return self.head(self.n03(b2, a, a1, a2))


class Chosen(Dial):
    """Halves one operand of one node: ks is its name and number."""

    def __call__(self, i, skip):
        return skip * 0.5 if i == self.ks else skip
