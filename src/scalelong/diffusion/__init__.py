"""Diffusion around the noise process of `scalelong.noise`: what goes into a network, and images out of it.

conditions   nothing, a class or a text: tensors with one row per image
latents      an autoencoder, and a data set seen through it
inputs       from a batch of any data set to (x_t, t, condition); which images make up a step
solvers      classifier-free guidance and diffusers' samplers
images       from seeds and prompts to images
"""

from ..noise import NoiseProcess, Predict, Prediction, Schedule, as_epsilon, epsilon_losses, losses, target
from .conditions import ClassCondition, Conditions, HashedWords, PretrainedTextEncoder, TextCondition, Unconditional
from .images import ImageMaker, Request, requests
from .inputs import DataOrder, Examples, InputMaker, NoisyInputs, by_level, held_out_loss, held_out_losses
from .latents import Autoencoder, LatentData, encode_data
from .solvers import SampleSettings, guided, sample
