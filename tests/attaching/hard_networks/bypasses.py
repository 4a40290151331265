"""Kind 2, no effect: methods that are reached in another way than through the class of the instance."""

import functools
import types
from typing import ClassVar

import torch
import torch.nn.functional as F

from .base import Blocks, Plain, Pyramid, UpBlock, WidePyramid

# Networks are written here as people write them, also where a type checker would object.
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
