"""No long skip at all. The answer has to be the same each time."""

import torch
import torch.nn.functional as F
from torch import nn

from .base import Block, C, Net, conv

# Networks are written here as people write them, also where a type checker would object.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleVariableOverride=false, reportSelfClsParameterName=false


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
