"""Training in the latent space of an autoencoder: images are encoded once, samples are decoded at the end."""

from .autoencoder import Autoencoder, AutoencoderError
from .data import LatentData, encode_data, sample_latents

__all__ = ["Autoencoder", "AutoencoderError", "LatentData", "encode_data", "sample_latents"]
