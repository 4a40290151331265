"""Ways to build and to call a network: methods that a class does not show, wrappers, later changes."""

import functools
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .base import Blocks, C, Plain, Pyramid, UpBlock, WidePyramid, conv
from .merges import Reach, WideReach

# Networks are written here as people write them, also where a type checker would object.
# ruff: noqa: N805
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


def plain_forward(self, x):
    h, skips = self.encode(x)
    for up, dec in zip(self.up, self.dec, strict=True):
        i = len(skips)
        h = F.silu(dec(up(h) + self.k(i, skips.pop())))
    return self.head(h)


class MethodOnTheInstance(Pyramid):
    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(plain_forward, self)


class PartialForward(Pyramid):
    def __init__(self):
        super().__init__()
        self.forward = functools.partial(self.run, gain=0.9)

    def run(self, x, gain):
        return gain * plain_forward(self, x)


class BoundMethodsInATable(Pyramid):
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
    def __init__(self):
        super().__init__()
        self.joined = torch.compile(self.add, backend="eager", dynamic=True)

    def add(self, h, skip):
        return h + skip

    def join(self, i, h, skip):
        return self.joined(h, self.k(i, skip))


class CallsForwardDirectly(WidePyramid):
    """Layers called through .forward, which no hook sees."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i = len(skips)
            h = F.silu(dec.forward(torch.cat([up.forward(h), self.k(i, skips.pop())], 1)))
        return self.head.forward(h)


class StaticMerge(Pyramid):
    must = True

    @staticmethod
    def merge(h, skip):
        return F.silu(h + skip)

    def join(self, i, h, skip):
        return self.merge(h, self.k(i, skip))


def accelerate_hook(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(model, ModelHook())


class CheckpointedMethod(Reach):
    def level(self, h, skip, i):
        return F.silu(self.dec[3 - i](self.up[3 - i](h) + self.k(i, skip)))

    def forward(self, x):
        h, skips = self.encode(x)
        while skips:
            i = len(skips)
            h = checkpoint(self.level, h, skips.pop(), i, use_reentrant=False)
        return self.head(h)


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


class UnbatchedConcat(WideReach):
    axis = -3

    def join(self, i, h, skip):
        return torch.cat([h, self.k(i, skip)], -3)

    @staticmethod
    def inputs():
        return (torch.randn(3, 16, 16),)


class LayerSwapped(WidePyramid):
    """A layer of the decoder is replaced by another of the same shape."""

    kind = "after"

    @staticmethod
    def change(model):
        torch.manual_seed(5)
        model.dec[1] = conv(2 * C, C)


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


class CompiledInPlaceAfterwards(WidePyramid):
    kind = "after"

    @staticmethod
    def change(model):
        model.compile(backend="eager", dynamic=False)


class AccelerateBlocksAfterwards(Blocks):
    kind = "after"

    @staticmethod
    def change(model):
        for block in model.dec:
            accelerate_hook(block)
