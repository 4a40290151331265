"""The networks: U-ViT, and the presets of the paper.

uvit      the network on one page: tokens, blocks, merges, starts
cpu       leaner branches and dropout for training in float32 on a CPU
presets   sizes by name; diffusers' UNets with the paper's sizes
official  the authors' checkpoints and names
"""

from .presets import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UNetPreset, unet
from .uvit import SkipMerge, UViT

__all__ = ["UNET_PRESETS", "UVIT_PRESETS", "UVIT_PUBLISHED", "SkipMerge", "UNetPreset", "UViT", "unet"]
