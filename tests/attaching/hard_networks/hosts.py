"""Reach: the ways to build and to call a network."""

import dataclasses
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .base import Blocks, C, Net, Plain, Pyramid, UpBlock, WidePyramid, conv
from .merges import Reach, WideReach

# Networks are written here as people write them, also where a type checker would object.
# ruff: noqa: N805
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class CheckpointedConcat(WideReach):
    """A local function that is recomputed in the backward; it reads the skip from around it."""

    must = False  # refused: its source is out of reach

    def level(self, up, dec, skip, i):
        def run(h):
            return F.silu(dec(F.silu(torch.cat([up(h), self.k(i, skip)], 1))))

        return run

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = checkpoint(self.level(up, dec, skips.pop(), i), h, use_reentrant=False)
        return self.head(h)

    @staticmethod
    def others():
        return [(torch.randn(1, 3, 24, 24),)]


class CheckpointedMethod(Reach):
    def level(self, h, skip, i):
        return F.silu(self.dec[3 - i](self.up[3 - i](h) + self.k(i, skip)))

    def forward(self, x):
        h, skips = self.encode(x)
        while skips:
            i = len(skips)
            h = checkpoint(self.level, h, skips.pop(), i, use_reentrant=False)
        return self.head(h)


@torch.jit.script
def scripted_add(h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return torch.relu(h + skip)


@torch.jit.script
def scripted_cat(h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.cat([h, skip], dim=1))


class ScriptedAddition(Reach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(scripted_add(up(h), self.k(i, skips.pop()))))
        return self.head(h)


class ScriptedConcat(WideReach):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(scripted_cat(up(h), self.k(i, skips.pop()))))
        return self.head(h)


class Task(Plain):
    def forward(self, x):
        return 2 * super().forward(x)


class SuperOfSuper(Task):
    """Two subclasses deep, and a keyword of its own."""

    must = True

    def forward(self, x, *, bias=0.1):
        return super().forward(x) + bias


class SuperOfABlock(Blocks):
    must = True

    class Larger(UpBlock):
        def forward(self, h, skip, i):
            return F.silu(super().forward(h, skip, i))

    block = Larger


class DecoratedInTheBody(Reach):
    """A decorator with an argument, defined in the class."""

    def limited(limit):
        def decorate(method):
            @functools.wraps(method)
            def wrapper(self, *args):
                return method(self, *args).clamp(-limit, limit)

            return wrapper

        return decorate

    @limited(50.0)
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)


REGISTRY: list[type] = []


class Registered(Pyramid):
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        REGISTRY.append(cls)


class RegistryAsAList(Registered):
    must = True

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)

    @staticmethod
    def change(model):
        assert [RegistryAsAList] == REGISTRY


class PushedTwice(WideReach):
    """A feature is pushed twice, and taken twice, one merge behind the other."""

    N = 4

    def __init__(self):
        super().__init__()
        self.again = nn.ModuleList(conv(2 * C, C) for _ in range(2))

    def forward(self, x):
        h, skips = F.silu(self.stem(x)), []
        for down in self.down[:2]:
            skips += [h, h]
            h = F.silu(down(h))
        h = F.silu(self.mid(h))
        for n in range(2):
            h, i = self.up[n](h), len(skips)
            h = F.silu(self.dec[n](torch.cat([h, self.k(i, skips.pop())], 1)))
            h = F.silu(self.again[n](torch.cat([h, self.k(i - 1, skips.pop())], 1)))
        return self.head(h)


class ImageInTheDecoder(WidePyramid):
    """The image, at each size, joins main path and skip in the decoder."""

    must = True

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList(conv(2 * C + 3, C) for _ in range(3))

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            image = F.adaptive_avg_pool2d(x, h.shape[2:])
            h = F.silu(dec(torch.cat([h, self.k(i, skips.pop()), image], 1)))
        return self.head(h)


class ComplexNumbers(Reach):
    """A network for MRI: complex weights, and the magnitude at the end."""

    def __init__(self):
        super().__init__()
        self.to(torch.complex64)

    @staticmethod
    def act(h):
        return torch.complex(F.silu(h.real), F.silu(h.imag))

    def forward(self, x):
        h, skips = self.act(self.stem(torch.complex(x, x.flip(-1)))), []
        for down in self.down:
            skips.append(h)
            h = self.act(down(h))
        h = self.act(self.mid(h))
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = self.act(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h).abs()


class ComplexConcat(WidePyramid):
    must = True

    def __init__(self):
        super().__init__()
        self.to(torch.complex64)

    def forward(self, x):
        act = ComplexNumbers.act
        h, skips = act(self.stem(torch.complex(x, x.flip(-1)))), []
        for down in self.down:
            skips.append(h)
            h = act(down(h))
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = act(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h).abs()


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    time: torch.Tensor


class DataclassInput(Reach):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, C)

    def forward(self, sample):
        h, skips = self.encode(sample.image)
        h = h + self.time(sample.time)[:, :, None, None]
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return Sample(self.head(h), sample.time)

    @staticmethod
    def inputs():
        return (Sample(torch.randn(2, 3, 16, 16), torch.rand(2, 1)),)


class NoiseInEveryBlock(WideReach):
    """Noise is drawn in encoder and decoder, in evaluation as well."""

    def forward(self, x):
        h, skips = self.encode(x + 0.1 * torch.randn_like(x))
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(torch.cat([h + 0.1 * torch.randn_like(h), self.k(i, skips.pop())], 1)))
        return self.head(F.dropout(h, 0.1, training=True))


class UnbatchedAddition(Reach):
    @staticmethod
    def inputs():
        return (torch.randn(3, 16, 16),)


class UnbatchedConcat(WideReach):
    axis = -3

    def join(self, i, h, skip):
        return torch.cat([h, self.k(i, skip)], -3)

    @staticmethod
    def inputs():
        return (torch.randn(3, 16, 16),)


class UnderAProfiler(WideReach):
    judge = "profiler"


class GraphOfNodes(Net):
    """(N, C): nodes are pooled by a matrix, and skips added."""

    must = True

    def __init__(self):
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(4, C), nn.Linear(C, C), nn.Linear(C, 4)
        self.down, self.up = (nn.ModuleList(nn.Linear(C, C) for _ in range(3)) for _ in range(2))

    def forward(self, nodes, *pools):
        h, skips = F.silu(self.stem(nodes)), []
        for down, pool in zip(self.down, pools, strict=True):
            skips.append(h)
            h = F.silu(down(pool @ h))
        h = F.silu(self.mid(h))
        for up, pool in zip(self.up, reversed(pools), strict=True):
            i = len(skips)
            h = F.silu(up(pool.mT @ h + self.k(i, skips.pop())))
        return self.head(h)

    @staticmethod
    def inputs():
        return torch.randn(16, 4), torch.rand(8, 16), torch.rand(4, 8), torch.rand(2, 4)


class VectorUNet(Net):
    """(B, C): a U of plain layers, as for tables and low-dimensional diffusion; skips are concatenated."""

    must = True

    def __init__(self):
        super().__init__()
        sizes = [4, 16, 12, 8]
        self.down = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.mid = nn.Linear(8, 8)
        self.up = nn.ModuleList(nn.Linear(a, b) for a, b in ((16, 12), (24, 16), (32, 16)))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = F.silu(down(x))
            skips.append(x)
        x = F.silu(self.mid(x))
        for up in self.up:
            i = len(skips)
            x = F.silu(up(torch.cat([x, self.k(i, skips.pop())], 1)))
        return self.head(x)

    @staticmethod
    def inputs():
        return (torch.randn(5, 4),)
