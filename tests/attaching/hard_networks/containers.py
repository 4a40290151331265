"""Kind 5, containers: what blocks share, and what a model keeps."""

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .base import C, Plain, Pyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


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
