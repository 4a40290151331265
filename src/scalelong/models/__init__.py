"""Networks: U-ViT, and presets of diffusers' UNets."""

from .presets import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UNetPreset, unet
from .uvit import UViT

__all__ = ["UNET_PRESETS", "UVIT_PRESETS", "UVIT_PUBLISHED", "UNetPreset", "UViT", "unet"]
