"""IDX files, the format of MNIST and Fashion-MNIST: a short header with the dimensions, then the bytes."""

from __future__ import annotations

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from ..errors import DataNotFoundError, LabelError, UnreadableDataError
from .arrays import from_array
from .dataset import Annotations, ImageData
from .labels import number_tensor
from .options import Options
from .splits import by_file

UNSIGNED_BYTE = 0x08


def is_idx(name: str) -> bool:
    """Whether a file name says IDX: train-images-idx3-ubyte, t10k-labels.idx1-ubyte.gz, ..."""
    name = name.lower().removesuffix(".gz")
    return name.endswith(("-ubyte", ".idx", ".idx1", ".idx3", ".idx4"))


def find_idx(folder: Path, split: str) -> Path:
    """The file with the images of this part."""
    names = sorted(path.name for path in folder.iterdir() if is_idx(path.name) and "images" in path.name.lower())
    if not names:
        found = sorted(path.name for path in folder.iterdir() if is_idx(path.name))
        raise DataNotFoundError(f"{folder} has IDX files but none of images (…images-idx3-ubyte); found {found}")
    chosen = by_file(names, split, str(folder))
    if len({name.removesuffix(".gz") for name in chosen}) > 1:
        raise UnreadableDataError(f"{folder} has several IDX files of {split!r} images: {chosen}; give one by its path")
    return folder / chosen[0]


def load_idx(name: str, path: Path, options: Options, classes: tuple[str, ...] | None = None) -> ImageData:
    """Images from `path`, labels from its neighbour if there is one."""
    images = read_idx(path, options.memory_limit)
    if images.dim() not in (3, 4):
        raise UnreadableDataError(f"{path} has the shape {tuple(images.shape)}; images need (N, H, W) or (N, H, W, C)")
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    labels_path = _labels_beside(path)
    if labels_path is None:
        return from_array(name, images, Annotations(), options)
    labels = read_idx(labels_path, options.memory_limit)
    if labels.shape != (len(images),):
        raise LabelError(f"{labels_path} has the shape {tuple(labels.shape)} for the {len(images)} images of {path}")
    return from_array(name, images, Annotations(*number_tensor(labels, str(labels_path), classes)), options)


def read_idx(path: Path, memory_limit: int) -> Tensor:
    """The whole array, uint8. Its size is known from the header, so nothing larger is ever unpacked."""
    try:
        with _opened(path) as file:
            header = file.read(4)
            if len(header) < 4 or header[:2] != b"\0\0" or header[3] == 0:
                raise UnreadableDataError(f"{path} is not an IDX file: it begins with {header.hex(' ') or 'nothing'}")
            if header[2] != UNSIGNED_BYTE:
                raise UnreadableDataError(
                    f"{path} holds IDX type 0x{header[2]:02x}; only unsigned bytes (0x08) are images"
                )
            sizes = file.read(4 * header[3])
            shape = [int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4)]
            if prod(shape) > memory_limit:
                raise UnreadableDataError(f"{path} holds {prod(shape)} bytes, more than memory_limit={memory_limit}")
            content = file.read(prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDataError(f"{path} cannot be read: {error}") from error
    if len(sizes) < 4 * header[3] or len(content) != prod(shape):
        raise UnreadableDataError(
            f"{path} is cut off or has more than its header says: {shape} needs {prod(shape)} bytes"
        )
    if not content:  # which torch.frombuffer refuses
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path) if packed else path.open("rb"))


def _labels_beside(path: Path) -> Path | None:
    base = path.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
    if base == path.name.removesuffix(".gz"):
        return None
    return next((found for name in (base, base + ".gz") if (found := path.with_name(name)).is_file()), None)
