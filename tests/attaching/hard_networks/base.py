"""The networks that the others are made from, and the coefficients that each applies to its own skips."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false

C = 6  # channels at every level, so that no shape gives a mistake away


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
    kind = ""
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


class WidePyramid(Pyramid):
    wide = 2

    def join(self, i, h, skip):
        return torch.cat([h, self.k(i, skip)], 1)


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
