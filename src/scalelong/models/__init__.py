"""Networks, and one way to call any of them.

uvit         U-ViT, from the formula to the model
arguments    its arguments, checked, and its weights before training
cpu          its blocks on a CPU, fused; memory that a step frees and the next one takes
presets      the networks of the paper: U-ViT's sizes, diffusers' UNets
official     weights of the authors' U-ViT
pretrained   a folder of weights with its scaling
calling      arguments, outputs and conditions of any model
"""

from .calling import (
    CONTEXT_ARGUMENTS as CONTEXT_ARGUMENTS,
    LABEL_ARGUMENTS as LABEL_ARGUMENTS,
    Denoiser as Denoiser,
    by_name as by_name,
    call_arguments as call_arguments,
    count_parameters as count_parameters,
    evaluating as evaluating,
    first_tensor as first_tensor,
    foreign_failure as foreign_failure,
    output_tensor as output_tensor,
    require_condition_used as require_condition_used,
    tensors_in as tensors_in,
)
from .cpu import (
    fuse_ as fuse_,
    fused as fused,
    gain_of_bfloat16 as gain_of_bfloat16,
    keep_freed_memory as keep_freed_memory,
    unfuse_ as unfuse_,
)
from .official import (
    arguments_of as arguments_of,
    official_scaling as official_scaling,
    read_weights as read_weights,
)
from .presets import (
    UNET_PRESETS as UNET_PRESETS,
    UVIT_PRESETS as UVIT_PRESETS,
    UVIT_PUBLISHED as UVIT_PUBLISHED,
    UNetPreset as UNetPreset,
    preset_arguments as preset_arguments,
    unet as unet,
)
from .pretrained import (
    from_pretrained as from_pretrained,
    require_buildable as require_buildable,
)
from .uvit import (
    PositionEmbedding as PositionEmbedding,
    SkipMerge as SkipMerge,
    UViT as UViT,
)
