"""Networks: U-ViT, and presets of diffusers' UNets."""

from .presets import UNET_PRESETS, UVIT_PRESETS, UNetPreset, unet
from .uvit import UViT

__all__ = ["UNET_PRESETS", "UVIT_PRESETS", "UNetPreset", "UViT", "unet"]
