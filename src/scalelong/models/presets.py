"""The networks of the paper and its parent by name: U-ViTs by data set, size and patch, and UNets of diffusers."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..config import EARLIER
from ..errors import AlreadyScaledError, InvalidConfigError
from ..optional import needs
from ..scaling import ResidualBranch, ResidualSpec, validate_residual

_SIZES: dict[str, dict[str, Any]] = {
    "small": {"dim": 512, "depth": 12, "heads": 8},
    "small-deep": {"dim": 512, "depth": 16, "heads": 8},
    "mid": {"dim": 768, "depth": 16, "heads": 12},
    "large": {"dim": 1024, "depth": 20, "heads": 16},
    "huge": {"dim": 1152, "depth": 28, "heads": 16},
}

# Latents of images of 256 or 512 pixels are 32 or 64 wide and have 4 channels. Of 1001 classes one is the null class.
_LATENT_256 = {"image_size": 32, "channels": 4}
_LATENT_512 = {"image_size": 64, "channels": 4}
_CLIP = {"context_dim": 768, "context_length": 77}

UVIT_PRESETS: dict[str, dict[str, Any]] = {
    "cifar10-s2": {**_SIZES["small"], "image_size": 32, "patch_size": 2},
    "celeba64-s4": {**_SIZES["small"], "image_size": 64, "patch_size": 4},
    "imagenet64-m4": {**_SIZES["mid"], "image_size": 64, "patch_size": 4, "classes": 1000},
    "imagenet64-l4": {**_SIZES["large"], "image_size": 64, "patch_size": 4, "classes": 1000},
    "imagenet256-l2": {**_SIZES["large"], **_LATENT_256, "patch_size": 2, "classes": 1001},
    "imagenet256-h2": {**_SIZES["huge"], **_LATENT_256, "patch_size": 2, "classes": 1001, "final_conv": False},
    "imagenet512-l4": {**_SIZES["large"], **_LATENT_512, "patch_size": 4, "classes": 1001},
    "imagenet512-h4": {**_SIZES["huge"], **_LATENT_512, "patch_size": 4, "classes": 1001, "final_conv": False},
    "mscoco256-s2": {**_SIZES["small"], **_LATENT_256, **_CLIP, "patch_size": 2},
    "mscoco256-s2-deep": {**_SIZES["small-deep"], **_LATENT_256, **_CLIP, "patch_size": 2},
}

# Millions of parameters, as published. The text-to-image networks of the paper's Table 1 (252M, 265M, 260M) are counted
# there with a text encoder of 123M and an autoencoder of 84M.
UVIT_PUBLISHED = {
    "cifar10-s2": 44,
    "celeba64-s4": 44,
    "imagenet64-m4": 131,
    "imagenet64-l4": 287,
    "imagenet256-l2": 287,
    "imagenet256-h2": 501,
    "imagenet512-l4": 287,
    "imagenet512-h4": 501,
    "mscoco256-s2": 45,
    "mscoco256-s2-deep": 58,
}


def preset_arguments(name: str) -> dict[str, Any]:
    if name not in UVIT_PRESETS:
        raise InvalidConfigError(f"unknown U-ViT preset {name!r}; known: {', '.join(UVIT_PRESETS)}")
    # The start is the authors' as well: reproductions begin where theirs began.
    return {**EARLIER, **UVIT_PRESETS[name], "init_std": 0.02, "final_start": "authors"}


# Table 3's baselines for diffusers' UNets: scale the residual branches of a network that is built already.

# The last layer of each residual branch in diffusers' blocks, by the class of the block.
_LAST_LAYERS = {
    "ResnetBlock2D": ("conv2",),
    "Attention": ("to_out.0",),
    "FeedForward": ("net.2",),
}


class _ScaleOutput:
    """A forward hook that scales what the layer returns."""

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG002
        return layer.residual_branch.scale(output)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def scale_residuals_(model: nn.Module, spec: ResidualSpec) -> nn.Module:
    """Scale every residual branch of a diffusers UNet by τ or, for "rezero", by a learned scalar that starts at 0."""
    validate_residual(spec)
    layers = [
        block.get_submodule(name) for block in model.modules() for name in _LAST_LAYERS.get(type(block).__name__, ())
    ]
    if not layers:
        raise InvalidConfigError(
            f"{type(model).__name__} has none of the residual blocks that residual_scaling knows: "
            f"{', '.join(_LAST_LAYERS)}; for U-ViT pass residual_scaling= to its constructor"
        )
    if any(hasattr(layer, "residual_branch") for layer in layers):
        raise AlreadyScaledError("the residual branches of this model are scaled already")
    if spec == "none":
        return model
    for layer in layers:
        layer.residual_branch = ResidualBranch(spec)
        layer.register_forward_hook(_ScaleOutput())
    return model


# The UNets of the paper, as configurations of diffusers' classes, and a small one for CPUs.
#
# The paper gives their sizes, not their configurations. These are the nearest ones that diffusers can build;
# `scalelong models` prints the parameter counts and the differences.


@dataclass(frozen=True)
class UNetPreset:
    """A class of diffusers, its arguments, and what the paper says about the network."""

    kind: str
    arguments: dict[str, Any]
    published: int | None
    """Parameters in millions; None where the network is not the paper's."""
    note: str


UNET_PRESETS: dict[str, UNetPreset] = {
    "small": UNetPreset(
        kind="UNet2DModel",
        published=None,
        note="for a few hundred images and two cores: what `scalelong train FOLDER` begins with",
        arguments={
            "sample_size": 32,
            "block_out_channels": (32, 64, 96),
            "down_block_types": ("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            "layers_per_block": 1,
            "attention_head_dim": 16,
            "norm_num_groups": 8,
        },
    ),
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
    """A UNet by name, built with diffusers: `unet("cifar10")`, `unet("cifar10", dropout=0.0)`.

    Scale its long skips with `scale_skips_(model, "cs")`.
    """
    if name not in UNET_PRESETS:
        raise InvalidConfigError(f"unknown UNet preset {name!r}; known: {', '.join(UNET_PRESETS)}")
    diffusers = needs("diffusers", "train", f"the UNet preset {name!r}")
    preset = UNET_PRESETS[name]
    model: nn.Module = getattr(diffusers, preset.kind)(**{**preset.arguments, **overrides})
    return scale_residuals_(model, residual_scaling) if residual_scaling != "none" else model
