"""Data set objects: anything with a length whose items can be asked for by number, and tables of `datasets`.

An item is an image, a pair (image, label or text), or a dictionary with such columns (`image`, `label`, `text`, ...).
An image is

- a tensor (C, H, W) or (H, W): uint8, or floats in [0, 1] or [-1, 1]. If one item has negative values, all floats are
  taken as [-1, 1];
- a numpy array (H, W) or (H, W, C) of the same types;
- an image of Pillow.

Each item is read once for its size, label and text, and again for its pixels. If the images fit into memory they are
kept, so a random transform is applied once: leave mirroring to training (`flip`). If not, items are read again when
they are fetched, and must then be the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataNotFoundError, InvalidConfigError, UnreadableDataError
from ..files import in_words, read_bytes
from ..optional import needs
from .dataset import Annotations, Options, logger
from .decode import Header, UndecodableError, as_bytes, convert_channels, decode, header_of, resize
from .folders import CAPTIONS, IMAGES, LABELS, MAX_MEMBER, check_captions, first_of, number_labels
from .stream import Source

KINDS = {1: "gray", 4: "rgba"}


class ObjectSource(Source):
    """The items of an object with `__len__` and `__getitem__`."""

    def __init__(self, dataset: Any, options: Options) -> None:
        self.where = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise InvalidConfigError(
                f"data of the type {self.where} cannot be read: needed are a length and items by number (a map-style "
                "Dataset). An iterable one cannot be resumed at a step; save it to files first"
            )
        if len(dataset) == 0:
            raise DataNotFoundError(f"the data set {self.where} is empty")
        self.dataset, self.signed, self._sha = dataset, False, hashlib.sha256(b"objects")
        self._headers: dict[int, Header] = {}
        labels, captions = [None] * len(dataset), [None] * len(dataset)
        chosen = options.chosen(len(dataset)).tolist()
        floats = False
        for row in chosen:
            image, labels[row], captions[row] = _taken_apart(self._item(row), f"{self.name(row)} of {self.where}")
            if isinstance(image, Tensor):
                count, height, width = image.shape
                self._headers[row] = Header(height, width, KINDS.get(count, "colour"))
                floats |= image.is_floating_point()
                self.signed |= image.is_floating_point() and bool((image < 0).any())
                self._sha.update(image.contiguous().view(torch.uint8).numpy().data)
            else:
                self._headers[row] = header_of(image)
                self._sha.update(image.tobytes())
        if floats:
            logger.info("%s: floats are taken as %s", self.where, "[-1, 1]" if self.signed else "[0, 1]")
        self.annotations = self._annotations([labels[row] for row in chosen], [captions[row] for row in chosen], chosen)

    def _annotations(self, labels: list[Any], captions: list[Any], chosen: list[int]) -> Annotations:
        names = getattr(self.dataset, "classes", None)
        names = [str(word) for word in names] if isinstance(names, list | tuple) else None
        numbers, classes = (None, None) if labels[0] is None else number_labels(labels, self.where, names)
        texts = None if captions[0] is None else check_captions(captions, self.where)
        places = torch.zeros(len(self.dataset), dtype=torch.int64)  # rows that are not chosen are never asked for
        places[torch.tensor(chosen)] = torch.arange(len(chosen))
        return Annotations(numbers, classes, texts).take(places)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, row: int) -> str:
        return f"item {row}"

    def header(self, row: int) -> Header:
        return self._headers[row]

    def pixels(self, row: int, channels: int, height: int, width: int) -> tuple[Any, Header]:
        image, *_ = _taken_apart(self._item(row), self.name(row))
        if not isinstance(image, Tensor):
            return decode(image.copy(), channels, height, width)
        if channels != len(image) and not {len(image), channels} <= {1, 3, 4}:
            raise InvalidConfigError(f"{self.name(row)} of {self.where} has {len(image)} channels, not {channels}")
        values = as_bytes(image, f"{self.name(row)} of {self.where}", self.signed)
        return resize(convert_channels(values[None], channels), height, width)[0].numpy(), self._headers[row]

    def version(self) -> str:
        return self._sha.hexdigest()

    def _item(self, row: int) -> Any:
        try:
            return self.dataset[row]
        except Exception as error:
            raise UnreadableDataError(
                f"{self.name(row)} of {self.where} cannot be read: {type(error).__name__}: {error}"
            ) from error


def _taken_apart(item: Any, where: str) -> tuple[Any, Any, Any]:
    """Image, label and caption. The image is one of Pillow, or a tensor (C, H, W)."""
    image, label, caption = item, None, None
    if isinstance(item, dict):
        columns = [str(key) for key in item]
        column, label_column, text_column = (first_of(names, columns) for names in (IMAGES, LABELS, CAPTIONS))
        if column is None:
            raise UnreadableDataError(f"{where} has the columns {columns}; images were looked for in {list(IMAGES)}")
        image = item[column]
        label = None if label_column is None else _plain(item[label_column])
        caption = None if text_column is None else item[text_column]
    elif isinstance(item, tuple | list) and item:
        image, about = item[0], _plain(item[1]) if len(item) > 1 else None
        # A class has a number; a text is a caption.
        label, caption = (None, about) if isinstance(about, str) else (about, None)
    if type(image).__module__.startswith("PIL."):
        return image, label, caption
    try:
        values = torch.as_tensor(image).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnreadableDataError(
            f"{where} holds a {type(image).__name__} as its image; needed is a tensor (C, H, W), an array (H, W, C) or "
            "an image of Pillow"
        ) from error
    values = values[None] if values.dim() == 2 else values
    if values.dim() != 3:
        raise UnreadableDataError(f"{where} has the shape {tuple(values.shape)}; images need (C, H, W)")
    channels_last = not isinstance(image, Tensor) and torch.as_tensor(image).dim() == 3
    return values.permute(2, 0, 1) if channels_last else values, label, caption


def _plain(value: Any) -> Any:
    """A number of torch or numpy as one of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


# Tables of Hugging Face's `datasets`


class TableSource(Source):
    """The rows of a table. A row holds an image, or names one below `folders`, by default the cache of `datasets`."""

    def __init__(
        self, dataset: Any, where: str, folders: Sequence[str | Path] | None = None, version: str | None = None
    ) -> None:
        datasets = needs("datasets", "hub", f"loading {where}")
        cache = [datasets.config.HF_DATASETS_CACHE, datasets.config.HF_CACHE_HOME]
        self.folders = [Path(folder) for folder in (cache if folders is None else folders)]
        self._version = version or f"{dataset._fingerprint} {len(dataset)}"
        dataset = dataset.with_format(None)
        features = dataset.features
        candidates = [column for column, feature in features.items() if _holds_images(feature)]
        self.image = first_of(IMAGES, candidates) or (candidates[0] if len(candidates) == 1 else "")
        if not self.image:
            raise UnreadableDataError(
                f"{where}: a column of encoded images is needed, by preference {list(IMAGES)}; the columns are "
                f"{list(features)}, and those that could be: {candidates}. Rename one"
            )
        if isinstance(features[self.image], datasets.Image):  # decoding is ours: one rule for all sources
            dataset = dataset.cast_column(self.image, datasets.Image(decode=False))
        self.dataset = dataset.select_columns([self.image])
        named = [column for column, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
        label, caption = first_of(LABELS, features) or (named or [None])[0], first_of(CAPTIONS, features)
        try:
            labels, captions = ((column and dataset.select_columns([column])[:][column]) for column in (label, caption))
        except Exception as error:  # whatever Arrow or `datasets` make of a damaged column
            raise UnreadableDataError(f"{where} cannot be read: {in_words(error)}; write it again") from error
        numbers = classes = None
        if labels is not None:
            classes = getattr(features[label], "names", None)
            numbers, classes = number_labels(labels, f"{where}, column {label!r}", classes)
        texts = None if captions is None else check_captions(captions, f"{where}, column {caption!r}")
        self.annotations = Annotations(numbers, classes, texts)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, row: int) -> str:
        return f"row {row}"

    def read(self, row: int) -> bytes:
        try:
            value = self.dataset[row][self.image]
        except Exception as error:
            raise UndecodableError(in_words(error)) from error
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(content, bytes):
            return content
        if not isinstance(path, str) or not path or "\0" in path:
            raise UndecodableError("no image in this row")
        for folder in self.folders:  # a data set must not read files that are not its own
            if (folder / path).resolve().is_relative_to(folder.resolve()) and (folder / path).is_file():
                return read_bytes(folder / path, MAX_MEMBER)
        raise UndecodableError(f"neither bytes nor, in the folder of the data, a file {path!r}")

    def version(self) -> str:
        return self._version


def _holds_images(feature: Any) -> bool:
    datasets = needs("datasets", "hub", "loading a data set")
    if isinstance(feature, datasets.Value):
        return feature.dtype in ("binary", "large_binary")
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)
