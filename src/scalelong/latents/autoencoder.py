"""diffusers' AutoencoderKL from a local folder."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingDependencyError, ScaleLongError
from ..files import file_digest


class AutoencoderError(ScaleLongError, ValueError):
    """The autoencoder is not where it should be, or does not fit the images."""


class Autoencoder:
    """`folder` holds an AutoencoderKL, or has it in `vae`, as in diffusers' pipelines."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._model_folder = self.folder / "vae" if (self.folder / "vae").is_dir() else self.folder
        if not (self._model_folder / "config.json").is_file():
            raise AutoencoderError(
                f"no autoencoder in {self.folder}: {self._model_folder / 'config.json'} is not there. Put an "
                f"AutoencoderKL of diffusers into this folder, for example stabilityai/sd-vae-ft-ema"
            )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of configuration and weights."""
        files = sorted(path for path in self._model_folder.iterdir() if path.is_file())
        listed = "\n".join(f"{path.name} {file_digest(path)}" for path in files)
        return hashlib.sha256(listed.encode()).hexdigest()

    @cached_property
    def model(self) -> Any:
        try:
            from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        except ImportError as error:
            raise MissingDependencyError("diffusers", "train", "encoding images") from error
        try:
            model = AutoencoderKL.from_pretrained(self._model_folder, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError) as error:
            raise AutoencoderError(f"the autoencoder in {self.folder} cannot be loaded: {error}") from error
        return model.eval()

    @property
    def channels(self) -> int:
        return self.model.config.latent_channels

    @property
    def factor(self) -> int:
        """How many times smaller the latents are."""
        return 2 ** (len(self.model.config.block_out_channels) - 1)

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """Mean and standard deviation of the latents of images in [-1, 1], scaled: (B, 2 channels, H/factor, W/factor).

        The scale of the configuration brings the latents near unit variance, which the noise process is made for.
        """
        distribution = self.model.encode(images).latent_dist
        mean, scale = (distribution.mean - self._shift) * self._scale, distribution.std * self._scale
        return torch.cat([mean, scale], dim=1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images, about [-1, 1]."""
        self.model.to(latents.device)
        return self.model.decode(latents / self._scale + self._shift).sample

    @property
    def _scale(self) -> float:
        return self.model.config.scaling_factor

    @property
    def _shift(self) -> float:
        return getattr(self.model.config, "shift_factor", None) or 0.0
