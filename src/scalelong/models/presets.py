"""The U-ViTs of the paper and its parent, by data set, size and patch."""

from typing import Any

from ..errors import InvalidConfigError

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


def preset_arguments(name: str) -> dict[str, Any]:
    if name not in UVIT_PRESETS:
        raise InvalidConfigError(f"unknown U-ViT preset {name!r}; known: {', '.join(UVIT_PRESETS)}")
    # The start is the authors' as well: reproductions begin where theirs began.
    return {**UVIT_PRESETS[name], "init_std": 0.02, "final_start": "authors"}
