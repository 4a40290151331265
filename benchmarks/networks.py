"""A network that is scaled from outside."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConcatenatingUNet(nn.Module):
    """A UNet of the other kind: the concatenation is the argument of the decoder blocks, as in guided-diffusion."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(levels)
        )
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for layer in self.down:
            skips.append(F.silu(layer(skips[-1])))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)
