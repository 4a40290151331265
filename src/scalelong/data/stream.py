"""Encoded images by number, wherever they are stored, made into a data set; and the image cache.

A `Source` gives the bytes of image files. `from_source` reads their headers, plans one size and number of channels for
all, and decodes everything into memory if it fits. If not, `StreamData` decodes images when they are fetched, and
`decoded_once` decodes all of them into a file that is mapped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .._version import __version__
from ..console import byte_size
from ..errors import BrokenImagesError, CannotReadError, CannotWriteError, InvalidConfigError, MixedSizesError
from ..files import (
    NOT_THE_FILE,
    allocate,
    cache_folder,
    in_words,
    key_of,
    locked,
    parse_json,
    refusal,
    write_text,
    writing,
)
from ..optional import needs
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
ENOUGH_HEADERS = 10_000  # that are read in any case, so that sizes and broken images of a small folder are known
T = TypeVar("T")


class Source(ABC):
    """Files, rows or archive members, which several threads may ask for at once."""

    annotations: Annotations

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, row: int) -> str: ...

    def read(self, row: int) -> bytes:
        """The encoded image; OSError or UndecodableError if it cannot be had."""
        raise NotImplementedError

    def header(self, row: int) -> Header:
        return read_header(self.read(row))

    def pixels(self, row: int, channels: int, height: int, width: int) -> tuple[np.ndarray, Header]:
        """uint8 (channels, height, width), and what the image was."""
        return decode(self.read(row), channels, height, width)

    @abstractmethod
    def version(self) -> str:
        """Changes when the stored images do, as far as names and sizes tell. It is part of a stream's fingerprint."""


def from_source(name: str, source: Source, options: Options) -> ImageData:
    """Plans size and channels from the headers, then decodes into memory, or opens a stream."""
    if options.channels not in (None, 1, 3, 4):
        raise InvalidConfigError(
            f"`channels` must be 1 (gray), 3 (RGB) or 4 (RGBA) for image files, got {options.channels}"
        )
    prepare()
    rows = options.chosen(len(source))
    broken = BrokenImages(name, len(rows), options.allowed_broken(len(rows)))
    survey, readable = _survey(source, rows, options, broken)
    shape = survey.plan(options, broken)
    if options.fits(len(rows), *shape):
        images = torch.empty(len(rows), *shape, dtype=torch.uint8)
        good, survey = _decode_all(source, rows, images.numpy(), broken, options.progress)
        broken.check()  # not before: those whose pixels are damaged are named as well
        images, rows = (images, rows) if bool(good.all()) else (images[good], rows[good])
        data = MemoryData(name, images, source.annotations.take(rows), broken)
    else:
        broken.check()
        data = StreamData(name, source, readable, shape, broken)
    data.stored_sizes = tuple(survey.sizes) if len(survey.sizes) > 1 else ()
    broken.warn()
    return data


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

    def plan(self, options: Options, broken: BrokenImages) -> tuple[int, int, int]:
        """Channels, height and width for all: gray stays gray, RGBA stays RGBA, and any mixture becomes RGB."""
        if not self.kinds:
            broken.check()
        if options.shape is None and len(self.sizes) > 1:
            common = self.sizes.most_common(SHOWN_SIZES)
            sizes = ", ".join(f"{width}×{height} ({count} images)" for (height, width), count in common)
            more = ", ..." if len(self.sizes) > SHOWN_SIZES else ""
            smallest = min(min(size) for size in self.sizes)
            error = MixedSizesError(
                f"{broken.where}: the images have {len(self.sizes)} different sizes (width×height): {sizes}{more}. "
                f"Give one, for instance `size` {smallest}: the shorter side is resized to it and the middle is kept"
            )
            error.smallest, error.found = smallest, sizes_in_words(self.sizes)
            raise error
        height, width = options.shape or next(iter(self.sizes))
        found = 1 if self.kinds == {"gray"} else 4 if self.kinds == {"rgba"} else 3
        return options.channels or found, height, width


def _survey(source: Source, rows: Tensor, options: Options, broken: BrokenImages) -> tuple[Survey, Tensor]:
    """What the headers tell, and the rows without those whose header cannot be read.

    Of many images it ends where further headers could not change the plan, unless too many were broken: the error
    names all of them.
    """
    survey, bad = Survey(), set()
    for row, seen in _in_threads(lambda row: _tried(source, row, source.header), rows, options.progress):
        if isinstance(seen, BrokenImage):
            broken.add(seen)
            bad.add(row)
        else:
            survey.add(seen)
        enough = sum(survey.sizes.values()) >= ENOUGH_HEADERS and len(bad) <= broken.allowed
        if enough and survey.settles(options):
            break
    return survey, torch.tensor([row for row in rows.tolist() if row not in bad], dtype=torch.int64)


def _decode_all(
    source: Source, rows: Tensor, pixels: np.ndarray, broken: BrokenImages, progress: Progress | None
) -> tuple[Tensor, Survey]:
    """Decode these rows into an array (N, C, H, W). Which ones could be read, bool (N,), and what the images were."""
    numbers, good, survey = rows.tolist(), torch.ones(len(rows), dtype=torch.bool), Survey()
    places = torch.arange(len(rows))
    for place, seen in _in_threads(lambda at: _decode_into(pixels[at], source, numbers[at]), places, progress):
        if isinstance(seen, BrokenImage):
            broken.add(seen)
            good[place] = False
        else:
            survey.add(seen)
    return good, survey


def _decode_into(image: np.ndarray, source: Source, row: int) -> Header | BrokenImage:
    def decoded(row: int) -> Header:
        image[...], seen = source.pixels(row, *image.shape)
        return seen

    return _tried(source, row, decoded)


def _tried(source: Source, row: int, look: Callable[[int], Header]) -> Header | BrokenImage:
    """What `look` finds in a stored image, or that it is broken."""
    try:
        return look(row)
    except (UndecodableError, OSError) as error:
        if isinstance(error, OSError) and error.errno in NOT_THE_FILE:  # the machine lacks something
            raise refusal(error, source.name(row), CannotReadError) or error from error
        return BrokenImage(source.name(row), in_words(error))


def _in_threads(function: Callable[[int], T], rows: Tensor, progress: Progress | None) -> Iterator[tuple[int, T]]:
    """(row, function(row)) in order. Threads help because Pillow decodes without holding the interpreter's lock."""
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        chunks = [chunk.tolist() for chunk in rows.split(CHUNK)]
        done = 0
        for chunk, values in zip(chunks, pool.map(lambda chunk: [function(row) for row in chunk], chunks), strict=True):
            done += len(chunk)
            if progress is not None:
                progress(done, len(rows))
            yield from zip(chunk, values, strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


class StreamData(ImageData):
    """Images decoded when fetched.

    A broken image is replaced by the next readable one of the same part, so that batches keep their size and an
    index gives the same image always.
    """

    def __init__(
        self, name: str, source: Source, rows: Tensor, shape: tuple[int, int, int], broken_images: BrokenImages
    ) -> None:
        self.name, self.source, self.rows, self.broken_images = name, source, rows, broken_images
        self.channels, self.height, self.width = shape
        self.annotations = source.annotations.take(rows)

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(rows), self.channels, self.height, self.width, dtype=torch.uint8)
        actual = [self._read_into(image.numpy(), row) for image, row in zip(images, rows.tolist(), strict=True)]
        return images, torch.tensor(actual, dtype=torch.int64)

    def _read_into(self, image: np.ndarray, row: int) -> int:
        for step in range(len(self)):
            candidate = (row + step) % len(self)
            seen = self._put(image, int(self.rows[candidate]))
            if not isinstance(seen, BrokenImage):
                return candidate
            if seen.name not in self.broken_images.found:
                logger.warning("%s: broken image, replaced by the next one: %s", self.name, seen)
            self.broken_images.add(seen)
            self.broken_images.check()
        raise BrokenImagesError(f"{self.name}: not one image can be read: {self.broken_images.names()}")

    def _put(self, image: np.ndarray, row: int) -> Header | BrokenImage | None:
        """Write the pixels of a stored image into an array."""
        return _decode_into(image, self.source, row)

    def _pixel_digest(self) -> str:
        sha = hashlib.sha256(self.source.version().encode())
        sha.update(self.rows.numpy().data)
        return sha.hexdigest()


# The image cache: images that do not fit into memory, decoded once into a file that is mapped.
#
# Each file lies in a folder of its own. The folder's name is a hash of the images, their stamp (sizes and times of the
# files), the size that was asked for and the versions of what decodes, so that changed images get a new folder. The
# note is written last: pixels without it, or of a different length or time than it says, are made again.

PIXELS, MANIFEST = "pixels", "decoded.json"


def decoded_once(data: ImageData, stamp: str, options: Options) -> ImageData:
    """The same images from a mapped file, which is made if it is not there; `data` itself where that cannot be."""
    if options.image_cache == "none" or type(data) is not StreamData:
        return data
    about = [data.fingerprint(), stamp, *_shape(data), __version__]
    about += [needs("PIL", "train", "decoding images").__version__]
    folder = cache_folder("decoded").absolute() / key_of({"images": about})
    found = _open(folder, data)
    try:
        if found is None:
            with locked(folder):  # another process may make it while this one waits
                found = _open(folder, data)
                if found is None:
                    _decode_into_file(folder, data, options)
                    found = _open(folder, data)
    except CannotWriteError as error:
        logger.info("image cache: %s. The images are decoded when they are fetched", error)
    return found or data


class MappedData(StreamData):
    """A stream whose images are in a mapped file. Batches, labels and fingerprint are the same."""

    whereabouts = "decoded in the image cache"

    def __init__(self, stream: StreamData, pixels: np.ndarray, broken: dict[int, BrokenImage]) -> None:
        vars(self).update(vars(stream))
        self._pixels, self._broken = pixels, broken  # broken images by their place in the file
        self._places = torch.zeros(len(stream.source), dtype=torch.int64)
        self._places[stream.rows] = torch.arange(len(stream))

    def _put(self, image: np.ndarray, row: int) -> BrokenImage | None:
        place = int(self._places[row])
        if place not in self._broken:
            image[...] = self._pixels[place]
        return self._broken.get(place)


def _make_room(folder: Path, size: int) -> None:
    """Delete the folders that were used least recently, until all of them take half of what would be free without."""
    notes = sorted(folder.parent.glob(f"*/{MANIFEST}"), key=lambda note: note.stat().st_mtime)  # set at each use
    others = [note.parent for note in notes if note.parent != folder]
    sizes = {other: (other / PIXELS).stat().st_size if (other / PIXELS).exists() else 0 for other in others}
    held = sum(sizes.values())
    room = (shutil.disk_usage(folder).free + held) // 2
    if size > room:
        raise CannotWriteError(
            f"the decoded images take {byte_size(size)}, and half of the free space in {folder.parent} is "
            f"{byte_size(room)}: make room, or set SCALELONG_CACHE to a larger disk"
        )
    for other, theirs in sizes.items():
        if held + size <= room:
            break
        logger.info("image cache: %s makes room, %s", other, byte_size(theirs))
        shutil.rmtree(other, ignore_errors=True)
        held -= theirs


def _decode_into_file(folder: Path, data: StreamData, options: Options) -> None:
    """Needs the lock of the folder."""
    import numpy as np

    size = math.prod(_shape(data))
    _make_room(folder, size)
    logger.info("image cache: decoding %d images once into %s, %s", len(data), folder, byte_size(size))
    prepare()
    with writing(folder):
        for name in (MANIFEST, PIXELS):
            (folder / name).unlink(missing_ok=True)
        with (folder / PIXELS).open("wb") as file:
            allocate(file, size)  # a full disk is noticed now
        pixels = np.memmap(folder / PIXELS, np.uint8, "r+", shape=_shape(data))
        good, _ = _decode_all(data.source, data.rows, pixels, data.broken_images, options.progress)
        data.broken_images.check()
        pixels.flush()
        bad = {int(place): data.source.name(int(data.rows[place])) for place in (~good).nonzero()[:, 0]}
        broken = [[place, name, data.broken_images.found[name].reason] for place, name in bad.items()]
        write_text(folder / MANIFEST, json.dumps({"file": _identity(folder / PIXELS), "broken": broken}))


def _open(folder: Path, data: StreamData) -> MappedData | None:
    """None if it is not there, or not as it was written."""
    import numpy as np

    try:
        note = parse_json((folder / MANIFEST).read_bytes())
        if note["file"] != _identity(folder / PIXELS):
            return None
        broken = {int(place): BrokenImage(name, reason) for place, name, reason in note["broken"]}
        pixels = np.memmap(folder / PIXELS, np.uint8, "r", shape=_shape(data))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for image in broken.values():
        data.broken_images.add(image)
    with suppress(OSError):
        os.utime(folder / MANIFEST)  # used now: others make room first
    data.broken_images.warn()
    return MappedData(data, pixels, broken)


def _shape(data: StreamData) -> tuple[int, int, int, int]:
    return len(data), data.channels, data.height, data.width


def _identity(path: Path) -> list[int]:
    """Changes when the file is cut or written to."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
