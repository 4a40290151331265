"""Networks: U-ViT, and presets of diffusers' UNets."""

from .presets import UVIT_PRESETS
from .unet import UNET_PRESETS, UNetPreset, unet
from .uvit import UViT

__all__ = ["UNET_PRESETS", "UVIT_PRESETS", "UNetPreset", "UViT", "unet"]
