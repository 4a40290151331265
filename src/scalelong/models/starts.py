"""The weights of a U-ViT before the first step of training."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .arguments import InitStd

# E[gelu(z)²] for a standard normal z.
GELU_MOMENT = 0.42522


def draw_weights_(layers: Iterable[Any], std: InitStd) -> None:
    """Draw the weights of linear layers and merges; convolutions and the class embedding keep torch's defaults.

    A number is the deviation of all weights, as in the authors' code. "unit" gives each layer a gain of 1.
    """
    for layer in layers:
        deviation = 1 / math.sqrt(layer.weight.shape[1]) if std == "unit" else std
        nn.init.trunc_normal_(layer.weight, std=deviation)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def unit_gain_(blocks: Sequence[Any], embedding: nn.Conv2d) -> None:
    """Unit-gain blocks (g = 1 in the theory), for pre-norm blocks: x + f(norm(x)) has the size of x.

    The branches get gain 1 and are then divided by √(their number), so that all of them together add about as much as
    the features have. The convolution before the blocks keeps the size of the image too.
    """
    for block in blocks:
        block.attention.out.weight /= math.sqrt(2 * len(blocks))
        block.mlp.reduce.weight /= math.sqrt(2 * len(blocks) * GELU_MOMENT)
    # torch's default has a variance of 1 / (3 fan_in).
    embedding.weight *= math.sqrt(3)


@torch.no_grad()
def start_as_identity_(layer: nn.Conv2d) -> None:
    """A random 3x3 kernel all but removes some frequencies of the image, which the layers before cannot put back.

    The network then learns its prediction as fast as it learns a different kernel, and that depends on the seed.
    """
    nn.init.dirac_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
