"""Changed once it is scaled: it still holds, or raises."""

import functools
import types
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .base import Blocks, C, Plain, Pyramid, UpBlock, WidePyramid, conv
from .bypasses import accelerate_hook, plain_forward

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


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
