"""Images that come as one array (digits, IDX, .npz, CIFAR-10 batches): channels and size are changed as tensors."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InvalidConfigError, NoImagesError
from .broken import Tally
from .dataset import Annotations, ImageData, MemoryData
from .options import Options

CHUNK = 1024  # images converted at a time, to bound the memory


def from_array(name: str, images: Tensor, annotations: Annotations, options: Options) -> ImageData:
    """A data set of uint8 images (N, C, H, W), converted now if the result fits in memory, or else when fetched."""
    if len(images) == 0:
        raise NoImagesError(f"{name} holds an array of images, but it is empty: {tuple(images.shape)}")
    rows = options.chosen(len(images))
    if len(rows) < len(images):
        images, annotations = images[rows], annotations.take(rows)
    height, width = options.shape or (images.shape[2], images.shape[3])
    channels = options.channels or images.shape[1]
    converted = ConvertedData(name, images, annotations, channels, height, width)
    if (channels, height, width) == tuple(images.shape[1:]):
        return MemoryData(name, images, annotations)
    if not options.fits(len(images), channels, height, width):
        return converted
    result = torch.empty(len(images), channels, height, width, dtype=torch.uint8)
    for chunk in torch.arange(len(images)).split(CHUNK):
        result[chunk] = converted.fetch(chunk).images
    return MemoryData(name, result, annotations)


class ConvertedData(ImageData):
    """An array in memory whose channels or size are changed at every fetch: enlarged, it would not fit."""

    in_memory = False

    def __init__(
        self, name: str, images: Tensor, annotations: Annotations, channels: int, height: int, width: int
    ) -> None:
        check_conversion(images.shape[1], channels, name)
        self.name, self.annotations = name, annotations
        self.channels, self.height, self.width = channels, height, width
        self.tally = Tally(name, len(images), 0)
        self._source = images
        self._rows = torch.arange(len(images))

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images = convert_channels(self._source.index_select(0, self._rows[rows]), self.channels)
        return resize(images, self.height, self.width), rows

    def _take(self, rows: Tensor) -> ConvertedData:
        part = ConvertedData(
            self.name, self._source, self.annotations.take(rows), self.channels, self.height, self.width
        )
        part._rows = self._rows[rows]
        return part

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256(b"converted")
        for rows in self._rows.split(CHUNK):
            sha.update(self._source[rows].numpy().data)
        return sha.hexdigest()


def check_conversion(found: int, asked: int, name: str) -> None:
    if found != asked and not {found, asked} <= {1, 3, 4}:
        raise InvalidConfigError(
            f"{name!r} has {found} channels, which cannot become {asked}: only 1 (gray), 3 (RGB) and 4 (RGBA) convert"
        )


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Between gray, RGB and RGBA, with the rules of Pillow: ITU-R 601 luma, and alpha is laid on white."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 4:
        colour, alpha = images[:, :3].to(torch.int32), images[:, 3:].to(torch.int32)
        images = ((colour * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)
    if channels == 1 and images.shape[1] == 3:
        red, green, blue = images.to(torch.int32).unbind(1)
        return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)[:, None]
    if images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    if channels == 4:
        images = torch.cat([images, torch.full_like(images[:, :1], 255)], dim=1)
    return images.contiguous()


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """The largest centred part with the asked proportions, then bicubic, antialiased."""
    found_height, found_width = images.shape[2:]
    if (found_height, found_width) == (height, width) or len(images) == 0:
        return images.reshape(len(images), images.shape[1], height, width)
    crop_height = min(found_height, max(1, round(found_width * height / width)))
    crop_width = min(found_width, max(1, round(found_height * width / height)))
    top, left = (found_height - crop_height) // 2, (found_width - crop_width) // 2
    part = images[:, :, top : top + crop_height, left : left + crop_width]
    # On bytes torch works as Pillow does, so that arrays and files come out alike.
    return F.interpolate(part, (height, width), mode="bicubic", antialias=True, align_corners=False)
