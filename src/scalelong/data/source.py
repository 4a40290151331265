"""Encoded images by number, wherever they are stored, made into a data set: decoded now if it fits, later if not."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import InvalidConfigError
from .broken import BrokenImage, Tally, log
from .dataset import Annotations, ImageData, MemoryData
from .decode import Look, UndecodableError, decode, look
from .errors import BrokenImagesError, MixedSizesError
from .options import Options, Progress

CHUNK = 64  # images handed to a thread at a time
T = TypeVar("T")


class Source(ABC):
    """Files, rows or archive members. Must survive pickling: worker processes get a copy."""

    annotations: Annotations

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, row: int) -> str: ...

    @abstractmethod
    def read(self, row: int) -> bytes:
        """The encoded image; OSError or UndecodableError if it cannot be had."""

    @abstractmethod
    def version(self) -> str:
        """Changes when the stored images do, as far as names and sizes tell."""


def from_source(name: str, source: Source, options: Options) -> ImageData:
    """Reads headers where size or channels are to come from the images, then decodes into memory or opens a stream."""
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"channels must be 1 (gray), 3 (RGB) or 4 (RGBA) for image files, got {options.channels}"
        )
    rows = options.chosen(len(source))
    tally = Tally(name, len(rows), options.allowed_broken(len(rows)))
    channels, height, width, rows = _survey(source, rows, options, tally)
    if options.fits(len(rows), channels, height, width):
        images, rows = _decode_all(source, rows, (channels, height, width), tally, options.progress)
        data = MemoryData(name, images, source.annotations.take(rows), tally)
    else:
        data = StreamData(name, source, rows, (channels, height, width), tally)
    if len(rows) == 0:
        raise BrokenImagesError(f"{name}: not one image can be read: {tally.names()}")
    tally.warn()
    return data


class StreamData(ImageData):
    """Images decoded when fetched.

    A broken image is replaced by the next readable one of the same part, so that batches keep their size and an
    index gives the same image always.
    """

    in_memory = False

    def __init__(self, name: str, source: Source, rows: Tensor, shape: tuple[int, int, int], tally: Tally) -> None:
        self.name, self._source, self._rows, self.tally = name, source, rows, tally
        self.channels, self.height, self.width = shape
        self.annotations = source.annotations.take(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(rows), self.channels, self.height, self.width, dtype=torch.uint8)
        actual = torch.empty_like(rows)
        for place, row in enumerate(rows.tolist()):
            actual[place] = self._read_into(images[place], row)
        return images, actual

    def _read_into(self, image: Tensor, row: int) -> int:
        for step in range(len(self)):
            candidate = (row + step) % len(self)
            broken = _decode_into(image, self._source, int(self._rows[candidate]))
            if broken is None:
                return candidate
            if broken.name not in self.tally.found:
                log.warning("%s: broken image, replaced by the next one: %s", self.name, broken)
            self.tally.add(broken)
        raise BrokenImagesError(f"{self.name}: not one image can be read: {self.tally.names()}")

    def _take(self, rows: Tensor) -> StreamData:
        return StreamData(
            self.name, self._source, self._rows[rows], (self.channels, self.height, self.width), self.tally
        )

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256(self._source.version().encode())
        sha.update(self._rows.numpy().data)
        return sha.hexdigest()


def _survey(source: Source, rows: Tensor, options: Options, tally: Tally) -> tuple[int, int, int, Tensor]:
    """Channels, height and width, and the rows whose header can be read.

    Where a size is given, one colour image settles the channels and the rest is left unread.
    """
    shape, channels = options.shape, options.channels
    if shape and channels:
        return channels, *shape, rows
    sizes: Counter[tuple[int, int]] = Counter()
    kinds: set[str] = set()
    bad: set[int] = set()
    for row, seen in _in_threads(lambda row: _look_at(source, row), rows, options.progress):
        if isinstance(seen, BrokenImage):
            tally.add(seen)
            bad.add(row)
            continue
        sizes[seen.height, seen.width] += 1
        kinds.add(seen.kind)
        if shape and (channels or "colour" in kinds or len(kinds) > 1):
            break
    if not kinds:
        raise BrokenImagesError(f"{tally.where}: not one image can be read: {tally.names()}")
    if shape is None:
        shape = _only_size(sizes, tally.where)
    channels = channels or (1 if kinds == {"gray"} else 4 if kinds == {"rgba"} else 3)
    return channels, *shape, torch.tensor([row for row in rows.tolist() if row not in bad], dtype=torch.int64)


def _only_size(sizes: Counter[tuple[int, int]], where: str) -> tuple[int, int]:
    if len(sizes) == 1:
        return next(iter(sizes))
    most = [f"{width}×{height} ({count} images)" for (height, width), count in sizes.most_common(8)]
    more = f" and {len(sizes) - 8} more" if len(sizes) > 8 else ""
    smallest = min(min(size) for size in sizes)
    raise MixedSizesError(
        f"{where}: the images have {len(sizes)} different sizes (width×height): {', '.join(most)}{more}. Pass size=, "
        f"for instance size={smallest}: the shorter side is resized to it and the middle is kept"
    )


def _decode_all(
    source: Source, rows: Tensor, shape: tuple[int, int, int], tally: Tally, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """All images as one tensor, and the rows that are in it."""
    images = torch.empty(len(rows), *shape, dtype=torch.uint8)
    kept = torch.ones(len(rows), dtype=torch.bool)
    places = torch.arange(len(rows))
    for place, broken in _in_threads(
        lambda place: _decode_into(images[place], source, int(rows[place])), places, progress
    ):
        if broken is not None:
            tally.add(broken)
            kept[place] = False
    return (images, rows) if bool(kept.all()) else (images[kept], rows[kept])


def _look_at(source: Source, row: int) -> Look | BrokenImage:
    try:
        return look(source.read(row))
    except (UndecodableError, OSError) as error:
        return BrokenImage(source.name(row), str(error))


def _decode_into(image: Tensor, source: Source, row: int) -> BrokenImage | None:
    try:
        image.numpy()[...] = decode(source.read(row), *image.shape)
    except (UndecodableError, OSError) as error:
        return BrokenImage(source.name(row), str(error))
    return None


def _in_threads(function: Callable[[int], T], rows: Tensor, progress: Progress | None) -> Iterator[tuple[int, T]]:
    """(row, function(row)) in order. Threads help because Pillow decodes without holding the interpreter's lock."""
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        chunks = [chunk.tolist() for chunk in rows.split(CHUNK)]
        results = pool.map(lambda chunk: [function(row) for row in chunk], chunks)
        done = 0
        for chunk, values in zip(chunks, results, strict=True):
            done += len(chunk)
            if progress is not None:
                progress(done, len(rows))
            yield from zip(chunk, values, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)
