"""What is a long skip: bottlenecks, residuals, merges that are no sums; networks without any."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Block, C, Net, Pyramid, Tokens, WidePyramid, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


class GruBottleneck(Pyramid):
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


class LastMergeOutsideTheLoop(Tokens):
    """Additions between blocks full of residuals; the outermost on a line of its own."""

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


class ResidualBody(Pyramid):
    """DRUNet: every merge on a line of its own, and the innermost goes around a single residual block."""

    def body(self, h):
        return h + self.mid(F.relu(self.dec[0](h)))

    def forward(self, x):
        x1 = self.stem(x)
        x2 = F.relu(self.down[0](x1))
        x3 = F.relu(self.down[1](x2))
        x = self.body(x3)
        x = self.up[0](x + self.k(3, x3))
        x = self.up[1](F.relu(self.dec[1](x + self.k(2, x2))))
        return self.head(F.relu(self.dec[2](x + self.k(1, x1))))


class TextContext(WidePyramid):
    """Keys and values of a text, with those of the image in front of them."""

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


class RecursiveAdd(nn.Module):
    """Each level holds the next and adds its own input, as one line that runs at every depth."""

    def __init__(self, k, i, inner):
        super().__init__()
        self.down, self.up, self.inner, self.k, self.i = conv(C, C, 2), nn.ConvTranspose2d(C, C, 2, 2), inner, k, i

    def forward(self, x):
        return self.up(F.silu(self.inner(F.silu(self.down(x))))) + self.k(self.i, x)


class Recursion(Pyramid):
    def __init__(self):
        super().__init__()
        inner = self.mid
        for i in (3, 2, 1):
            inner = RecursiveAdd(self.k, i, inner)
        self.levels = inner

    def forward(self, x):
        return self.head(F.silu(self.levels(F.silu(self.stem(x)))))


class MaximumInTheMiddle(Pyramid):
    """No sum, but a merge all the same: the plan must say so, or stop."""

    def forward(self, x):
        h, skips = self.encode(x)
        for up, dec in zip(self.up, self.dec, strict=True):
            i, h = len(skips), up(h)
            h = F.silu(dec(torch.maximum(h, self.k(i, skips.pop())) if i == 2 else h + self.k(i, skips.pop())))
        return self.head(h)


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
