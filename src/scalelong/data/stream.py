"""Encoded images by number, wherever they are stored, made into a data set.

A `Source` gives the bytes of image files. `from_source` reads their headers, plans one size and number of channels for
all, and decodes everything into memory if it fits. If not, `StreamData` decodes images when they are fetched.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..errors import BrokenImagesError, CannotReadError, InvalidConfigError, MixedSizesError
from ..files import NOT_THE_FILE, in_words, refusal
from .dataset import (
    Annotations,
    BrokenImage,
    BrokenImages,
    ImageData,
    MemoryData,
    Options,
    Progress,
    logger,
    sizes_in_words,
)
from .decode import Header, UndecodableError, decode, prepare, read_header

if TYPE_CHECKING:
    import numpy as np

CHUNK = 64  # images handed to a thread at a time
SHOWN_SIZES = 8  # sizes in a message
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

    def head(self, row: int) -> bytes:
        """The beginning of the encoded image, where that is cheaper to read than all of it."""
        return self.read(row)

    @abstractmethod
    def version(self) -> str:
        """Changes when the stored images do, as far as names and sizes tell. It is part of a stream's fingerprint."""

    def stamp(self) -> str:
        """Changes when the stored images do, also when their sizes stay."""
        return self.version()


class Survey:
    """Sizes (height, width) and kinds of images that were seen."""

    def __init__(self) -> None:
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.kinds: set[str] = set()

    def add(self, seen: Header) -> None:
        self.sizes[seen.height, seen.width] += 1
        self.kinds.add(seen.kind)

    def settles(self, options: Options) -> bool:
        """Further images could not change the plan: the size is given and the channels are, or are mixed."""
        return bool(options.shape and (options.channels or "colour" in self.kinds or len(self.kinds) > 1))

    def different_sizes(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.sizes) if len(self.sizes) > 1 else ()

    def plan(self, options: Options, broken: BrokenImages) -> tuple[int, int, int]:
        """Channels, height and width for all: gray stays gray, RGBA stays RGBA, and any mixture becomes RGB."""
        if not self.kinds:
            raise BrokenImagesError(f"{broken.where}: not one of the images can be read: {broken.names()}")
        if options.shape is None and len(self.sizes) > 1:
            raise self._mixed(broken.where)
        height, width = options.shape or next(iter(self.sizes))
        found = 1 if self.kinds == {"gray"} else 4 if self.kinds == {"rgba"} else 3
        return options.channels or found, height, width

    def _mixed(self, where: str) -> MixedSizesError:
        common = self.sizes.most_common(SHOWN_SIZES)
        sizes = ", ".join(f"{width}×{height} ({count} images)" for (height, width), count in common)
        more = f" and {len(self.sizes) - SHOWN_SIZES} more" if len(self.sizes) > SHOWN_SIZES else ""
        smallest = min(min(size) for size in self.sizes)
        error = MixedSizesError(
            f"{where}: the images have {len(self.sizes)} different sizes (width×height): {sizes}{more}. Give one for "
            f"all, for instance `size` {smallest}: the shorter side is resized to it and the middle is kept"
        )
        error.smallest, error.found = smallest, sizes_in_words(self.sizes)
        return error


def from_source(name: str, source: Source, options: Options) -> ImageData:
    """Plans size and channels from the headers, then decodes into memory, or opens a stream."""
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"channels must be 1 (gray), 3 (RGB) or 4 (RGBA) for image files, got {options.channels}"
        )
    prepare()
    rows = options.chosen(len(source))
    broken = BrokenImages(name, len(rows), options.allowed_broken(len(rows)))
    survey, readable = _survey(source, rows, options, broken)
    plan = survey.plan(options, broken)
    if options.fits(len(rows), *plan):
        images, kept, survey = _decode_all(source, rows, plan, broken, options.progress)
        broken.check()  # not before: those whose pixels are damaged are named as well
        data = MemoryData(name, images, source.annotations.take(kept), broken)
    else:
        broken.check()
        data = StreamData(name, source, readable, plan, broken)
    data.stored_sizes = survey.different_sizes()
    broken.warn()
    return data


class StreamData(ImageData):
    """Images decoded when fetched.

    A broken image is replaced by the next readable one of the same part, so that batches keep their size and an
    index gives the same image always.
    """

    in_memory, decodes = False, True

    def __init__(
        self, name: str, source: Source, rows: Tensor, shape: tuple[int, int, int], broken_images: BrokenImages
    ) -> None:
        self.name, self.source, self.rows, self.broken_images = name, source, rows, broken_images
        self.channels, self.height, self.width = shape
        self.annotations = source.annotations.take(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(rows), self.channels, self.height, self.width, dtype=torch.uint8)
        actual = torch.empty_like(rows)
        for place, row in enumerate(rows.tolist()):
            actual[place] = self._read_into(images[place], row)
        return images, actual

    def _read_into(self, image: Tensor, row: int) -> int:
        for step in range(len(self)):
            candidate = (row + step) % len(self)
            seen = _decode_into(image.numpy(), self.source, int(self.rows[candidate]))
            if isinstance(seen, Header):
                return candidate
            if seen.name not in self.broken_images.found:
                logger.warning("%s: broken image, replaced by the next one: %s", self.name, seen)
            self.broken_images.add(seen)
            self.broken_images.check()
        raise BrokenImagesError(f"{self.name}: not one image can be read: {self.broken_images.names()}")

    def _take(self, rows: Tensor) -> StreamData:
        shape = (self.channels, self.height, self.width)
        return StreamData(self.name, self.source, self.rows[rows], shape, self.broken_images)

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256(self.source.version().encode())
        sha.update(self.rows.numpy().data)
        return sha.hexdigest()


def _survey(source: Source, rows: Tensor, options: Options, broken: BrokenImages) -> tuple[Survey, Tensor]:
    """What the headers tell, and the rows without those whose header cannot be read.

    It ends where further headers could not change the plan, unless too many were broken: the error names all of them.
    """
    survey = Survey()
    bad: set[int] = set()
    for row, seen in in_threads(lambda row: _look_at(source, row), rows, options.progress):
        if isinstance(seen, BrokenImage):
            broken.add(seen)
            bad.add(row)
        else:
            survey.add(seen)
        if survey.settles(options) and len(bad) <= broken.allowed:
            break
    return survey, torch.tensor([row for row in rows.tolist() if row not in bad], dtype=torch.int64)


def _decode_all(
    source: Source, rows: Tensor, plan: tuple[int, int, int], broken: BrokenImages, progress: Progress | None
) -> tuple[Tensor, Tensor, Survey]:
    """All images as one tensor, the rows that are in it, and what the images were."""
    images = torch.empty(len(rows), *plan, dtype=torch.uint8)
    pixels, numbers = images.numpy(), rows.tolist()
    good, survey = torch.ones(len(rows), dtype=torch.bool), Survey()
    decoded = in_threads(
        lambda place: _decode_into(pixels[place], source, numbers[place]), torch.arange(len(rows)), progress
    )
    for place, seen in decoded:
        if isinstance(seen, BrokenImage):
            broken.add(seen)
            good[place] = False
        else:
            survey.add(seen)
    if not survey.kinds:
        raise BrokenImagesError(f"{broken.where}: not one of the images can be read: {broken.names()}")
    return (images, rows, survey) if bool(good.all()) else (images[good], rows[good], survey)


def _look_at(source: Source, row: int) -> Header | BrokenImage:
    try:
        try:
            return read_header(source.head(row))
        except UndecodableError:  # some formats keep their header at the end
            return read_header(source.read(row))
    except (UndecodableError, OSError) as error:
        return _broken(source, row, error)


def _decode_into(image: np.ndarray, source: Source, row: int) -> Header | BrokenImage:
    try:
        image[...], seen = decode(source.read(row), *image.shape)
    except (UndecodableError, OSError) as error:
        return _broken(source, row, error)
    return seen


def _broken(source: Source, row: int, error: Exception) -> BrokenImage:
    if isinstance(error, OSError) and error.errno in NOT_THE_FILE:
        raise refusal(error, source.name(row), CannotReadError) or error
    return BrokenImage(source.name(row), in_words(error))


def in_threads(function: Callable[[int], T], rows: Tensor, progress: Progress | None) -> Iterator[tuple[int, T]]:
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
