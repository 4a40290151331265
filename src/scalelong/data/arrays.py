"""Images that come as one array (embedded sets, IDX, .npz): channels and size are changed as tensors."""

from __future__ import annotations

import gzip
import hashlib
import zipfile
import zlib
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import (
    DataNotFoundError,
    InvalidConfigError,
    LabelError,
    MetadataError,
    NoImagesError,
    UnknownSplitError,
    UnreadableDataError,
)
from ..files import in_words
from ..optional import needs
from .annotations import number_labels, number_tensor
from .dataset import Annotations, BrokenImages, ImageData, MemoryData, Options
from .files import by_file, canonical

if TYPE_CHECKING:
    import numpy as np


CHUNK = 1024  # images converted at a time, to bound the memory


def from_array(name: str, images: Tensor, annotations: Annotations, options: Options) -> ImageData:
    """A data set of uint8 images (N, C, H, W), converted now if the result fits in memory, or else when fetched."""
    if 0 in images.shape:
        raise NoImagesError(
            f"{name} holds an array of images, but it is empty: {tuple(images.shape)}; give one with images"
        )
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

    in_memory, decodes = False, True

    def __init__(
        self, name: str, images: Tensor, annotations: Annotations, channels: int, height: int, width: int
    ) -> None:
        check_conversion(images.shape[1], channels, name)
        self.name, self.annotations = name, annotations
        self.channels, self.height, self.width = channels, height, width
        self.broken_images = BrokenImages(name, len(images), 0)
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


# IDX files, the format of MNIST and Fashion-MNIST: a short header with the dimensions, then the bytes.


def is_idx(name: str) -> bool:
    """Whether a file name says IDX: train-images-idx3-ubyte, t10k-labels.idx1-ubyte.gz, ..."""
    return name.lower().removesuffix(".gz").endswith(("-ubyte", ".idx", ".idx1", ".idx3", ".idx4"))


def find_idx(folder: Path, split: str) -> Path:
    """The file with the images of this part."""
    names = sorted(path.name for path in folder.iterdir() if is_idx(path.name) and "images" in path.name.lower())
    if not names:
        raise DataNotFoundError(f"{folder} has IDX files, but none of images (…images-idx3-ubyte): add that file")
    return folder / by_file(names, split, str(folder))[0]


def load_idx(name: str, path: Path, options: Options) -> ImageData:
    """Images from `path`, labels from the file next to it, if there is one."""
    images = _read_idx(path, options.memory_limit)
    if images.dim() not in (3, 4):
        raise UnreadableDataError(f"{path} has the shape {tuple(images.shape)}; images need (N, H, W) or (N, H, W, C)")
    images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    base = path.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
    found = [path.with_name(other) for other in (base, f"{base}.gz") if path.with_name(other).is_file()]
    if "images" not in path.name or not found:
        return from_array(name, images, Annotations(), options)
    labels = _read_idx(found[0], options.memory_limit)
    if labels.shape != (len(images),):
        raise LabelError(
            f"{found[0]} has the shape {tuple(labels.shape)} for {len(images)} images: download both again"
        )
    return from_array(name, images, Annotations(*number_tensor(labels, str(found[0]))), options)


def _read_idx(path: Path, memory_limit: int) -> Tensor:
    try:
        packed = path.read_bytes()
        with gzip.open(BytesIO(packed)) if packed[:2] == b"\x1f\x8b" else BytesIO(packed) as file:
            zeros, kind, dimensions = file.read(2), file.read(1), ord(file.read(1))
            sizes = file.read(4 * dimensions)
            if len(sizes) < 4 * dimensions:
                raise ValueError("its header is cut off")
            shape = [int.from_bytes(sizes[place : place + 4], "big") for place in range(0, len(sizes), 4)]
            if prod(shape) > memory_limit:
                raise ValueError(f"its header says {prod(shape)} bytes, more than memory_limit={memory_limit}")
            content = file.read(prod(shape) + 1)  # no more than the header says is unpacked
    except (OSError, EOFError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise UnreadableDataError(f"{path} cannot be read as an IDX file ({error}): download it again") from error
    if zeros != b"\0\0" or kind != b"\x08" or not shape or len(content) != prod(shape):
        raise UnreadableDataError(f"{path} is not an IDX file of bytes, or is cut off: download it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape) if content else torch.empty(0, 1, 1)


# Arrays in an .npz: images and, if there are any, labels, captions and names of classes.

IMAGES = ("images", "image", "imgs", "x", "data", "arr_0")
LABELS = ("labels", "label", "targets", "y", "arr_1")
CAPTIONS = ("captions", "caption", "texts", "text")
CLASS_NAMES = ("classes", "class_names", "label_names")
PARTS = {"train": ("train",), "test": ("test",), "validation": ("validation", "val", "valid")}


def load_npz(name: str, path: Path, options: Options) -> ImageData:
    """The arrays of one part: `images`, or `x_train` for the part "train"."""
    arrays = _part_of(_read_npz(path, options.memory_limit), options.split, path)
    found = _first(arrays, IMAGES)
    if found is None:
        raise UnreadableDataError(
            f"{path} has the arrays {sorted(arrays)}; images were looked for in {list(IMAGES)}: rename one"
        )
    images = _images(found, path)
    labels, classes, captions = (_first(arrays, names) for names in (LABELS, CLASS_NAMES, CAPTIONS))
    for values in (captions, classes):
        if values is not None and (values.ndim != 1 or values.dtype.kind != "U"):
            raise MetadataError(f"{path}: texts must be an array of strings, found {values.dtype} {values.shape}")
    if captions is not None and len(captions) != len(images):
        raise MetadataError(f"{path} has {len(captions)} captions for {len(images)} images: there must be one for each")
    numbered = None, None
    if labels is not None:
        if labels.size != len(images) or labels.dtype.kind not in "iuU":
            raise LabelError(
                f"{path} has labels {labels.dtype} {labels.shape}; needed are {len(images)} numbers or names"
            )
        numbered = number_labels(labels.ravel().tolist(), str(path), None if classes is None else classes.tolist())
    return from_array(name, images, Annotations(*numbered, None if captions is None else captions.tolist()), options)


def _read_npz(path: Path, memory_limit: int) -> dict[str, np.ndarray]:
    np = needs("numpy", "train", "reading .npz files")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked <= memory_limit:
            with np.load(path, allow_pickle=False) as file:
                return {key.lower(): file[key] for key in file.files}
    # zipfile and numpy meet damaged files with almost any exception.
    except Exception as error:
        raise UnreadableDataError(
            f"{path} cannot be read ({in_words(error)}): save it again with numpy.savez"
        ) from error
    raise UnreadableDataError(
        f"{path} unpacks to {unpacked} bytes, more than memory_limit={memory_limit}. "
        "Raise it, or store the images as a folder or as parquet, which can be streamed"
    )


def _part_of(arrays: dict[str, np.ndarray], split: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a part, under names without the part: x_train becomes x."""
    wanted = canonical(split) or split
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        owner, base = "", key
        for part, words in PARTS.items():
            for word in words:
                base = base.removesuffix(f"_{word}").removeprefix(f"{word}_")
            owner = owner or (part if base != key else "")
        parts.setdefault(owner, {})[base] = array
    shared = parts.pop("", {})
    if wanted not in parts and (parts or wanted != "train"):
        raise UnknownSplitError(
            f"{path} has no part {split!r}; its arrays are {sorted(arrays)}: choose another `split`"
        )
    return {**shared, **parts.get(wanted, {})}


def _first(arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> Any:
    return next((arrays[name] for name in names if name in arrays), None)


def _images(array: np.ndarray, path: Path) -> Tensor:
    """uint8 (N, C, H, W) from (N, H, W), (N, H, W, C) or (N, C, H, W)."""
    if array.ndim not in (3, 4):
        raise UnreadableDataError(
            f"{path}: images have the shape {array.shape}; they must be (N, H, W) or (N, H, W, C)"
        )
    images = as_bytes(array, str(path))
    if array.ndim == 3:
        return images[:, None]
    first, middle, last = array.shape[1:]
    channels_last, channels_first = last <= 4, first <= 4
    if channels_last and channels_first:  # tiny images: the two equal sides are height and width
        channels_last, channels_first = first == middle != last, middle == last != first
    if channels_last == channels_first:
        raise UnreadableDataError(
            f"{path}: in images of the shape {array.shape} it is not clear which are the channels; "
            "needed are (N, H, W, C) or (N, C, H, W) with up to 4 channels"
        )
    return images if channels_first else images.permute(0, 3, 1, 2).contiguous()


def as_bytes(array: Any, where: str, signed: bool | None = None) -> Tensor:
    """A numpy array or a tensor as uint8. 16 bits and floats are scaled; other whole numbers must fit.

    Floats are in [-1, 1] if `signed`, else in [0, 1]; by default what the values say.
    """
    values = torch.as_tensor(array)
    if values.dtype == torch.uint8:
        return values.contiguous()
    if values.dtype == torch.bool:
        return values.to(torch.uint8) * 255
    if values.numel() == 0 or values.is_complex():
        raise UnreadableDataError(f"{where}: images are {values.dtype} {tuple(values.shape)}; best is uint8")
    if values.dtype == torch.uint16:
        return ((values.to(torch.int64) * 255 + 32767) // 65535).to(torch.uint8)
    least, most = values.min().item(), values.max().item()
    if values.is_floating_point():
        signed = least < 0 if signed is None else signed
        if (-1 if signed else 0) <= least and most <= 1:
            return ((values + 1) / 2 if signed else values).mul(255).round().to(torch.uint8)
    if least >= 0 and most <= 255 and (not values.is_floating_point() or bool((values == values.round()).all())):
        return values.to(torch.uint8)
    raise UnreadableDataError(
        f"{where}: images are {values.dtype} from {least} to {most}; they must be bytes, or floats in [0, 1] or [-1, 1]"
    )
