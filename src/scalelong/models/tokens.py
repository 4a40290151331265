"""Images, times and positions as tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """[cos(t ω_k) ⊕ sin(t ω_k)], ω_k = 10000^(-k/(dim/2)), in fp32."""
    count = dim // 2
    frequencies = torch.exp(torch.arange(count, device=t.device, dtype=torch.float32) * (-math.log(10000) / count))
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class PositionEmbedding(nn.Module):
    """One learned vector per token: the extra tokens first, then the patches row by row."""

    def __init__(self, extra_tokens: int, grid: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.extra_tokens, self.grid = extra_tokens, grid
        self.weight = nn.Parameter(torch.empty(1, extra_tokens + grid[0] * grid[1], dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """For a different grid than the one that was learned, the patches' part is interpolated."""
        if grid == self.grid:
            return self.weight
        extra, patches = self.weight[:, : self.extra_tokens], self.weight[:, self.extra_tokens :]
        image = patches.transpose(1, 2).unflatten(2, self.grid).float()
        resized = F.interpolate(image, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([extra, resized.flatten(2).transpose(1, 2).to(extra.dtype)], dim=1)


def unpatchify(tokens: Tensor, grid: tuple[int, int], patch_size: int, channels: int) -> Tensor:
    """(B, rows·columns, p·p·C) to (B, C, H, W)."""
    rows, columns = grid
    x = tokens.reshape(-1, rows, columns, patch_size, patch_size, channels)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, rows * patch_size, columns * patch_size)
