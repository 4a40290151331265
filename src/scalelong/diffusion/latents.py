"""Latents: diffusers' AutoencoderKL from a local folder, and a data set seen through it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..data import ImageData, to_float
from ..errors import InvalidConfigError, require
from ..files import at_home, cached_array, file_digest, in_words, read_json
from ..models import require_buildable
from ..optional import needs

if TYPE_CHECKING:
    import numpy as np


class Autoencoder:
    """`folder` holds an AutoencoderKL, or has it in `vae`, as in diffusers' pipelines."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = at_home(folder, "`autoencoder`")
        self._model_folder = self.folder / "vae" if (self.folder / "vae").is_dir() else self.folder
        if not (self._model_folder / "config.json").is_file():
            raise InvalidConfigError(
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
        autoencoders = needs("diffusers.models.autoencoders.autoencoder_kl", "train", "encoding images")
        described = read_json(self._model_folder / "config.json")
        require_buildable(described if isinstance(described, dict) else {}, str(self._model_folder / "config.json"))
        try:
            model = autoencoders.AutoencoderKL.from_pretrained(
                self._model_folder, local_files_only=True, use_safetensors=True
            )
        except Exception as error:  # its configuration may say anything
            raise InvalidConfigError(
                f"the autoencoder in {self.folder} cannot be loaded ({in_words(error)}): check "
                f"`autoencoder`, or download it again"
            ) from error
        missing = [name for name, value in model.state_dict(keep_vars=True).items() if value.is_meta]
        # diffusers leaves what its file lacks without memory.
        lacking = f"the weights in {self.folder} lack {len(missing)} tensors of its autoencoder, such as {missing[:1]}"
        require(not missing, f"{lacking}: download it again")
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


# A data set seen through an autoencoder. Encoded once, checksummed, kept on disk.

CHUNK = 16


class LatentData(ImageData):
    """`fetch` gives the moments of the latents: float32 (B, 2 channels, height, width), means first."""

    whereabouts = "as latents in the cache"

    def __init__(self, source: ImageData, autoencoder: str, moments: np.ndarray) -> None:
        self.name, self.annotations, self.broken_images = source.name, source.annotations, source.broken_images
        self.source, self.autoencoder, self._moments = source, autoencoder, moments
        self.channels, self.height, self.width = moments.shape[1] // 2, moments.shape[2], moments.shape[3]
        self.rows = torch.arange(len(moments))

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._moments[self.rows[rows].numpy()]), rows

    def take(self, rows: Tensor) -> Self:
        part = super().take(rows)
        part.source = self.source.take(rows)
        return part

    def _pixel_digest(self) -> str:
        text = f"{self.source.fingerprint()} {self.autoencoder} {self.rows.tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()


def encode_data(data: ImageData, autoencoder: Autoencoder) -> LatentData:
    """The latents of all images of a data set."""
    factor = autoencoder.factor
    divisible = data.height % factor == data.width % factor == 0
    what = f"images of {data.height}x{data.width} cannot be encoded: both sides must be multiples of {factor}"
    require(divisible, f"{what}; give a `size`")
    wanted = autoencoder.model.config.in_channels
    what = f"{autoencoder.folder} encodes {wanted} channels and the images have {data.channels}"
    require(data.channels == wanted, f"{what}: set `channels` {wanted}")

    def compute() -> Iterator[np.ndarray]:
        for rows in torch.arange(len(data)).split(CHUNK):
            yield autoencoder.moments(to_float(data.fetch(rows).images)).numpy()

    about = {"data": data.fingerprint(), "autoencoder": autoencoder.fingerprint}
    shape = (len(data), 2 * autoencoder.channels, data.height // factor, data.width // factor)
    return LatentData(data, autoencoder.fingerprint, cached_array("latents", about, shape, "float32", compute))


def sample_latents(moments: Tensor, noise: Tensor | None = None) -> Tensor:
    """Latents from their means and standard deviations; without noise the means."""
    mean, scale = moments.chunk(2, dim=1)
    return mean if noise is None else mean + scale * noise
