"""Encoded images by number, wherever they are stored, made into a data set.

A `Source` gives the bytes of image files. `from_source` reads some headers, plans one size and number of channels for
all, and decodes everything into memory if it fits. If not, `StreamData` decodes images when they are fetched.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..errors import BrokenImagesError, CannotReadError, InvalidConfigError, MixedSizesError
from ..files import NOT_THE_FILE, in_words, refusal
from .dataset import Annotations, BrokenImage, BrokenImages, ImageData, MemoryData, Options, Progress, logger
from .decode import Header, UndecodableError, decode, prepare, read_header

if TYPE_CHECKING:
    import numpy as np


SHOWN_SIZES = 8  # sizes in a message


@dataclass
class Survey:
    """Sizes and kinds that were seen."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # of (height, width)
    kinds: set[str] = field(default_factory=set)

    def add(self, seen: Header) -> None:
        self.sizes[seen.height, seen.width] += 1
        self.kinds.add(seen.kind)

    def settles(self, options: Options) -> bool:
        """Whether further images could not change the plan: the size is given and the channels are, or are mixed."""
        return bool(options.shape and (options.channels or "colour" in self.kinds or len(self.kinds) > 1))

    def agrees(self, options: Options) -> bool:
        return options.shape is not None or len(self.sizes) == 1

    def channels(self) -> int:
        """Gray stays gray, RGBA stays RGBA, and any mixture becomes RGB."""
        return 1 if self.kinds == {"gray"} else 4 if self.kinds == {"rgba"} else 3

    def plan(self, options: Options, broken_images: BrokenImages) -> tuple[int, int, int]:
        """Channels, height and width for all."""
        if not self.kinds:
            raise BrokenImagesError(
                f"{broken_images.where}: not one of the images can be read: {broken_images.names()}"
            )
        if not self.agrees(options):
            sizes = [
                f"{width}×{height} ({count} images)" for (height, width), count in self.sizes.most_common(SHOWN_SIZES)
            ]
            more = f" and {len(self.sizes) - SHOWN_SIZES} more" if len(self.sizes) > SHOWN_SIZES else ""
            smallest = min(min(size) for size in self.sizes)
            error = MixedSizesError(
                f"{broken_images.where}: the images have {len(self.sizes)} different sizes (width×height): "
                f"{', '.join(sizes)}{more}. Give one for all, for instance `size` {smallest}: "
                f"the shorter side is resized to it and the middle is kept"
            )
            error.smallest = smallest
            raise error
        height, width = options.shape or next(iter(self.sizes))
        return options.channels or self.channels(), height, width


CHUNK = 64  # images handed to a thread at a time
SAMPLE = 64  # headers read before anything is decoded
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


def from_source(name: str, source: Source, options: Options) -> ImageData:
    """Plans size and channels from a few headers, then decodes into memory, or reads all headers and opens a stream."""
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"channels must be 1 (gray), 3 (RGB) or 4 (RGBA) for image files, got {options.channels}"
        )
    prepare()
    rows = options.chosen(len(source))
    broken_images = BrokenImages(name, len(rows), options.allowed_broken(len(rows)))
    survey, _ = _survey(source, rows[:: max(1, len(rows) // SAMPLE)], options, broken_images)
    if not survey.kinds or not survey.agrees(options):
        survey, _ = _survey(source, rows, options, broken_images, options.progress)
    plan = survey.plan(options, broken_images)
    if options.fits(len(rows), *plan):
        data = _decoded(name, source, rows, plan, options, broken_images)
    else:
        survey, rows = _survey(source, rows, options, broken_images, options.progress)
        data = StreamData(name, source, rows, survey.plan(options, broken_images), broken_images)
    broken_images.warn()
    return data


def _decoded(
    name: str, source: Source, rows: Tensor, plan: tuple[int, int, int], options: Options, broken_images: BrokenImages
) -> MemoryData:
    """The few headers are believed until all images have been seen; if these say otherwise, decodes once more."""
    images, kept, survey = _decode_all(source, rows, plan, broken_images, options.progress)
    if survey.plan(options, broken_images) != plan:
        images, kept, _ = _decode_all(
            source, rows, survey.plan(options, broken_images), broken_images, options.progress
        )
    return MemoryData(name, images, source.annotations.take(kept), broken_images)


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
        return StreamData(
            self.name, self.source, self.rows[rows], (self.channels, self.height, self.width), self.broken_images
        )

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256(self.source.version().encode())
        sha.update(self.rows.numpy().data)
        return sha.hexdigest()


def _survey(
    source: Source, rows: Tensor, options: Options, broken_images: BrokenImages, progress: Progress | None = None
) -> tuple[Survey, Tensor]:
    """What the headers tell, and the rows without those whose header cannot be read."""
    survey = Survey()
    bad: set[int] = set()
    for row, seen in _in_threads(lambda row: _look_at(source, row), rows, progress):
        if isinstance(seen, BrokenImage):
            broken_images.add(seen)
            bad.add(row)
        else:
            survey.add(seen)
        if survey.settles(options):
            break
    broken_images.check()
    return survey, torch.tensor([row for row in rows.tolist() if row not in bad], dtype=torch.int64)


def _decode_all(
    source: Source, rows: Tensor, plan: tuple[int, int, int], broken_images: BrokenImages, progress: Progress | None
) -> tuple[Tensor, Tensor, Survey]:
    """All images as one tensor, the rows that are in it, and what the images were."""
    images = torch.empty(len(rows), *plan, dtype=torch.uint8)
    pixels, numbers = images.numpy(), rows.tolist()
    good = torch.ones(len(rows), dtype=torch.bool)
    survey = Survey()
    for place, seen in _in_threads(
        lambda place: _decode_into(pixels[place], source, numbers[place]), torch.arange(len(rows)), progress
    ):
        if isinstance(seen, BrokenImage):
            broken_images.add(seen)
            good[place] = False
        else:
            survey.add(seen)
    broken_images.check()
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
