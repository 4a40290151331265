"""Networks, and one way to call any of them.

uvit         U-ViT, from the formula to the model
cpu          its fast paths on a CPU
resnet       diffusers' residual blocks, which keep less on a CPU
winograd     convolutions with fewer multiplications on a CPU
dropout      dropout with fewer random numbers on a CPU
allocator    memory that a step frees and the next one takes
stack        several U-ViTs of one shape as one network
presets      the networks of the paper: U-ViT's sizes, diffusers' UNets
official     weights of the authors' U-ViT
pretrained   a folder of weights with its scaling
call         arguments, outputs and conditions of any model
"""

from .allocator import keep_freed_memory
from .call import Denoiser, call_arguments, count_parameters, evaluating, output_tensor
from .presets import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UNetPreset, unet
from .pretrained import from_pretrained
from .uvit import SkipMerge, UViT
