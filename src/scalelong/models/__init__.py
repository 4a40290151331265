"""Networks, and one way to call any of them.

uvit         U-ViT, from the formula to the model
starts       its weights before training
cpu          its blocks on a CPU, fused
allocator    memory that a step frees and the next one takes
presets      the networks of the paper: U-ViT's sizes, diffusers' UNets
official     weights of the authors' U-ViT
pretrained   a folder of weights with its scaling
calling      arguments, outputs and conditions of any model
"""

from .allocator import keep_freed_memory
from .calling import (
    CONTEXT_ARGUMENTS,
    LABEL_ARGUMENTS,
    Denoiser,
    by_name,
    call_arguments,
    count_parameters,
    evaluating,
    first_tensor,
    foreign_failure,
    output_tensor,
    require_condition_used,
    tensors_in,
)
from .cpu import fuse_, fused, gain_of_bfloat16, unfuse_
from .official import arguments_of, official_scaling, read_weights
from .presets import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UNetPreset, preset_arguments, unet
from .pretrained import from_pretrained, require_buildable
from .uvit import PositionEmbedding, SkipMerge, UViT
