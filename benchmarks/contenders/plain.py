"""A U-ViT of stock modules, as one would write it by hand, and races of it against ours in one process.

Both networks have the same weights, the same loop and the same optimiser. They take turns step by step, so that a busy
moment falls on both, and the clock is the processor time of this process.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scalelong.models import UViT

from ..profile import seconds_by_group
from .races import Races

Step = Callable[[], object]

PLAIN, OURS = "plain", "ours"
PROFILED = 5
"""Steps of each network that are profiled."""
FEWEST = 7
"""Rounds of a race, however long they take."""


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


def training_step(model: nn.Module, x: Tensor, t: Tensor, target: Tensor, low: bool = False) -> Step:
    """The step of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            output = model(x, t)
        loss = F.mse_loss(output.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference_step(model: nn.Module, x: Tensor, t: Tensor, low: bool = False) -> Step:
    def step() -> None:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            model(x, t)

    return step


class PlainRace:
    """Steps of both networks in turns, in training or in inference. A call is one turn of each."""

    def __init__(self, *, batch: int, training: bool, turn: float = 0.01, low: bool = False, **size: Any) -> None:
        torch.manual_seed(0)
        ours = UViT(**size)
        plain = PlainUViT(**size)
        plain.load_ours_(ours)
        x = torch.randn(batch, size["channels"], size["image_size"], size["image_size"])
        t, target = torch.linspace(0, 999, batch), torch.randn_like(x)
        with torch.no_grad():
            outputs = plain(x, t)
            self.difference = float((ours(x, t) - outputs).abs().max() / outputs.abs().max())
        given = {"x": x, "t": t, "low": low}
        make = partial(training_step, target=target, **given) if training else partial(inference_step, **given)
        self.steps = {PLAIN: make(plain), OURS: make(ours)}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.steps}
        warm = [min(self._time(step, 1) for step in self.steps.values()) for _ in range(3)]
        self.count = max(1, round(turn / max(warm[-1], 1e-6)))

    @staticmethod
    def _time(step: Step, count: int) -> float:
        # Threads that wait for each other spin: several would count that as work.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for _ in range(count):
            step()
        return (clock() - start) / count

    def about(self) -> dict[str, Any]:
        """The seconds of a step of each network in each group of operations."""
        return {"groups": {name: seconds_by_group(step, PROFILED) for name, step in self.steps.items()}}

    def __call__(self) -> None:
        # To and fro, so that neither always finds the caches as the other left them.
        order = list(self.steps.items())
        for name, step in order if len(self.seconds[OURS]) % 2 == 0 else reversed(order):
            self.seconds[name].append(self._time(step, self.count))


class PlainRaces(Races):
    """Training and inference of each size."""

    def __init__(self, *, sizes: list[dict[str, Any]], rounds: int, seconds: float, low: bool = False) -> None:
        made = [partial(PlainRace, **size, training=each, low=low) for size in sizes for each in (True, False)]
        super().__init__(made, rounds=rounds, fewest=FEWEST, seconds=seconds)
