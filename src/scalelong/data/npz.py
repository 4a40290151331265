"""Arrays in an .npz: `images` and, if there are any, `labels`, `captions` and `classes`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import LabelError, MetadataError, UnknownSplitError, UnreadableDataError
from .arrays import from_array
from .dataset import Annotations, ImageData
from .labels import Numbered, number_labels, number_tensor
from .options import Options, needs
from .splits import canonical

if TYPE_CHECKING:
    import numpy as np

IMAGES = ("images", "image", "imgs", "x", "data", "arr_0")
LABELS = ("labels", "label", "targets", "y", "arr_1")
CAPTIONS = ("captions", "caption", "texts", "text")
CLASSES = ("classes", "class_names", "label_names")
PARTS = {"train": ("train",), "test": ("test",), "validation": ("validation", "val", "valid")}


def load_npz(name: str, path: Path, options: Options) -> ImageData:
    arrays = _read(path, options)
    found = _find(arrays, IMAGES)
    if found is None:
        raise UnreadableDataError(f"{path} has the arrays {sorted(arrays)}; images were looked for in {list(IMAGES)}")
    images = _images(found, path)
    labels, classes = _labels(arrays, len(images), path)
    captions = _texts(_find(arrays, CAPTIONS), path)
    if captions is not None and len(captions) != len(images):
        raise MetadataError(f"{path} has {len(captions)} captions for {len(images)} images")
    return from_array(name, images, Annotations(labels, classes, captions), options)


def _read(path: Path, options: Options) -> dict[str, np.ndarray]:
    """All arrays of the asked part, under lower-case names without the part: x_train becomes x."""
    np = needs("numpy", "reading .npz files")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > options.memory_limit:
            raise UnreadableDataError(
                f"{path} unpacks to {unpacked} bytes, more than memory_limit={options.memory_limit}. "
                "Raise it, or store the images as a folder or as parquet, which can be streamed"
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = {key.lower(): file[key] for key in file.files}
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError) as error:
        if isinstance(error, UnreadableDataError):
            raise
        raise UnreadableDataError(f"{path} cannot be read: {error}") from error
    return _part(arrays, options.split, path)


def _part(arrays: dict[str, np.ndarray], split: str, path: Path) -> dict[str, np.ndarray]:
    wanted = canonical(split) or split
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        owner, base = "", key
        for part, words in PARTS.items():
            for word in words:
                base = base.removesuffix(f"_{word}").removeprefix(f"{word}_")
            if not owner and base != key:
                owner = part
        parts.setdefault(owner, {})[base] = array
    shared = parts.pop("", {})
    if not parts and wanted == "train":
        return shared
    if wanted not in parts:
        raise UnknownSplitError(f"{path} has no part {split!r}; its arrays are {sorted(arrays)}")
    return {**shared, **parts[wanted]}


def _find(arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> Any:
    return next((arrays[name] for name in names if name in arrays), None)


def _images(array: np.ndarray, path: Path) -> Tensor:
    array = _as_bytes(array, path)
    if array.ndim == 3:
        return torch.from_numpy(array)[:, None]
    if array.ndim != 4:
        raise UnreadableDataError(f"{path}: images have the shape {array.shape}; needed are (N, H, W) or (N, H, W, C)")
    _, first, middle, last = array.shape
    channels_last, channels_first = last <= 4, first <= 4
    if channels_last and channels_first:  # tiny images: the two equal sides are height and width
        channels_last, channels_first = first == middle != last, middle == last != first
    if channels_last == channels_first:
        raise UnreadableDataError(
            f"{path}: in images of the shape {array.shape} it is not clear which are the channels; "
            "needed are (N, H, W, C) or (N, C, H, W) with up to 4 channels"
        )
    images = torch.from_numpy(array)
    return images if channels_first else images.permute(0, 3, 1, 2).contiguous()


def _as_bytes(array: np.ndarray, path: Path) -> np.ndarray:
    """Bytes as they are; 16 bits and floats in [0, 1] or [-1, 1] scaled; other whole numbers if they fit."""
    np = needs("numpy", "reading .npz files")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if array.dtype.kind not in "uif" or array.size == 0:
        raise UnreadableDataError(f"{path}: images are {array.dtype} {array.shape}; needed are numbers, best uint8")
    least, most = array.min(), array.max()
    if array.dtype == np.uint16:
        return ((array.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if array.dtype.kind == "f" and least >= -1 and most <= 1:
        shifted = array if least >= 0 else (array + 1) / 2
        return np.round(shifted * 255).astype(np.uint8)
    if least >= 0 and most <= 255 and (array.dtype.kind != "f" or bool((array == np.round(array)).all())):
        return array.astype(np.uint8)
    raise UnreadableDataError(
        f"{path}: images are {array.dtype} from {least} to {most}; needed are bytes, or floats in [0, 1] or [-1, 1]"
    )


def _labels(arrays: dict[str, np.ndarray], count: int, path: Path) -> Numbered:
    labels = _find(arrays, LABELS)
    if labels is None:
        return None, None
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise LabelError(f"{path} has labels of the shape {labels.shape} for {count} images; needed is ({count},)")
    classes = _texts(_find(arrays, CLASSES), path)
    if labels.dtype.kind == "U":
        return number_labels(labels.tolist(), str(path), classes)
    if labels.dtype.kind not in "iu":
        raise LabelError(f"{path} has labels of the type {labels.dtype}; needed are whole numbers or names")
    return number_tensor(torch.from_numpy(labels.astype("int64")), str(path), classes)


def _texts(array: Any, path: Path) -> list[str] | None:
    if array is None:
        return None
    if array.ndim != 1 or array.dtype.kind != "U":
        raise MetadataError(f"{path}: texts must be an array of strings, found {array.dtype} {array.shape}")
    return array.tolist()
