"""Networks of others: a U-ViT of stock modules as one would write it by hand, and a UNet that concatenates."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.models import UViT


class PlainAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(batch, length, dim))


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, merges: bool) -> None:
        super().__init__()
        self.merge = nn.Linear(2 * dim, dim) if merges else None
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = PlainAttention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.merge is not None and skip is not None:
            x = self.merge(torch.cat([x, skip], dim=-1))
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainUViT(nn.Module):
    """The function of `UViT(image_size, patch_size, channels, dim, depth, heads)`, without labels and text."""

    def __init__(self, image_size: int, patch_size: int, channels: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patch_size, self.channels, self.side = patch_size, channels, image_size // patch_size
        self.patch_embedding = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.position_embedding = nn.Parameter(torch.zeros(1, self.side**2 + 1, dim))
        self.encoder = nn.ModuleList(PlainBlock(dim, heads, merges=False) for _ in range(depth // 2))
        self.middle = PlainBlock(dim, heads, merges=False)
        self.decoder = nn.ModuleList(PlainBlock(dim, heads, merges=True) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(dim)
        self.to_patches = nn.Linear(dim, patch_size**2 * channels)
        self.final_conv = nn.Conv2d(channels, channels, 3, padding=1)
        half = dim // 2
        self.frequencies = torch.exp(torch.arange(half) * (-math.log(10000) / half))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * self.frequencies
        time_token = torch.cat([angles.cos(), angles.sin()], dim=-1)[:, None]
        patches = self.patch_embedding(x).flatten(2).transpose(1, 2)
        x = torch.cat([time_token, patches], dim=1) + self.position_embedding
        skips = []
        for block in self.encoder:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for block in self.decoder:
            x = block(x, skips.pop())
        x = self.to_patches(self.norm(x)[:, 1:])
        side, patch, channels = self.side, self.patch_size, self.channels
        x = x.reshape(-1, side, side, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
        return self.final_conv(x.reshape(-1, channels, side * patch, side * patch))

    def load_ours_(self, model: UViT) -> None:
        """The weights of ours, by their places."""
        renamed = {"mlp.expand": "mlp.0", "mlp.reduce": "mlp.2", "position_embedding.weight": "position_embedding"}
        weights: dict[str, Tensor] = {}
        for name, value in model.named_parameters():
            for ours, plain in renamed.items():
                name = name.replace(ours, plain)
            weights[name] = value.detach()
        self.load_state_dict(weights)


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
