"""Data sets that a program hands over: any object with a length whose items can be asked for by number.

An item is an image, a pair (image, label or text), or a dictionary with such columns (`image`, `label`, `text`, ...).
An image is

- a tensor (C, H, W) or (H, W): uint8, or floats in [0, 1] or [-1, 1]. Some items are looked at first: if one of them
  has negative values, all floats are taken as [-1, 1];
- a numpy array (H, W) or (H, W, C) of the same types;
- an image of Pillow.

Each item is read once. If the images fit into memory they are kept, so a random transform is applied once: leave
mirroring to training (`flip`). If not, items are read again when they are fetched, and must then be the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ..errors import InvalidConfigError, MixedSizesError, NoImagesError, ScaleLongError, UnreadableDataError
from .annotations import CAPTIONS, IMAGES, LABELS, check_captions, first_of, number_labels
from .dataset import Annotations, BrokenImages, ImageData, MemoryData, Options, logger
from .decode import as_bytes, check_conversion, convert_channels, decode_image, resize

if TYPE_CHECKING:
    from PIL.Image import Image

LOOKED_AT = 16
"""Items that are read first, to know size, channels and the range of floats."""


def from_dataset(dataset: Any, options: Options) -> ImageData:
    """The images of an object with `__len__` and `__getitem__`."""
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise InvalidConfigError(
            f"data of the type {name} cannot be read: needed are a length and items by number (a map-style Dataset). "
            "An iterable one cannot be resumed at a step; save it to files first"
        )
    rows = options.chosen(len(dataset))
    if len(rows) == 0:
        raise NoImagesError(f"the data set {name} is empty")
    reader = _Reader(name, dataset, rows, options)
    fits = options.fits(len(rows), *reader.shape)
    images = torch.empty(len(rows), *reader.shape, dtype=torch.uint8) if fits else None
    labels: list[Any] = []
    captions: list[Any] = []
    sha = hashlib.sha256(b"objects")
    for place in range(len(rows)):
        item = reader.item(place)
        pixels = reader.pixels(item)
        sha.update(pixels.numpy().data)
        labels.append(item.label)
        captions.append(item.caption)
        if images is not None:
            images[place] = pixels
        if options.progress is not None:
            options.progress(place + 1, len(rows))
    names = getattr(dataset, "classes", None)
    names = [str(word) for word in names] if isinstance(names, list | tuple) else None
    numbered = (None, None) if labels[0] is None else number_labels(labels, name, names)
    texts = None if captions[0] is None else check_captions(captions, name)
    annotations = Annotations(*numbered, texts)
    if images is not None:
        return MemoryData(name, images, annotations)
    return ObjectData(name, reader, annotations, sha.hexdigest(), torch.arange(len(rows)))


class ObjectData(ImageData):
    """Items that are read when they are fetched."""

    in_memory, decodes = False, True

    def __init__(self, name: str, reader: _Reader, annotations: Annotations, digest: str, rows: Tensor) -> None:
        self.name, self.annotations = name, annotations
        self.channels, self.height, self.width = reader.shape
        self.broken_images = BrokenImages(name, len(rows), 0)
        self._reader, self._digest, self._rows = reader, digest, rows

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        reader = self._reader
        return torch.stack([reader.pixels(reader.item(place)) for place in self._rows[rows].tolist()]), rows

    def _take(self, rows: Tensor) -> ObjectData:
        return ObjectData(self.name, self._reader, self.annotations.take(rows), self._digest, self._rows[rows])

    def _pixel_digest(self) -> str:
        return hashlib.sha256(self._digest.encode() + self._rows.numpy().tobytes()).hexdigest()


class _Item:
    """One item of the data set, taken apart."""

    def __init__(self, value: Any, where: str) -> None:
        self.where, self.label, self.caption = where, None, None
        if isinstance(value, dict):
            columns = [str(key) for key in value]
            column = first_of(IMAGES, columns)
            if column is None:
                raise UnreadableDataError(
                    f"{where} has the columns {columns}; images were looked for in {list(IMAGES)}"
                )
            self.image, label, caption = value[column], first_of(LABELS, columns), first_of(CAPTIONS, columns)
            self.label = None if label is None else _plain(value[label])
            self.caption = None if caption is None else value[caption]
        elif isinstance(value, tuple | list) and value:
            self.image = value[0]
            about = _plain(value[1]) if len(value) > 1 else None
            # A class has a number; a text is a caption.
            self.label, self.caption = (None, about) if isinstance(about, str) else (about, None)
        else:
            self.image = value


def _plain(value: Any) -> Any:
    """A number of torch or numpy as one of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


class _Reader:
    """Reads items as images of one size. `rows` are the items that are taken."""

    def __init__(self, name: str, dataset: Any, rows: Tensor, options: Options) -> None:
        self.name, self.dataset, self.rows = name, dataset, rows
        self.resizes = options.shape is not None
        first = [self.item(place) for place in range(0, len(rows), -(-len(rows) // LOOKED_AT))]
        shapes = [self._own_shape(item) for item in first]
        floats = [torch.as_tensor(item.image) for item in first if not _is_picture(item.image)]
        floats = [values for values in floats if values.is_floating_point()]
        self.signed = any(bool((values < 0).any()) for values in floats)
        if floats:
            logger.info("%s: floats are taken as %s", name, "[-1, 1]" if self.signed else "[0, 1]")
        counts = {shape[0] for shape in shapes}
        channels = options.channels or (counts.pop() if len(counts) == 1 else 3)
        self.shape = (channels, *(options.shape or shapes[0][1:]))

    def item(self, place: int) -> _Item:
        row = int(self.rows[place])
        try:
            return _Item(self.dataset[row], f"item {row} of {self.name}")
        except ScaleLongError:
            raise
        except Exception as error:
            raise UnreadableDataError(
                f"item {row} of {self.name} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def pixels(self, item: _Item) -> Tensor:
        """uint8 (C, H, W)."""
        shape = self._own_shape(item)
        if shape[1:] != self.shape[1:] and not self.resizes:
            error = MixedSizesError(
                f"{item.where} is {shape[1]}×{shape[2]}, the first one {self.shape[1]}×{self.shape[2]} (height×width): "
                "give one `size` for all"
            )
            error.smallest, error.found = min(*shape[1:], *self.shape[1:]), "different sizes"
            raise error
        if _is_picture(item.image):
            return torch.from_numpy(decode_image(item.image.copy(), *self.shape)[0].copy())
        check_conversion(shape[0], self.shape[0], self.name)
        values = as_bytes(_channels_first(item.image), item.where, self.signed)
        return resize(convert_channels(values[None], self.shape[0]), *self.shape[1:])[0]

    def _own_shape(self, item: _Item) -> tuple[int, int, int]:
        if _is_picture(item.image):
            mode = item.image.mode
            channels = 1 if mode in ("1", "L", "LA", "I", "I;16") else 4 if mode == "RGBA" else 3
            return channels, item.image.height, item.image.width
        try:
            values = _channels_first(item.image)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnreadableDataError(
                f"{item.where} holds a {type(item.image).__name__} as its image; needed is a tensor (C, H, W), an "
                "array (H, W, C) or an image of Pillow"
            ) from error
        if values.dim() != 3:
            raise UnreadableDataError(f"{item.where} has the shape {tuple(values.shape)}; images need (C, H, W)")
        return values.shape[0], values.shape[1], values.shape[2]


def _is_picture(image: Any) -> TypeGuard[Image]:
    return type(image).__module__.startswith("PIL.")


def _channels_first(image: Any) -> Tensor:
    """(C, H, W) from a tensor (C, H, W) or (H, W), or from an array (H, W, C) or (H, W)."""
    values = torch.as_tensor(image).cpu()
    if values.dim() == 2:
        return values[None]
    return values if isinstance(image, Tensor) or values.dim() != 3 else values.permute(2, 0, 1)
