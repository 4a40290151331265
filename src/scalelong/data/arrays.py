"""Images that come as one array (digits, IDX, .npz, CIFAR-10 batches): channels and size are changed as tensors."""

from __future__ import annotations

import gzip
import hashlib
import zipfile
import zlib
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import (
    CannotReadError,
    DataNotFoundError,
    InvalidConfigError,
    LabelError,
    MetadataError,
    NoImagesError,
    UnknownSplitError,
    UnreadableDataError,
)
from ..files import in_words, read_bytes, require_regular
from ..optional import needs
from .annotations import MOST_CLASSES, Numbered, number_labels, number_tensor
from .dataset import Annotations, ImageData, MemoryData, Options, Tally
from .files import by_file, canonical
from .pickles import read_plain_pickle

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


# IDX files, the format of MNIST and Fashion-MNIST: a short header with the dimensions, then the bytes.

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
        raise DataNotFoundError(
            f"{folder} has IDX files but none of images (…images-idx3-ubyte); found {found}. Put that file beside them"
        )
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
        raise LabelError(
            f"{labels_path} has the shape {tuple(labels.shape)} for the {len(images)} images of {path}: "
            f"they do not belong "
            f"together; download both again, or move the labels away"
        )
    return from_array(name, images, Annotations(*number_tensor(labels, str(labels_path), classes)), options)


def read_idx(path: Path, memory_limit: int) -> Tensor:
    """The whole array, uint8. Its size is known from the header, so nothing larger is ever unpacked."""
    try:
        with _opened(path) as file:
            header = file.read(4)
            if len(header) < 4 or header[:2] != b"\0\0" or header[3] == 0:
                raise UnreadableDataError(
                    f"{path} is not an IDX file: it begins with {header.hex(' ') or 'nothing'}; download it again"
                )
            if header[2] != UNSIGNED_BYTE:
                raise UnreadableDataError(
                    f"{path} holds IDX type 0x{header[2]:02x}; images must be unsigned bytes (0x08)"
                )
            sizes = file.read(4 * header[3])
            shape = [int.from_bytes(sizes[at : at + 4], "big") for at in range(0, len(sizes), 4)]
            if prod(shape) > memory_limit:
                raise UnreadableDataError(
                    f"{path} says that it holds {prod(shape)} bytes, more than memory_limit={memory_limit}: "
                    f"raise that, or "
                    f"download the file again if it should be smaller"
                )
            content = file.read(prod(shape) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDataError(f"{path} cannot be read ({in_words(error)}): download it again") from error
    if len(sizes) < 4 * header[3] or len(content) != prod(shape):
        raise UnreadableDataError(
            f"{path} is cut off or has more than its header says: {shape} needs {prod(shape)} bytes; download it again"
        )
    if not content:  # which torch.frombuffer refuses
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _opened(path: Path) -> BinaryIO:
    require_regular(path)
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path) if packed else path.open("rb"))


def _labels_beside(path: Path) -> Path | None:
    base = path.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
    if base == path.name.removesuffix(".gz"):
        return None
    return next((found for name in (base, base + ".gz") if (found := path.with_name(name)).is_file()), None)


# Arrays in an .npz: `images` and, if there are any, `labels`, `captions` and `classes`.

IMAGES = ("images", "image", "imgs", "x", "data", "arr_0")
LABELS = ("labels", "label", "targets", "y", "arr_1")
CAPTIONS = ("captions", "caption", "texts", "text")
CLASS_NAMES = ("classes", "class_names", "label_names")
PARTS = {"train": ("train",), "test": ("test",), "validation": ("validation", "val", "valid")}


def load_npz(name: str, path: Path, options: Options) -> ImageData:
    arrays = _read_npz(path, options)
    found = _find(arrays, IMAGES)
    if found is None:
        raise UnreadableDataError(
            f"{path} has the arrays {sorted(arrays)}; images were looked for in {list(IMAGES)}: rename one"
        )
    images = _images(found, path)
    labels, classes = _npz_labels(arrays, len(images), path)
    captions = _texts(_find(arrays, CAPTIONS), path)
    if captions is not None and len(captions) != len(images):
        raise MetadataError(f"{path} has {len(captions)} captions for {len(images)} images: there must be one for each")
    return from_array(name, images, Annotations(labels, classes, captions), options)


def _read_npz(path: Path, options: Options) -> dict[str, np.ndarray]:
    """All arrays of the asked part, under lower-case names without the part: x_train becomes x."""
    np = needs("numpy", "train", "reading .npz files")
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
    except UnreadableDataError:
        raise
    # Encrypted, packed by other means, or with a header that lies: zipfile and numpy meet it with almost any exception.
    except Exception as error:
        raise UnreadableDataError(
            f"{path} cannot be read ({in_words(error)}): write it anew with numpy.savez"
        ) from error
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
        raise UnknownSplitError(
            f"{path} has no part {split!r}; its arrays are {sorted(arrays)}: choose another --split"
        )
    return {**shared, **parts[wanted]}


def _find(arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> Any:
    return next((arrays[name] for name in names if name in arrays), None)


def _images(array: np.ndarray, path: Path) -> Tensor:
    array = _as_bytes(array, path)
    if array.ndim == 3:
        return torch.from_numpy(array)[:, None]
    if array.ndim != 4:
        raise UnreadableDataError(
            f"{path}: images have the shape {array.shape}; they must be (N, H, W) or (N, H, W, C)"
        )
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
    np = needs("numpy", "train", "reading .npz files")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if array.dtype.kind not in "uif" or array.size == 0:
        raise UnreadableDataError(f"{path}: images are {array.dtype} {array.shape}; they must be numbers, best uint8")
    least, most = array.min(), array.max()
    if array.dtype == np.uint16:
        return ((array.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if array.dtype.kind == "f" and least >= -1 and most <= 1:
        shifted = array if least >= 0 else (array + 1) / 2
        return np.round(shifted * 255).astype(np.uint8)
    if least >= 0 and most <= 255 and (array.dtype.kind != "f" or bool((array == np.round(array)).all())):
        return array.astype(np.uint8)
    raise UnreadableDataError(
        f"{path}: images are {array.dtype} from {least} to {most}; they must be bytes, or floats in [0, 1] or [-1, 1]"
    )


def _npz_labels(arrays: dict[str, np.ndarray], count: int, path: Path) -> Numbered:
    labels = _find(arrays, LABELS)
    if labels is None:
        return None, None
    if labels.shape == (count, 1):
        labels = labels[:, 0]
    if labels.shape != (count,):
        raise LabelError(f"{path} has labels of the shape {labels.shape} for {count} images; it must be ({count},)")
    classes = _texts(_find(arrays, CLASS_NAMES), path)
    if labels.dtype.kind == "U":
        return number_labels(labels.tolist(), str(path), classes)
    if labels.dtype.kind not in "iu":
        raise LabelError(f"{path} has labels of the type {labels.dtype}; they must be whole numbers or names")
    if labels.dtype.kind == "u" and labels.size and int(labels.max()) >= MOST_CLASSES:
        raise LabelError(f"{path}: labels must lie between 0 and {MOST_CLASSES - 1}, found {int(labels.max())}")
    return number_tensor(torch.from_numpy(labels.astype("int64")), str(path), classes)


def _texts(array: Any, path: Path) -> list[str] | None:
    if array is None:
        return None
    if array.ndim != 1 or array.dtype.kind != "U":
        raise MetadataError(f"{path}: texts must be an array of strings, found {array.dtype} {array.shape}")
    return array.tolist()


# CIFAR-10 as its authors (and torchvision) store it: pickles. They are read without running what they contain.

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}


def find_cifar(folder: Path) -> Path | None:
    """The folder of the batches: this one, or `cifar-10-batches-py` in it."""
    for place in (folder, folder / "cifar-10-batches-py"):
        if (place / "data_batch_1").is_file() or (place / "test_batch").is_file():
            return place
    return None


def load_cifar(name: str, folder: Path, options: Options) -> ImageData:
    part = canonical(options.split) or options.split
    if part not in FILES:
        raise UnknownSplitError(f"{folder} has no part {options.split!r}; CIFAR-10 has 'train' and 'test'")
    pixels, labels = [], []
    for file in FILES[part]:
        batch = _read_batch(folder / file)
        pixels.append(_pixels(batch, folder / file))
        labels.extend(_cifar_labels(batch, folder / file, len(pixels[-1])))
    meta = _read_batch(folder / "batches.meta") if (folder / "batches.meta").is_file() else {}
    named = meta.get("label_names", CIFAR10_CLASSES)
    if not isinstance(named, list | tuple) or not all(isinstance(word, str | bytes) for word in named):
        raise LabelError(f"{folder / 'batches.meta'}: 'label_names' must be a list of texts")
    names = [_text(word) for word in named]
    images = torch.cat(pixels).view(-1, 3, 32, 32)
    return from_array(name, images, Annotations(*number_labels(labels, str(folder), names)), options)


def _kind(value: Any) -> str:
    """By its type alone: its text may be endless."""
    return "nothing" if value is None else f"a {type(value).__name__}"


def _pixels(batch: dict[str, Any], path: Path) -> torch.Tensor:
    np = needs("numpy", "train", "reading CIFAR-10")
    data: Any = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else _kind(data)
        raise UnreadableDataError(f"{path}: 'data' must be uint8 (N, 3072), found {found}: download it again")
    return torch.from_numpy(np.array(data))


def _cifar_labels(batch: dict[str, Any], path: Path, count: int) -> list[int]:
    labels = batch.get("labels")
    if not isinstance(labels, list) or len(labels) != count:
        found = (
            f"{len(labels)} of them" if isinstance(labels, list) else f"no list of them; its keys are {sorted(batch)}"
        )
        raise LabelError(f"{path} needs {count} 'labels', found {found}")
    if not all(type(label) is int for label in labels):
        raise LabelError(f"{path}: 'labels' must be whole numbers")
    return labels


MOST_PICKLE = 256 * 1024**2
"""Bytes of the largest batch; CIFAR-10's have 31 MB."""


def _read_batch(path: Path) -> dict[str, Any]:
    try:
        content = read_plain_pickle(read_bytes(path, MOST_PICKLE))
    except CannotReadError as error:
        raise UnreadableDataError(str(error)) from error
    except UnreadableDataError as error:
        raise UnreadableDataError(
            f"{path} is refused: {error}; download CIFAR-10 again, the version for Python"
        ) from error
    if not isinstance(content, dict):
        raise UnreadableDataError(
            f"{path} holds {_kind(content)}, not the dictionary of a CIFAR-10 batch: download it again"
        )
    return {_text(key): value for key, value in content.items()}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# Real handwritten digits that come with the package (see digits.md): something true to train on anywhere.

DIGITS = tuple("0123456789")


def load_digits(name: str, options: Options) -> ImageData:
    """1797 digits, 8×8, grayscale."""
    if options.split != "train":
        raise UnknownSplitError(
            f"{name!r} has no part {options.split!r}: all 1797 digits are 'train'. "
            "Use data.split(held_out=...) to keep some apart"
        )
    np = needs("numpy", "train", "reading the embedded digits")
    with files("scalelong.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return from_array(name, images[:, None], Annotations(labels.to(torch.int64), DIGITS), options)


# Real photographs that come with the package (see garments.md): large enough for deep networks to break on.

GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load_garments(name: str, options: Options) -> ImageData:
    """2000 images of Fashion-MNIST, 16×16, grayscale."""
    if options.split != "train":
        raise UnknownSplitError(
            f"{name!r} has no part {options.split!r}: all 2000 garments are 'train'. "
            "Use data.split(held_out=...) to keep some apart"
        )
    np = needs("numpy", "train", "reading the embedded garments")
    place = files("scalelong.data").joinpath("garments.npz")
    with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return from_array(name, images[:, None], Annotations(labels.to(torch.int64), GARMENTS), options)


# The same with captions, several wordings of each class, for networks that draw from a text.

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GARMENT_WORDS = (
    *("a t-shirt", "trousers", "a pullover", "a dress", "a coat"),
    *("a sandal", "a shirt", "a sneaker", "a bag", "an ankle boot"),
)


def load_captioned(name: str, options: Options) -> ImageData:
    """The digits or garments that come with the package; image i has wording i of its class, in turn."""
    if name == "captioned-digits":
        data = load_digits(name, options)
        wordings = [(word, f"the digit {number}", f"a handwritten {word}") for number, word in enumerate(NUMBER_WORDS)]
    else:
        data = load_garments(name, options)
        bare = [phrase.removeprefix("a ").removeprefix("an ") for phrase in GARMENT_WORDS]
        wordings = [
            (word, phrase, f"a photograph of {phrase}") for word, phrase in zip(bare, GARMENT_WORDS, strict=True)
        ]
    about = data.annotations
    assert about.labels is not None
    captions = [wordings[label][row % 3] for row, label in enumerate(about.labels.tolist())]
    data.annotations = Annotations(about.labels, about.classes, captions)
    return data
