"""What size and how many channels a set of images is to have, from what its images are."""

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
from .dataset import Annotations, BrokenImage, ImageData, MemoryData, Options, Progress, Tally, log
from .decode import Look, UndecodableError, decode, look, prepare

if TYPE_CHECKING:
    import numpy as np


LISTED = 8  # sizes in a message


@dataclass
class Survey:
    """Sizes and kinds that were seen."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # of (height, width)
    kinds: set[str] = field(default_factory=set)

    def add(self, seen: Look) -> None:
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

    def plan(self, options: Options, tally: Tally) -> tuple[int, int, int]:
        """Channels, height and width for all."""
        if not self.kinds:
            raise BrokenImagesError(f"{tally.where}: not one of the images can be read: {tally.names()}")
        if not self.agrees(options):
            sizes = [f"{width}×{height} ({count} images)" for (height, width), count in self.sizes.most_common(LISTED)]
            more = f" and {len(self.sizes) - LISTED} more" if len(self.sizes) > LISTED else ""
            smallest = min(min(size) for size in self.sizes)
            error = MixedSizesError(
                f"{tally.where}: the images have {len(self.sizes)} different sizes (width×height): "
                f"{', '.join(sizes)}{more}. Give one for all, for instance --size {smallest} (in Python, "
                f"size={smallest}): the shorter side is resized to it and the middle is kept"
            )
            error.smallest = smallest
            raise error
        height, width = options.shape or next(iter(self.sizes))
        return options.channels or self.channels(), height, width


# Encoded images by number, wherever they are stored, made into a data set: decoded now if it fits, later if not.

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
        """Changes when the stored images do, as far as names and sizes tell."""

    def stamp(self) -> Stamp:
        """Changes when the stored images do, also when their sizes stay."""
        return Stamp(self.version(), 0.0)


@dataclass(frozen=True)
class Stamp:
    """Changes when files do, without reading them."""

    text: str
    newest: float
    """Time of the latest change."""


def from_source(name: str, source: Source, options: Options) -> ImageData:
    """Plans size and channels from a few headers, then decodes into memory, or reads all headers and opens a stream."""
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"channels must be 1 (gray), 3 (RGB) or 4 (RGBA) for image files, got {options.channels}"
        )
    prepare()
    rows = options.chosen(len(source))
    tally = Tally(name, len(rows), options.allowed_broken(len(rows)))
    survey, _ = _survey(source, rows[:: max(1, len(rows) // SAMPLE)], options, tally)
    if not survey.kinds or not survey.agrees(options):
        survey, _ = _survey(source, rows, options, tally, options.progress)
    plan = survey.plan(options, tally)
    if options.fits(len(rows), *plan):
        data = _decoded(name, source, rows, plan, options, tally)
    else:
        survey, rows = _survey(source, rows, options, tally, options.progress)
        data = StreamData(name, source, rows, survey.plan(options, tally), tally)
    tally.warn()
    return data


def _decoded(
    name: str, source: Source, rows: Tensor, plan: tuple[int, int, int], options: Options, tally: Tally
) -> MemoryData:
    """The few headers are believed until all images have been seen; if these say otherwise, decodes once more."""
    images, kept, survey = _decode_all(source, rows, plan, tally, options.progress)
    if survey.plan(options, tally) != plan:
        images, kept, _ = _decode_all(source, rows, survey.plan(options, tally), tally, options.progress)
    return MemoryData(name, images, source.annotations.take(kept), tally)


class StreamData(ImageData):
    """Images decoded when fetched.

    A broken image is replaced by the next readable one of the same part, so that batches keep their size and an
    index gives the same image always.
    """

    in_memory, decodes = False, True

    def __init__(self, name: str, source: Source, rows: Tensor, shape: tuple[int, int, int], tally: Tally) -> None:
        self.name, self.source, self.rows, self.tally = name, source, rows, tally
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
            if isinstance(seen, Look):
                return candidate
            if seen.name not in self.tally.found:
                log.warning("%s: broken image, replaced by the next one: %s", self.name, seen)
            self.tally.add(seen)
        raise BrokenImagesError(f"{self.name}: not one image can be read: {self.tally.names()}")

    def _take(self, rows: Tensor) -> StreamData:
        return StreamData(self.name, self.source, self.rows[rows], (self.channels, self.height, self.width), self.tally)

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256(self.source.version().encode())
        sha.update(self.rows.numpy().data)
        return sha.hexdigest()


def _survey(
    source: Source, rows: Tensor, options: Options, tally: Tally, progress: Progress | None = None
) -> tuple[Survey, Tensor]:
    """What the headers tell, and the rows without those whose header cannot be read."""
    survey = Survey()
    bad: set[int] = set()
    for row, seen in _in_threads(lambda row: _look_at(source, row), rows, progress):
        if isinstance(seen, BrokenImage):
            tally.add(seen)
            bad.add(row)
        else:
            survey.add(seen)
        if survey.settles(options):
            break
    return survey, torch.tensor([row for row in rows.tolist() if row not in bad], dtype=torch.int64)


def _decode_all(
    source: Source, rows: Tensor, plan: tuple[int, int, int], tally: Tally, progress: Progress | None
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
            tally.add(seen)
            good[place] = False
        else:
            survey.add(seen)
    return (images, rows, survey) if bool(good.all()) else (images[good], rows[good], survey)


def _look_at(source: Source, row: int) -> Look | BrokenImage:
    try:
        try:
            return look(source.head(row))
        except UndecodableError:  # some formats keep their header at the end
            return look(source.read(row))
    except (UndecodableError, OSError) as error:
        return _broken(source, row, error)


def _decode_into(image: np.ndarray, source: Source, row: int) -> Look | BrokenImage:
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
