"""Diffusion around the noise process of `scalelong.noise`: what goes into a network, and images out of it.

conditions   nothing, a class or a text: tensors with one row per image
latents      an autoencoder, and a data set seen through it
inputs       from a batch of any data set to (x_t, t, condition); which images make up a step
sampling     guidance, diffusers' samplers, and images from seeds and prompts
"""

from .conditions import (
    ClassCondition as ClassCondition,
    Conditions as Conditions,
    HashedWords as HashedWords,
    PretrainedTextEncoder as PretrainedTextEncoder,
    TextCondition as TextCondition,
    TextEncoder as TextEncoder,
    Unconditional as Unconditional,
    cache_captions as cache_captions,
    words_of as words_of,
)
from .inputs import (
    DataOrder as DataOrder,
    Examples as Examples,
    InputMaker as InputMaker,
    NoisyInputs as NoisyInputs,
    by_level as by_level,
    held_out_loss as held_out_loss,
    held_out_losses as held_out_losses,
    split_batch as split_batch,
)
from .latents import (
    Autoencoder as Autoencoder,
    LatentData as LatentData,
    encode_data as encode_data,
    sample_latents as sample_latents,
)
from .sampling import (
    ImageMaker as ImageMaker,
    Request as Request,
    SampleSettings as SampleSettings,
    as_picture as as_picture,
    diffusers as diffusers,
    guided as guided,
    image_grid as image_grid,
    prompted_grid as prompted_grid,
    requests as requests,
    sample as sample,
    scheduler as scheduler,
)
