"""Figure 3 (c): a U-ViT whose input carries extra noise while it is trained (Section 3.3)."""

from typing import Any

import torch
from torch import Tensor

from ...models import UViT
from ...models.presets import preset_arguments


class NoisyInputUViT(UViT):
    """Adds extra_noise · N(0, I) to x_t in training; what it is judged on is clean."""

    def __init__(self, *, extra_noise: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.extra_noise = extra_noise

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if self.training:
            # From the global generator, which a run seeds, saves and restores: equal for all methods of a seed.
            x = x + self.extra_noise * torch.randn_like(x)
        return super().forward(x, t, y, context)


def noisy_uvit(
    image_size: Any, channels: int, classes: int | None, extra_noise: float, preset: str = "", **options: Any
) -> NoisyInputUViT:
    """The factory that a configuration names."""
    arguments = preset_arguments(preset) if preset else {}
    known = {"image_size": image_size, "channels": channels, "classes": classes}
    return NoisyInputUViT(extra_noise=extra_noise, **{**arguments, **known, **options})
