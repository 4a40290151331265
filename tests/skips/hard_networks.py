"""Networks that are hard to scale: scaled right, or refused by name, never silently wrong.

Every network scales its own skips with `ks`, the coefficients outermost first. So it is its own reference for what an
attached scaling must compute. Most of them are a `Pyramid`, and differ only in how they join a skip.

    kind    1 wrong operand      2 bypassed method       3 phantom or missing skip   4 another path
            5 containers         6 more than a factor    7 folding                   8 ambiguous
            none: no long skip   after: changed later    reach: ways to write a merge
    must    it has to work. The others may be refused
    judge   which of the judges in test_hard_networks.py looks at it
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
import types
from typing import Any, ClassVar, NamedTuple

import einops
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

C = 6  # channels at every level, so that no shape gives a mistake away

# Networks are written here as people write them, also where a type checker would object.
# ruff: noqa: RUF012, N805
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class Dial:
    """The coefficients of a network, shared with its blocks."""

    def __init__(self):
        self.ks = self.ms = None

    def __call__(self, i, skip):
        """Skip i as it enters its merge."""
        if self.ks is None:
            return skip
        k = self.ks[i - 1]
        return k(skip) if callable(k) else skip * k

    def main(self, i, h):
        return h if self.ms is None else h * self.ms[i - 1]


class Net(nn.Module):
    N = 3  # long skips
    kind = "reach"
    must = False
    judge = "constants"
    axis = 1  # of the channels
    times = 1  # how often the skips are looked for

    def __init__(self):
        super().__init__()
        self.k = Dial()

    @staticmethod
    def inputs() -> Any:
        return (torch.randn(2, 3, 16, 16),)

    @staticmethod
    def others() -> list[Any]:
        """Inputs that the network treats in another way than those it was planned with."""
        return []

    @staticmethod
    def prepare(model) -> None:
        """What happens to the model before it is scaled."""

    @staticmethod
    def change(model) -> None:
        """What happens to the model once it is scaled."""

    @staticmethod
    def undo(model) -> None:
        """Takes `change` back, where a class or a module was changed."""


def conv(inside, outside, stride=1):
    return nn.Conv2d(inside, outside, 3, stride, 1)


class Pyramid(Net):
    """Three levels. What is joined how is left to the networks below."""

    wide = 1  # 2 where skips are concatenated

    def __init__(self):
        super().__init__()
        self.stem, self.mid, self.head = conv(3, C), conv(C, C), conv(C, 3)
        self.down = nn.ModuleList(conv(C, C, 2) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(C, C, 2, 2) for _ in range(3))
        self.dec = nn.ModuleList(conv(self.wide * C, C) for _ in range(3))

    def encode(self, x) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h, skips = F.silu(self.stem(x)), []
        for down in self.down:
            skips.append(h)
            h = F.silu(down(h))
        return F.silu(self.mid(h)), skips

    def join(self, i, h, skip) -> torch.Tensor:
        return h + self.k(i, skip)

    def forward(self, x) -> Any:
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(self.join(i, up(h), skips.pop())))
        return self.head(h)


class Plain(Pyramid):
    """The most ordinary way: an addition in the loop of the forward."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)


class PlainSum(Plain):
    must = True


class WidePyramid(Pyramid):
    wide = 2

    def join(self, i, h, skip):
        return torch.cat([h, self.k(i, skip)], 1)


class PlainConcat(WidePyramid):
    must = True

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h)


class Tokens(Net):
    """A U of transformer blocks, (B, L, C)."""

    N = 2
    axis = -1
    width = 8

    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.head = nn.Linear(5, 8), Block(), nn.Linear(8, 5)
        self.enc = nn.ModuleList(Block() for _ in range(self.N))
        self.dec = nn.ModuleList(Block() for _ in range(self.N))
        self.fuse = nn.ModuleList(nn.Linear(16, 8) for _ in range(self.N))

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for fuse, block in zip(self.fuse, self.dec, strict=True):
            i = len(skips)
            x = block(fuse(torch.cat([x, self.k(i, skips.pop())], -1)))
        return self.head(x)

    @staticmethod
    def inputs():
        return (torch.randn(2, 12, 5),)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.qkv, self.out = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + self.mlp(self.norm2(x))


# ------------------------------------------------------------------------------ 1: the wrong operand


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


# ------------------------------------------------------------------------------ 2: bypassed methods


def plain_forward(self, x):
    h, skips = self.encode(x)
    for up, dec in zip(self.up, self.dec, strict=True):
        i = len(skips)
        h = F.silu(dec(up(h) + self.k(i, skips.pop())))
    return self.head(h)


class MethodOnTheInstance(Pyramid):
    kind = "2"

    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(plain_forward, self)


class PartialForward(Pyramid):
    kind = "2"

    def __init__(self):
        super().__init__()
        self.forward = functools.partial(self.run, gain=0.9)

    def run(self, x, gain):
        return gain * plain_forward(self, x)


class LambdaForward(Pyramid):
    kind = "2"

    def __init__(self):
        super().__init__()
        self.forward = lambda x: self.head(self.levels(*self.encode(x)))

    def levels(self, h, skips):
        for i in (3, 2, 1):
            h = F.silu(self.dec[3 - i](self.up[3 - i](h) + self.k(i, skips[i - 1])))
        return h


class UpBlock(nn.Module):
    """The skip passes a function before it is added, so that no module gets or returns what is to be scaled."""

    def __init__(self, k):
        super().__init__()
        self.up, self.conv, self.k = nn.ConvTranspose2d(C, C, 2, 2), conv(C, C), k

    def forward(self, h, skip, i):
        return F.silu(self.conv(self.up(h) + self.k(i, torch.tanh(skip))))


class Blocks(Pyramid):
    block: Any = UpBlock

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList(self.block(self.k) for _ in range(3))

    def forward(self, x):
        h, skips = self.encode(x)
        for dec in self.dec:
            i = len(skips)
            h = dec(h, skips.pop(), i)
        return self.head(h)


class CallsItsBase(UpBlock):
    def forward(self, h, skip, i):
        return 2 * UpBlock.forward(self, h, skip, i)


class BaseForwardByName(Blocks):
    kind = "2"
    block = CallsItsBase


class BoundMethodsInATable(Pyramid):
    kind = "2"

    def __init__(self):
        super().__init__()
        self.joins = {"add": self.add, "none": self.main_only}

    def add(self, i, h, skip):
        return h + self.k(i, skip)

    def main_only(self, i, h, skip):
        return h

    def join(self, i, h, skip):
        return self.joins["add"](i, h, skip)


class CompiledInInit(Pyramid):
    kind = "2"

    def __init__(self):
        super().__init__()
        self.joined = torch.compile(self.add, backend="eager", dynamic=True)

    def add(self, h, skip):
        return h + skip

    def join(self, i, h, skip):
        return self.joined(h, self.k(i, skip))


class CallsForwardDirectly(WidePyramid):
    """Layers called through .forward, which no hook sees."""

    kind = "2"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec.forward(torch.cat([up.forward(h), self.k(i, skips.pop())], 1)))
        return self.head.forward(h)


class ExactType(Blocks):
    """The network asks for the exact type of its blocks."""

    kind = "2"

    def forward(self, x):
        h, skips = self.encode(x)
        for dec in self.dec:
            i, skip = len(skips), skips.pop()
            h = dec(h, skip, i) if type(dec) is UpBlock else dec(h, torch.zeros_like(skip), i)
        return self.head(h)


class ByClassName(Blocks):
    kind = "2"

    def forward(self, x):
        h, skips = self.encode(x)
        for dec in self.dec:
            i, skip = len(skips), skips.pop()
            h = {"UpBlock": dec}.get(type(dec).__name__, lambda h, *_: F.interpolate(h, scale_factor=2))(h, skip, i)
        return self.head(h)


BY_KEY: dict[str, type] = {}


class Keyed(Pyramid):
    def __init_subclass__(cls, *, key, **options):
        super().__init_subclass__(**options)
        if key in BY_KEY:
            raise TypeError(f"there is a network {key!r} already")
        BY_KEY[key] = cls


class RegistryWithKeys(Keyed, key="keyed"):
    """Every subclass must give a new key."""

    kind = "2"
    must = True

    def forward(self, x):
        assert BY_KEY["keyed"] is RegistryWithKeys
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)


class FinalBlock(UpBlock):
    def __init_subclass__(cls, **options):
        raise TypeError("FinalBlock is final")


class FinalClass(Blocks):
    kind = "2"
    block = FinalBlock


class Counted(type):
    """Metaclass that counts its classes."""

    made: ClassVar[list[str]] = []

    def __new__(mcs, name, bases, namespace):
        mcs.made.append(name)
        return super().__new__(mcs, name, bases, namespace)


class CountedBlock(UpBlock, metaclass=Counted):
    def forward(self, h, skip, i):
        assert Counted.made.count("CountedBlock") == 1
        return super().forward(h, skip, i)


class Metaclass(Blocks):
    kind = "2"
    block = CountedBlock


class AliasedForward(Pyramid):
    """One function under two names."""

    kind = "2"
    must = True

    def predict(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)

    forward = predict


class StaticMerge(Pyramid):
    kind = "2"
    must = True

    @staticmethod
    def merge(h, skip):
        return F.silu(h + skip)

    def join(self, i, h, skip):
        return self.merge(h, self.k(i, skip))


class ClassMerge(Pyramid):
    kind = "2"

    @classmethod
    def merge(cls, h, skip):
        return F.silu(h + skip)

    def join(self, i, h, skip):
        return self.merge(h, self.k(i, skip))


def accelerate_hook(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(model, ModelHook())


class AccelerateBefore(Plain):
    kind = "2"
    prepare = staticmethod(accelerate_hook)


class AccelerateBlocksBefore(Blocks):
    kind = "2"

    @staticmethod
    def prepare(model):
        for block in model.dec:
            accelerate_hook(block)


# ------------------------------------------------------------------------------ 3: phantom or missing skips


class GruBottleneck(Pyramid):
    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(C, C, batch_first=True)

    def encode(self, x):
        h, skips = F.silu(self.stem(x)), []
        for down in self.down:
            h = F.silu(down(h))
            skips.append(h)
        return self.gru(h.flatten(2).mT)[0].mT.reshape(h.shape), skips

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(up(dec(h + self.k(i, skips.pop()))))
        return self.head(h)


class FourierBottleneck(GruBottleneck):
    """FNO: the only layer between innermost encoder and decoder is a learned filter in Fourier space."""

    must = False

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(C, C, 2, 2, 2))

    def encode(self, x):
        h, skips = super().encode(x)
        h = torch.fft.rfft2(skips[-1])
        h = torch.einsum("bchw,cdhw->bdhw", h, torch.view_as_complex(self.filter))
        return torch.fft.irfft2(h), skips


class ScanBottleneck(GruBottleneck):
    """A state-space scan, written as a loop over positions."""

    must = False

    def __init__(self):
        super().__init__()
        self.decay, self.gain = nn.Parameter(torch.rand(C)), nn.Parameter(torch.randn(C))

    def encode(self, x):
        h = super().encode(x)
        tokens, state, seen = h[1][-1].flatten(2), 0.0, []
        for t in range(tokens.shape[-1]):
            state = self.decay.sigmoid() * state + self.gain * tokens[..., t]
            seen.append(state)
        return torch.stack(seen, -1).reshape(h[1][-1].shape), h[1]


class EinsumBottleneck(GruBottleneck):
    must = False

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(C, C))

    def encode(self, x):
        skips = super().encode(x)[1]
        return torch.einsum("bchw,cd->bdhw", skips[-1], self.mix).tanh(), skips


class LastMergeOutsideTheLoop(Tokens):
    """Additions between blocks full of residuals; the outermost on a line of its own."""

    kind = "3"
    N = 4

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.dec[:-1]:
            i = len(skips)
            x = block(x + self.k(i, skips.pop()))
        x = self.dec[-1](x + self.k(1, skips.pop()))
        return self.head(x)


class WrittenOut(Tokens):
    """The same network without a loop."""

    kind = "3"
    must = True
    N = 3

    def forward(self, x):
        x1 = self.enc[0](self.embed(x))
        x2 = self.enc[1](x1)
        x3 = self.enc[2](x2)
        x = self.mid(x3)
        x = self.dec[0](x + self.k(3, x3))
        x = self.dec[1](x + self.k(2, x2))
        x = self.dec[2](x + self.k(1, x1))
        return self.head(x)


class ResidualTrunk(Pyramid):
    """Two long additions around six residual blocks, all by the same operator."""

    kind = "3"
    N = 2

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(conv(C, C), nn.SiLU(), conv(C, C)) for _ in range(6))

    def forward(self, x):
        a = F.silu(self.stem(x))
        b = h = F.silu(self.down[0](a))
        for block in self.trunk:
            h = h + block(h)
        h = F.silu(self.dec[0](self.mid(h) + self.k(2, b)))
        return self.head(F.silu(self.dec[1](self.up[0](h) + self.k(1, a))))


class MemoryTokens(Tokens):
    """Learned keys and values beside those of the tokens, in the middle."""

    kind = "3"

    def __init__(self):
        super().__init__()
        self.memory, self.kv, self.out = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(8, 16), nn.Linear(8, 8)
        self.squeeze = nn.Conv1d(8, 8, 2, 2)

    def forward(self, x):
        x, skips = self.embed(x), []
        for block in self.enc:
            x = block(x)
            skips.append(x)
        x = self.attend(self.mid(x))
        for fuse, block in zip(self.fuse, self.dec, strict=True):
            i = len(skips)
            x = block(fuse(torch.cat([x, self.k(i, skips.pop())], -1)))
        return self.head(x)

    def attend(self, x):
        small = self.squeeze(x.mT).mT
        k, v = self.kv(torch.cat([x, small, self.memory.expand(len(x), -1, -1)], 1)).chunk(2, -1)
        return x + self.out((x @ k.mT).softmax(-1) @ v)


class TextContext(WidePyramid):
    """Keys and values of a text, with those of the image in front of them."""

    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.text, self.q, self.kv, self.out = (nn.Linear(*s) for s in ((4, C), (C, C), (C, 2 * C), (C, C)))

    def forward(self, x, text):
        h, skips = self.encode(x)
        text = self.text(text)
        for up, dec in zip(self.up, self.dec, strict=True):
            tokens, i = h.flatten(2).mT, len(skips)
            k, v = self.kv(torch.cat([tokens, text], 1)).chunk(2, -1)
            h = h + self.out((self.q(tokens) @ k.mT).softmax(-1) @ v).mT.reshape(h.shape)
            h = F.silu(dec(torch.cat([up(h), self.k(i, skips.pop())], 1)))
        return self.head(h)

    @staticmethod
    def inputs():
        return torch.randn(2, 3, 16, 16), torch.randn(2, 5, 4)


class AtrousBottleneck(WidePyramid):
    """ASPP: parallel branches of the bottleneck are concatenated."""

    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(C, C, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.fuse = nn.Conv2d(4 * C, C, 1)

    def encode(self, x):
        h, skips = super().encode(x)
        pooled = h.mean((2, 3), keepdim=True).expand_as(h)
        return self.fuse(torch.cat([*(F.relu(b(h)) for b in self.branches), pooled], 1)), skips


class DenseBottleneck(WidePyramid):
    kind = "3"
    must = True

    def __init__(self):
        super().__init__()
        self.dense = nn.ModuleList(conv(C * (n + 1), C) for n in range(4))

    def encode(self, x):
        h, skips = super().encode(x)
        features = [h]
        for layer in self.dense:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return features[-1], skips


class RecursiveAdd(nn.Module):
    """Each level holds the next and adds its own input, as one line that runs at every depth."""

    def __init__(self, k, i, inner):
        super().__init__()
        self.down, self.up, self.inner, self.k, self.i = conv(C, C, 2), nn.ConvTranspose2d(C, C, 2, 2), inner, k, i

    def forward(self, x):
        return self.up(F.silu(self.inner(F.silu(self.down(x))))) + self.k(self.i, x)


class Recursion(Pyramid):
    kind = "3"

    def __init__(self):
        super().__init__()
        inner = self.mid
        for i in (3, 2, 1):
            inner = RecursiveAdd(self.k, i, inner)
        self.levels = inner

    def forward(self, x):
        return self.head(F.silu(self.levels(F.silu(self.stem(x)))))


# ------------------------------------------------------------------------------ none: no long skip at all


class NoSkips(Net):
    N = 0
    kind = "none"
    judge = "none"
    times = 20
    doubtful = False  # whether AmbiguousSkipsError is right as well

    def __init__(self):
        super().__init__()
        self.enc = nn.ModuleList([conv(3, C), *(conv(C, C, 2) for _ in range(3))])
        self.dec = nn.ModuleList([*(nn.ConvTranspose2d(C, C, 2, 2) for _ in range(3)), conv(C, 3)])

    def middle(self, h):
        return h

    def forward(self, x):
        for layer in self.enc:
            x = F.relu_(layer(x))
        x = self.middle(x)
        for layer in self.dec:
            x = layer(F.relu_(x))
        return x


class PlainAutoencoder(NoSkips):
    """Freed features leave their addresses to later ones."""


class AutoencoderWithMaps(NoSkips):
    """Position maps are made anew and concatenated in the decoder, where features of the encoder lay."""

    def __init__(self):
        super().__init__()
        self.fuse = nn.ModuleList(conv(C + 2, C) for _ in range(3))

    def forward(self, x):
        for layer in self.enc:
            x = F.relu_(layer(x))
        for n, fuse in enumerate(self.fuse):
            x = F.relu_(self.dec[n](x))
            rows = torch.linspace(-1, 1, x.shape[2]).view(1, 1, -1, 1).expand(len(x), 1, *x.shape[2:])
            x = F.relu_(fuse(torch.cat([x, rows.sin(), rows.mT.cos()], 1)))
        return self.dec[3](x)


class AutoencoderWithNoise(NoSkips):
    """Noise is added at each level of the decoder."""

    def forward(self, x):
        for layer in self.enc:
            x = F.relu_(layer(x))
        for layer in self.dec:
            x = layer(F.relu_(x))
            x = x + 0.1 * torch.randn_like(x)
        return x


class Variational(NoSkips):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)

    def middle(self, h):
        return self.mean(h) + torch.randn_like(h) * self.spread(h).exp()


class ResidualAutoencoder(NoSkips):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(conv(C, C), nn.ReLU(), conv(C, C)) for _ in range(4))

    def middle(self, h):
        for block in self.blocks:
            h = F.relu(h + block(h))
        return h


class MaskedAutoencoder(NoSkips):
    """Mask tokens join the tokens that were seen."""

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.mask = nn.Linear(5, 8), nn.Linear(8, 5), nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 12, 8))
        self.enc, self.dec = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = (self.embed(x) + self.places)[:, ::2]
        for block in self.enc:
            x = block(x)
        x = torch.cat([x, self.mask.expand(len(x), 6, -1)], 1) + self.places
        for block in self.dec:
            x = block(x)
        return self.head(x)

    @staticmethod
    def inputs():
        return (torch.randn(2, 12, 5),)


class Perceiver(MaskedAutoencoder):
    """Latents read the input, and the outputs read the latents: no feature goes around."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x):
        tokens = self.embed(x) + self.places
        latents = self.latents.expand(len(x), -1, -1)
        latents = latents + (latents @ tokens.mT).softmax(-1) @ tokens
        for block in self.enc:
            latents = block(latents)
        return self.head((self.places @ latents.mT).softmax(-1) @ latents)


class TwoStreams(NoSkips):
    """Two encoders that meet in the middle."""

    def __init__(self):
        super().__init__()
        self.other = nn.ModuleList([conv(3, C), *(conv(C, C, 2) for _ in range(3))])
        self.fuse = nn.Conv2d(2 * C, C, 1)

    def forward(self, x):
        a, b = x, x.flip(-1)
        for one, two in zip(self.enc, self.other, strict=True):
            a, b = F.relu_(one(a)), F.relu_(two(b))
        x = self.fuse(torch.cat([a, b], 1))
        for layer in self.dec:
            x = layer(F.relu_(x))
        return x


class ConvGru(NoSkips):
    """A recurrent network over three frames: its gates are additions from step to step.

    That each frame goes around the earlier steps may be called doubtful, if it is so each time.
    """

    doubtful = True

    def __init__(self):
        super().__init__()
        self.gates, self.new, self.embed, self.head = conv(2 * C, 2 * C), conv(2 * C, C), conv(3, C), conv(C, 3)

    def forward(self, frames):
        h = torch.zeros(len(frames), C, *frames.shape[3:])
        for x in frames.unbind(1):
            x = self.embed(x)
            z, r = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
            h = (1 - z) * h + z * self.new(torch.cat([x, r * h], 1)).tanh()
        return self.head(h)

    @staticmethod
    def inputs():
        return (torch.randn(2, 3, 3, 8, 8),)


class UnrolledDenoiser(NoSkips):
    """Three residual steps with an autoencoder."""

    def forward(self, x):
        for _ in range(3):
            x = x + 0.1 * super().forward(x)
        return x


# ------------------------------------------------------------------------------ 4: another path


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


class OrderByKeyword(WidePyramid):
    kind = "4"

    def forward(self, x, skip_first=False):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            pair = [h, self.k(i, skips.pop())]
            h = F.silu(dec(torch.cat(pair[::-1] if skip_first else pair, 1)))
        return self.head(h)

    @staticmethod
    def others():
        return [{"x": torch.randn(2, 3, 16, 16), "skip_first": True}]


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


class FeaturesByKeyword(WidePyramid):
    """With a keyword, the network returns what its encoder found as well."""

    kind = "4"

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x, features=False):
        *skips, h = found = self.encoder(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(torch.cat([self.k(i, skips.pop()), up(h)], 1)))
        return (self.head(h), list(found)) if features else self.head(h)

    @staticmethod
    def others():
        return [{"x": torch.randn(2, 3, 16, 16), "features": True}]


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


class SkipFromAnotherLevel(Pyramid):
    """With a keyword the skips enter in another order. All have the same shape."""

    kind = "4"

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(conv(C, C) for _ in range(3))
        self.up = nn.ModuleList(conv(C, C) for _ in range(3))

    def forward(self, x, order=(3, 2, 1)):
        h, skips = self.encode(x)
        for i, up, dec in zip(order, self.up, self.dec, strict=True):
            h = F.silu(dec(up(h) + self.k(i, skips[i - 1])))
        return self.head(h)

    @staticmethod
    def others():
        return [{"x": torch.randn(2, 3, 16, 16), "order": (3, 1, 2)}]


# ------------------------------------------------------------------------------ 5: containers


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
    kind = "5"
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


class WritingBlock(TakingBlock):
    def forward(self, h, shared, i):
        h = F.silu(self.conv(torch.cat([self.up(h), self.k(i, shared["skips"][i - 1])], 1)))
        shared["trace"] = shared.get("trace", 0) + h.mean()
        return h


class WritesIntoADict(Sharing):
    """The network reads what its blocks wrote."""

    block = WritingBlock

    def pack(self, skips):
        return {"skips": skips}

    def finish(self, h, shared):
        return self.head(h) + shared["trace"]


class ListIsUsedUp(Sharing):
    """The caller sees that the blocks took everything."""

    def finish(self, h, shared):
        return self.head(h) if not shared else self.head(h) * len(shared)


class RotatingBlock(TakingBlock):
    def take(self, shared):
        shared.insert(0, shared.pop())
        return shared[0]


class RotatedList(Sharing):
    block = RotatingBlock


class DequeOfSkips(Sharing):
    def pack(self, skips):
        return collections.deque(skips)


class NestedTaking(TakingBlock):
    def take(self, shared):
        level = shared[-1]
        skip = level.pop()
        if not level:
            shared.pop()
        return skip


class NestedLists(Sharing):
    block = NestedTaking

    def pack(self, skips):
        return [[skips[0]], skips[1:]]


class SkipStack(list):
    """A list that remembers how often it was asked."""

    asked = 0

    def pop(self, index=-1):
        self.asked += 1
        return super().pop(index)


class OwnListClass(Sharing):
    def pack(self, skips):
        return SkipStack(skips)

    def finish(self, h, shared):
        return self.head(h) * shared.asked


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


class GeneratorOfSkips(Sharing):
    """The blocks draw from a generator."""

    def pack(self, skips):
        return (skip for skip in reversed(skips))

    class Drawing(TakingBlock):
        def take(self, shared):
            return next(shared)

    block = Drawing


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


class ReturnsItsFeatures(Sharing):
    """The features of the encoder, unscaled, are a part of the result."""

    block = WritingBlock

    def pack(self, skips):
        return collections.OrderedDict(skips=tuple(skips))

    def finish(self, h, shared):
        return collections.OrderedDict(out=self.head(h), features=shared["skips"])


class AddingBlock(TakingBlock):
    """The skip is added in the block, behind a function."""

    def __init__(self, k):
        super().__init__(k)
        self.conv = conv(C, C)

    def forward(self, h, shared, i):
        return F.silu(self.conv(self.up(h) + self.k(i, self.take(shared))))


class AddsFromAList(Sharing):
    block = AddingBlock

    def finish(self, h, shared):
        return self.head(h) * (1 + len(shared))


class PoppingByKey(AddingBlock):
    def take(self, shared):
        return shared.pop(max(shared))


class AddsFromADict(Sharing):
    block = PoppingByKey

    def pack(self, skips):
        return dict(enumerate(skips))

    def finish(self, h, shared):
        return self.head(h) * (1 + len(shared))


class ReplacingBlock(AddingBlock):
    """What the decoder computed takes the place of the skip."""

    def forward(self, h, shared, i):
        shared[i - 1] = h = super().forward(h, [shared[i - 1]], i)
        return h


class ReplacesInTheList(Sharing):
    block = ReplacingBlock

    def finish(self, h, shared):
        return self.head(h) + sum(level.mean() for level in shared)


class AppendingBlock(TakingBlock):
    """Reads by number, and appends its own result for the blocks that follow."""

    def forward(self, h, shared, i):
        h = F.silu(self.conv(torch.cat([self.up(h), self.k(i, shared[i - 1])], 1)))
        shared.append(h)
        return h + 0.1 * len(shared)


class AppendsToTheList(Sharing):
    block = AppendingBlock


class TupleOfStates(Sharing):
    """Skips in a tuple of dataclasses. The network returns them, and they are not scaled there."""

    class Reading(AddingBlock):
        def take(self, shared):
            return shared[len(shared) - self.level].h

        level = 0

    block = Reading

    def __init__(self):
        super().__init__()
        for level, block in enumerate(self.dec, 1):
            block.level = level

    def pack(self, skips):
        return tuple(State(skip, []) for skip in skips)

    def finish(self, h, shared):
        return self.head(h), shared


class KeepsHistory(Plain):
    """The model keeps a deque and nested lists of its own, which a plan must leave as they are."""

    kind = "5"
    must = True

    def __init__(self):
        super().__init__()
        self.history, self.log = collections.deque(maxlen=2), {"sizes": [[]]}

    def encode(self, x):
        self.history.append(float(x.mean()))
        self.log["sizes"][0].append(len(x))
        return super().encode(x * len(self.log["sizes"][0]))


class KeepsBuffers(Plain):
    """A running mean that is updated in evaluation as well."""

    kind = "5"
    must = True

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))

    def encode(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 2, 3)).view(3, 1, 1)
        return super().encode(x - self.mean)


# ------------------------------------------------------------------------------ 6: more than a factor


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


# ------------------------------------------------------------------------------ 7: folding


class Folded(WidePyramid):
    """Every decoder convolution is made by `layer`."""

    kind = "7"
    judge = "folding"

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList(self.layer() for _ in range(3))

    def layer(self) -> nn.Module:
        return conv(2 * C, C)


class FoldedPlain(Folded):
    must = True


class ClampedConv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.clamp(-0.2, 0.2), self.bias, padding=1)


class ClampedWeights(Folded):
    def layer(self):
        return ClampedConv(2 * C, C, 3, padding=1)


class ClampedInside(nn.Conv2d):
    """The same in the method that nn.Conv2d.forward calls."""

    def _conv_forward(self, input, weight, bias):  # noqa: A002
        return super()._conv_forward(input, weight.clamp(-0.2, 0.2), bias)


class ClampedInsideTheLayer(Folded):
    def layer(self):
        return ClampedInside(2 * C, C, 3, padding=1)


class WeightAsAProperty(nn.Conv2d):
    """The weight that the layer shows is computed."""

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return torch.sin(value) if name == "weight" else value


class ComputedWeight(Folded):
    def layer(self):
        return WeightAsAProperty(2 * C, C, 3, padding=1)


class NormalisedConv(nn.Conv2d):
    """EDM2: the weights are brought to unit magnitude in each forward."""

    def forward(self, x):
        return self._conv_forward(x, F.normalize(self.weight, dim=(1, 2, 3)), self.bias)


class NormalisedWeights(Folded):
    def layer(self):
        return NormalisedConv(2 * C, C, 3, padding=1)


class WeightNorm(Folded):
    def layer(self):
        return nn.utils.parametrizations.weight_norm(conv(2 * C, C))


class SpectralNorm(Folded):
    def layer(self):
        return nn.utils.parametrizations.spectral_norm(conv(2 * C, C))


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


class TiedToTheEncoder(Pyramid):
    """An autoencoder's old trick: the decoder's layer has the encoder's weight."""

    kind = "7"
    judge = "folding"

    def __init__(self):
        super().__init__()
        for n in range(3):
            self.dec[n].weight = self.down[n].weight


class SharedLayer(Folded):
    """One layer at all levels."""

    def __init__(self):
        super().__init__()
        self.dec = nn.ModuleList([conv(2 * C, C)] * 3)


class WeightReadElsewhere(Folded):
    """The weight is a part of the result, as a penalty."""

    def forward(self, x):
        return super().forward(x), sum(dec.weight.square().mean() for dec in self.dec)


class WeightUsedByAFunction(Folded):
    """A second use of the weight, by a function."""

    def forward(self, x):
        h = super().forward(x)
        return h + F.conv2d(x, self.dec[0].weight[:3, C : C + 3], padding=1)


class ViewOfTheWeight(Folded):
    """The stem is a view of the weight that folding would change."""

    def encode(self, x):
        return super().encode(x + F.conv2d(x, self.dec[0].weight.detach()[:3, C : C + 3], padding=1))


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


# ------------------------------------------------------------------------------ 8: ambiguous


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
    """Two additive decoders of blocks, merged inside of the blocks, the second of which is meant."""

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


# ------------------------------------------------------------------------------ partly seen


class SliceInTheMiddle(WidePyramid):
    """The middle level fills a buffer, the others concatenate."""

    kind = "3"

    def join(self, i, h, skip):
        if i != 2:
            return torch.cat([h, self.k(i, skip)], 1)
        joined = h.new_empty(len(h), 2 * C, *h.shape[2:])
        joined[:, :C], joined[:, C:] = h, self.k(i, skip)
        return joined


class StackInTheMiddle(Pyramid):
    kind = "3"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(torch.stack([h, self.k(i, skips.pop())]).sum(0) if i == 2 else h + self.k(i, skips.pop())))
        return self.head(h)


class MaximumInTheMiddle(Pyramid):
    """No sum, but a merge all the same: the plan must say so, or stop."""

    kind = "3"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(torch.maximum(h, self.k(i, skips.pop())) if i == 2 else h + self.k(i, skips.pop())))
        return self.head(h)


class ProductInTheMiddle(WidePyramid):
    kind = "3"

    def join(self, i, h, skip):
        return (h * self.k(i, skip)).repeat(1, 2, 1, 1) if i == 2 else torch.cat([h, self.k(i, skip)], 1)


class AttentionInTheMiddle(WidePyramid):
    """The middle skip is read by cross-attention."""

    kind = "3"

    def join(self, i, h, skip):
        if i != 2:
            return torch.cat([h, self.k(i, skip)], 1)
        q, k = h.flatten(2).mT, self.k(i, skip).flatten(2).mT
        return ((q @ k.mT).softmax(-1) @ k).mT.reshape(h.shape).repeat(1, 2, 1, 1)


class DotInTheMiddle(Pyramid):
    """The middle level joins by a weighted matrix product over two features."""

    kind = "3"

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([[0.6], [0.4]]))

    def join(self, i, h, skip):
        if i == 2:
            return (torch.stack([h, self.k(i, skip)], -1) @ self.weights).squeeze(-1)
        return h + self.k(i, skip)


# ------------------------------------------------------------------------------ reach


class Reach(Pyramid):
    must = True


class WideReach(WidePyramid):
    must = True


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


class CheckpointedConcat(WideReach):
    """A local function that is recomputed in the backward; it takes the skip from around it."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            skip = skips.pop()

            def level(h, up=up, dec=dec, i=i, skip=skip):
                return F.silu(dec(F.silu(torch.cat([up(h), self.k(i, skip)], 1))))

            h = checkpoint(level, h, use_reentrant=False)
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


# ------------------------------------------------------------------------------ after: changed once it is scaled


class LayerSwapped(WidePyramid):
    """A layer of the decoder is replaced by another of the same shape."""

    kind = "after"

    @staticmethod
    def change(model):
        torch.manual_seed(5)
        model.dec[1] = conv(2 * C, C)


class BlockSwapped(Blocks):
    kind = "after"

    @staticmethod
    def change(model):
        torch.manual_seed(5)
        model.dec[1] = UpBlock(model.k)


class Adapter(nn.Module):
    """LoRA: the layer, and a low-rank one beside it."""

    def __init__(self, base):
        super().__init__()
        torch.manual_seed(6)
        self.base, self.low, self.high = base, nn.Conv2d(2 * C, 2, 1), nn.Conv2d(2, C, 1)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


class AdapterInjected(WidePyramid):
    """The adapter reads the concatenation beside the layer that is hooked."""

    kind = "after"

    @staticmethod
    def change(model):
        for n in range(3):
            model.dec[n] = Adapter(model.dec[n])


class ForwardPatchedOnInstance(Plain):
    kind = "after"

    @staticmethod
    def change(model):
        model.forward = types.MethodType(lambda self, x: torch.tanh(plain_forward(self, x)), model)


class ForwardPatchedOnClass(Pyramid):
    kind = "after"

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)

    original = forward

    @staticmethod
    def change(model):
        ForwardPatchedOnClass.forward = lambda self, x: 2 * plain_forward(self, x)

    @staticmethod
    def undo(model):
        ForwardPatchedOnClass.forward = ForwardPatchedOnClass.original


class JoinPatchedOnClass(Pyramid):
    kind = "after"

    def join(self, i, h, skip):
        return h + self.k(i, skip)

    original = join

    @staticmethod
    def change(model):
        JoinPatchedOnClass.join = lambda self, i, h, skip: F.silu(h + self.k(i, skip))

    @staticmethod
    def undo(model):
        JoinPatchedOnClass.join = JoinPatchedOnClass.original


class PartialAfterwards(Pyramid):
    kind = "after"

    def forward(self, x, gain=1.0):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h) * gain

    @staticmethod
    def change(model):
        model.forward = functools.partial(model.forward, gain=0.5)


class CompiledAfterwards(Plain):
    kind = "after"

    @staticmethod
    def change(model):
        model.forward = torch.compile(model.forward, backend="eager", dynamic=False)


class CompiledInPlaceAfterwards(WidePyramid):
    kind = "after"

    @staticmethod
    def change(model):
        model.compile(backend="eager", dynamic=False)


class AccelerateAfterwards(Plain):
    kind = "after"
    change = staticmethod(accelerate_hook)


class AccelerateBlocksAfterwards(Blocks):
    kind = "after"

    @staticmethod
    def change(model):
        for block in model.dec:
            accelerate_hook(block)


def with_gain():
    gain = 1.0

    def join(h, skip):
        return gain * h + skip

    def turn(value):
        nonlocal gain
        gain = value

    return join, turn


closed_join, turn_gain = with_gain()


class ClosureChanged(Pyramid):
    """The function that joins reads a value from around it, and that value changes."""

    kind = "after"

    def join(self, i, h, skip):
        return closed_join(h, self.k(i, skip))

    @staticmethod
    def change(model):
        turn_gain(3.0)

    @staticmethod
    def undo(model):
        turn_gain(1.0)


def forward_with_gain():
    gain = 1.0

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(gain * up(h) + self.k(i, skips.pop())))
        return self.head(h)

    def turn(value):
        nonlocal gain
        gain = value

    return forward, turn


closed_forward, turn_forward = forward_with_gain()


class ClosureOfForwardChanged(Pyramid):
    kind = "after"
    forward = closed_forward

    @staticmethod
    def change(model):
        turn_forward(3.0)

    @staticmethod
    def undo(model):
        turn_forward(1.0)


GAIN = 1.0


class GlobalChanged(Pyramid):
    """A global of the module that the method reads."""

    kind = "after"
    must = True

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(GAIN * up(h) + self.k(i, skips.pop())))
        return self.head(h)

    @staticmethod
    def change(model):
        globals()["GAIN"] = 3.0

    @staticmethod
    def undo(model):
        globals()["GAIN"] = 1.0


class DefaultChanged(Pyramid):
    """The default value of a parameter."""

    kind = "after"

    def forward(self, x, gain=1.0):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(gain * up(h) + self.k(i, skips.pop())))
        return self.head(h)

    @staticmethod
    def change(model):
        DefaultChanged.forward.__defaults__ = (3.0,)

    @staticmethod
    def undo(model):
        DefaultChanged.forward.__defaults__ = (1.0,)


class HooksCleared(WidePyramid):
    """Somebody clears all hooks."""

    kind = "after"

    @staticmethod
    def change(model):
        for module in model.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()


class LevelsReordered(WidePyramid):
    """The layers of the decoder change places."""

    kind = "after"

    @staticmethod
    def change(model):
        model.dec[0], model.dec[1] = model.dec[1], model.dec[0]


class InDouble(WidePyramid):
    kind = "after"
    must = True

    def forward(self, x):
        return super().forward(x.to(self.head.weight.dtype)).float()

    @staticmethod
    def change(model):
        model.double()


SOURCE = """
import torch.nn.functional as F
from hard_networks import Pyramid

class FromAFile(Pyramid):
    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec(up(h) + self.k(i, skips.pop())))
        return self.head(h)
"""


class EditedBeforeScaling(Pyramid):
    """The file of the network is edited after the import: what runs is not what can be read."""

    kind = "after"
    judge = "source"
    edit: ClassVar[tuple[str, str]] = ("dec(up(h) + self.k(i, skips.pop()))", "dec(self.k(i, skips.pop()) + 2 * up(h))")
    when = "before"


class LinesAddedBeforeScaling(EditedBeforeScaling):
    edit = ("class FromAFile", "A = 1\n\n\nclass FromAFile")


class EditedAfterScaling(EditedBeforeScaling):
    when = "after"


class ReloadedAfterScaling(EditedBeforeScaling):
    when = "reload"


def _networks(net) -> list[type]:
    return [net, *(deeper for below in net.__subclasses__() for deeper in _networks(below))]


# A network that others are made from is no case by itself.
BASES = {Net, Pyramid, WidePyramid, Tokens, Blocks, Keyed, NoSkips, Sharing, Folded, Decoders, Reach, WideReach}
BASES |= {Plain, Task, Registered}
NETWORKS: list[Any] = [
    net for net in list(globals().values()) if isinstance(net, type) and net in set(_networks(Net)) - BASES
]
