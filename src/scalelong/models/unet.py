"""The UNets of the paper, as configurations of diffusers' classes.

The paper gives their sizes, not their configurations. These are the nearest ones that diffusers can build;
`scalelong models` prints the parameter counts and the differences.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import InvalidConfigError, MissingDependencyError
from ..scaling.baselines import ResidualSpec
from .dropout import draw_fewer_
from .residuals import scale_residuals_


@dataclass(frozen=True)
class UNetPreset:
    """A class of diffusers, its arguments, and what the paper says about the network."""

    kind: str
    arguments: dict[str, Any]
    published: int
    """Parameters in millions."""
    note: str


UNET_PRESETS: dict[str, UNetPreset] = {
    "cifar10": UNetPreset(
        kind="UNet2DModel",
        published=36,
        note="DDPM's CIFAR-10 network: attention at 16x16, dropout 0.1",
        arguments={
            "sample_size": 32,
            "block_out_channels": (128, 256, 256, 256),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 2,
            "attention_head_dim": None,
            "downsample_padding": 0,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "norm_eps": 1e-6,
            "dropout": 0.1,
        },
    ),
    "imagenet64": UNetPreset(
        kind="UNet2DModel",
        published=144,
        note="IDDPM/ADM style: scale-shift time, attention at 16x16 and 8x8, 32 channels per head, class embedding",
        arguments={
            "sample_size": 64,
            "block_out_channels": (160, 320, 480, 640),
            "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            "layers_per_block": 2,
            "attention_head_dim": 32,
            "num_class_embeds": 1000,
            "resnet_time_scale_shift": "scale_shift",
        },
    ),
    "mscoco256": UNetPreset(
        kind="UNet2DConditionModel",
        published=53,
        note="in latent space; the published 260M are 53M of UNet, 123M of text encoder and 84M of autoencoder",
        arguments={
            "sample_size": 32,
            "block_out_channels": (128, 256, 384),
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "layers_per_block": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 768,
        },
    ),
}


def unet(name: str, *, residual_scaling: ResidualSpec = "none", **overrides: Any) -> nn.Module:
    """A UNet of the paper, built with diffusers: `unet("cifar10")`, `unet("cifar10", dropout=0.0)`.

    Scale its long skips with `scale_skips_(model, "cs")`.
    """
    if name not in UNET_PRESETS:
        raise InvalidConfigError(f"unknown UNet preset {name!r}; known: {', '.join(UNET_PRESETS)}")
    try:
        import diffusers
    except ImportError as error:
        raise MissingDependencyError("diffusers", "train", f"the UNet preset {name!r}") from error
    preset = UNET_PRESETS[name]
    model: nn.Module = getattr(diffusers, preset.kind)(**{**preset.arguments, **overrides})
    draw_fewer_(model)
    return scale_residuals_(model, residual_scaling) if residual_scaling != "none" else model
