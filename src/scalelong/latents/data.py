"""A data set seen through an autoencoder. Encoded once, checksummed, kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data import ImageData, to_float
from ..files import cached_array
from .autoencoder import Autoencoder, AutoencoderError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 16


class LatentData(ImageData):
    """`fetch` gives the moments of the latents: float32 (B, 2 channels, height, width), means first."""

    in_memory = True  # mapped from disk: fetching is indexing

    def __init__(self, source: ImageData, autoencoder: str, moments: np.ndarray, rows: Tensor | None = None) -> None:
        self.name, self.tally, self.annotations = source.name, source.tally, source.annotations
        self.source, self.autoencoder = source, autoencoder
        self.channels, self.height, self.width = moments.shape[1] // 2, moments.shape[2], moments.shape[3]
        self._moments = moments
        self._rows = torch.arange(len(moments)) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self._moments[self._rows[rows].numpy()]), rows

    def _take(self, rows: Tensor) -> LatentData:
        return LatentData(self.source._take(rows), self.autoencoder, self._moments, self._rows[rows])

    def _pixel_digest(self) -> str:
        text = f"{self.source.fingerprint()} {self.autoencoder} {self._rows.tolist()}"
        return hashlib.sha256(text.encode()).hexdigest()


def encode_data(data: ImageData, autoencoder: Autoencoder, say: Callable[[str], None] = print) -> LatentData:
    """The latents of all images of a data set."""
    factor = autoencoder.factor
    if data.height % factor or data.width % factor:
        raise AutoencoderError(
            f"images of {data.height}x{data.width} cannot be encoded: both sides must be multiples of {factor}; "
            f"give a size"
        )
    wanted = autoencoder.model.config.in_channels
    if data.channels != wanted:
        raise AutoencoderError(f"{autoencoder.folder} encodes {wanted} channels and the images have {data.channels}")

    def compute() -> Iterator[np.ndarray]:
        for rows in torch.arange(len(data)).split(CHUNK):
            yield autoencoder.moments(to_float(data.fetch(rows).images)).numpy()

    about = {"data": data.fingerprint(), "autoencoder": autoencoder.fingerprint}
    shape = (len(data), 2 * autoencoder.channels, data.height // factor, data.width // factor)
    return LatentData(data, autoencoder.fingerprint, cached_array("latents", about, shape, "float32", compute, say))


def sample_latents(moments: Tensor, noise: Tensor | None = None) -> Tensor:
    """Latents from their means and standard deviations; without noise the means."""
    mean, scale = moments.chunk(2, dim=1)
    return mean if noise is None else mean + scale * noise
