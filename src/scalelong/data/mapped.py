"""The image cache: images that do not fit into memory, decoded once into a file that is mapped.

The file lies in a folder of its own, whose name is a hash of the place of the images, their stamps (names, sizes and
times of all files), the size that was asked for and the versions of what decodes. Changed images so get a new folder.
The cache has a limit, and the folders that were not used for the longest time make room. The pixels get their name
when they are complete, and a file that was changed or cut since is made again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..console import byte_size
from ..errors import BrokenImagesError, CannotWriteError, RunLockedError
from ..files import (
    allocate,
    at_home,
    cache_folder,
    key_of,
    locked,
    parse_json,
    remove_leftovers,
    require_folder_place,
    temporary_name,
    write_text,
    writing,
)
from ..optional import needs
from .dataset import BrokenImage, ImageData, Options, logger
from .decode import prepare
from .stream import StreamData, in_threads

PIXELS, MANIFEST = "pixels", "decoded.json"
SPARE = 256 * 1024**2
"""Bytes of the disk that are always left."""


def decoded_once(data: ImageData, place: str, options: Options) -> ImageData:
    """The same images from a mapped file, which is made if it is not there; `data` itself where that cannot be."""
    if options.image_cache == "none" or not data.decodes:
        return data
    root = cache_folder("decoded") if options.image_cache == "auto" else at_home(options.image_cache, "image_cache")
    folder = root.absolute() / _key(data, place, options)
    found = _open(folder, data)
    if found is not None:
        return found
    if options.image_cache != "auto":  # asked for by name: a place that cannot be written is a mistake
        require_folder_place(root, "image_cache")
    try:
        with _locked(folder):
            found = _open(folder, data)
            if found is None:
                _make_room(root, folder, data, options)
                _make(folder, data, options)
                if folder.name != _key(data, place, options):
                    shutil.rmtree(folder, ignore_errors=True)
                    raise CannotWriteError(f"{data.name} was changed while it was decoded")
                found = _open(folder, data)
    except CannotWriteError as error:
        found = None
        logger.info("image cache: %s. The images are decoded when they are fetched", error)
    return found or data


class MappedData(ImageData):
    """Images in a mapped file. Batches, labels and fingerprint are those of the stream that it was made of.

    A broken image is replaced as in a stream, by the next readable one of the same part.
    """

    in_memory = False

    def __init__(
        self, stream: ImageData, file: Path, pixels: Tensor, good: Tensor | None, rows: Tensor | None = None
    ) -> None:
        self.name, self.annotations, self.broken_images = stream.name, stream.annotations, stream.broken_images
        self.unread, self.stored_sizes = stream.unread, stream.stored_sizes
        self.channels, self.height, self.width = stream.channels, stream.height, stream.width
        self.stream, self.file = stream, file
        self._pixel_map, self._good = pixels, good
        self._rows = torch.arange(len(stream)) if rows is None else rows
        """Where in the file the images of this part are."""
        self._actual = None if good is None else _next_good(good[self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def whereabouts(self) -> str:
        return "decoded in the image cache"

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self._actual is not None:
            if len(self._actual) == 0:
                raise BrokenImagesError(f"{self.name}: not one image can be read: {self.broken_images.names()}")
            rows = self._actual[rows]
        return self._pixel_map.index_select(0, self._rows[rows]), rows

    def _take(self, rows: Tensor) -> MappedData:
        return MappedData(self.stream._take(rows), self.file, self._pixel_map, self._good, self._rows[rows])

    def _pixel_digest(self) -> str:
        return self.stream._pixel_digest()

    def __getstate__(self) -> dict[str, Any]:
        """For spawned workers: the file, not its content."""
        return {**self.__dict__, "_pixel_map": len(self._pixel_map)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pixel_map = _mapped(self.file, (state["_pixel_map"], self.channels, self.height, self.width))


def _next_good(good: Tensor) -> Tensor | None:
    """For each row itself or the next good one, beginning again at the end; None if all are good."""
    if bool(good.all()):
        return None
    numbers = good.nonzero()[:, 0]
    if len(numbers) == 0:
        return numbers
    return numbers[torch.searchsorted(numbers, torch.arange(len(good))) % len(numbers)]


def _key(data: ImageData, place: str, options: Options) -> str:
    stored = data.source.stamp() if isinstance(data, StreamData) else data.pixel_digest()
    rows = hashlib.sha256(data.rows.numpy().data if isinstance(data, StreamData) else b"").hexdigest()
    shape = [len(data), data.channels, data.height, data.width]
    versions = [__version__, needs("PIL", "train", "decoding images").__version__]
    about = {"place": place, "split": options.split, "stamp": stored, "rows": rows}
    return key_of({**about, "shape": shape, "versions": versions})


def _size(data: ImageData) -> int:
    return len(data) * data.channels * data.height * data.width


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, wait=False))
        except RunLockedError:
            logger.info("image cache: waiting for another process, which decodes the images into %s", folder)
            stack.enter_context(locked(folder))
        yield


# Making the file


def _make_room(root: Path, folder: Path, data: ImageData, options: Options) -> None:
    """Delete the folders that were used least recently, until there is room; CannotWriteError if there cannot be."""
    others = [file.parent for file in root.glob(f"*/{MANIFEST}") if file.parent != folder]
    others.sort(key=lambda other: (other / MANIFEST).stat().st_mtime)  # set at each use
    sizes = {other: (other / PIXELS).stat().st_size for other in others if (other / PIXELS).exists()}
    held, wanted = sum(sizes.values()), _size(data)
    room = shutil.disk_usage(folder).free + held - SPARE
    limit = min(room, options.image_cache_limit if options.image_cache_limit is not None else room // 2)
    if wanted > limit:
        raise CannotWriteError(
            f"{len(data)} decoded images take {byte_size(wanted)}, and {byte_size(max(0, limit))} are allowed in "
            f"{root} (`image_cache_limit`; by default half of the free disk)"
        )
    for other, size in sizes.items():
        if held + wanted <= limit:
            break
        logger.info("image cache: %s makes room, %s", other, byte_size(size))
        shutil.rmtree(other, ignore_errors=True)
        held -= size


def _make(folder: Path, data: ImageData, options: Options) -> None:
    """Decode all images into the file. Needs the lock of the folder."""
    logger.info(
        "image cache: decoding %d images once into %s, %s (`image_cache` none decodes them when they are fetched)",
        len(data), folder, byte_size(_size(data)),
    )  # fmt: skip
    prepare()
    bytes_each, allowed, lock = _size(data) // len(data), data.broken_images.allowed, threading.Lock()
    with writing(folder), ExitStack() as stack:
        remove_leftovers(folder)
        for name in (MANIFEST, PIXELS):
            (folder / name).unlink(missing_ok=True)
        temporary = temporary_name(folder / PIXELS)
        stack.callback(temporary.unlink, missing_ok=True)
        stack.callback(setattr, data.broken_images, "allowed", allowed)
        data.broken_images.allowed = len(data)  # until all are known, so that the error names all of them
        with temporary.open("wb") as file:
            allocate(file, _size(data))

            def put(row: int) -> bool:
                images, actual = data._read(torch.tensor([row]))
                with lock:
                    file.seek(row * bytes_each)
                    file.write(images.numpy().data.cast("B"))
                return int(actual[0]) == row

            bad = [row for row, good in in_threads(put, torch.arange(len(data)), options.progress) if not good]
            file.flush()
            os.fsync(file.fileno())
        data.broken_images.allowed = allowed
        data.broken_images.check()
        os.replace(temporary, folder / PIXELS)
        broken = [[image.name, image.reason] for image in data.broken]
        write_text(folder / MANIFEST, json.dumps({"file": _identity(folder / PIXELS), "bad": bad, "broken": broken}))


# Using it


def _open(folder: Path, data: ImageData) -> MappedData | None:
    """None if it is not there, or not as it was written."""
    try:
        values = parse_json((folder / MANIFEST).read_bytes())
        if values["file"] != _identity(folder / PIXELS) or values["file"][0] != _size(data):
            return None
        for name, reason in values["broken"]:
            data.broken_images.add(BrokenImage(name, reason))
        good = torch.ones(len(data), dtype=torch.bool)
        good[torch.tensor(values["bad"], dtype=torch.int64)] = False
        pixels = _mapped(folder / PIXELS, (len(data), data.channels, data.height, data.width))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    with suppress(OSError):
        os.utime(folder / MANIFEST)  # used now: others make room first
    if values["bad"]:
        data.broken_images.warn()
    return MappedData(data, folder / PIXELS, pixels, good if values["bad"] else None)


def _identity(path: Path) -> list[int]:
    """Changes when the file is cut or written to."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    import numpy as np

    with path.open("rb") as file:
        pixels = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8).reshape(shape)
    with warnings.catch_warnings():
        # It must not be written to, and is not: batches are copies. A private map could be written to, but the system
        # refuses one that is larger than its memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(pixels)
