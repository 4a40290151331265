"""Images that do not fit into memory, decoded once into a file that is mapped: a batch is one gather, no decoding.

    KEY/pixels          all images as bytes, (N, C, H, W), without a header
    KEY/decoded.json    of which files they were made (a stamp), broken images, and a checksum; written last

KEY is a hash of the place and the options, so that a folder which has changed takes the place of what it was before.
The stamp is names, sizes and times of all files. While the file is being made it is `unfinished`, and `progress.json`
tells how much of it is on the disk, with a checksum: whoever comes after a kill goes on from there, or begins again if
the checksum or the stamp differ. One process makes it, under a lock, and the others wait for it.

Where there is no room, or nothing can be written, images are decoded when fetched, and a line says so.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._version import __version__
from ..console import byte_size
from ..errors import BrokenImagesError, CannotWriteError, RunLockedError
from ..files import (
    at_home,
    cache_folder,
    digest,
    key_of,
    locked,
    parse_json,
    require_folder_place,
    sync,
    write_text,
    writing,
)
from .dataset import BrokenImage, ImageData, Options
from .decode import prepare
from .index import SETTLED, pillow_version
from .source import Stamp, StreamData

FORMAT = 1
PIXELS, MANIFEST = "pixels", "decoded.json"
UNFINISHED, PROGRESS = "unfinished", "progress.json"
AT_A_TIME = 4 * 1024**2
"""Bytes of pixels that a thread decodes at a time."""
NOTE_EVERY = 10.0
"""Seconds between two notes of how far it is: so much is lost at most by a kill."""
SPARE = 256 * 1024**2
"""Bytes of the disk that are always left."""


def decoded_once(data: ImageData, place: str, options: Options) -> ImageData:
    """The same images from a mapped file, which is made if it is not there; `data` itself where that cannot be."""
    if options.image_cache == "none" or not data.decodes:
        return data
    about = {"place": place, "split": options.split, "limit": options.limit, "shape": _shape(data), "format": FORMAT}
    folder = _root(options) / key_of(about)
    stamp = _stamp(data)
    found = _open(folder, data, stamp.text)
    if found is not None:
        return found
    if options.image_cache != "auto":  # asked for by name: what cannot be written is a mistake
        require_folder_place(_root(options), "--image-cache")
    reason = _no_room(folder, data, options)
    if reason is not None:
        return _streamed(data, options, reason)
    try:
        with _alone(folder, options):
            return _open(folder, data, stamp.text) or _make(folder, data, stamp, options)
    except CannotWriteError as error:
        return _streamed(data, options, str(error))


def _root(options: Options) -> Path:
    given = options.image_cache
    return cache_folder("decoded") if given == "auto" else at_home(given, "--image-cache").absolute()


def _streamed(data: ImageData, options: Options, reason: str) -> ImageData:
    options.tell(f"image cache: {reason}. The images are decoded when they are fetched")
    return data


@contextmanager
def _alone(folder: Path, options: Options) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, wait=False))
        except RunLockedError:
            options.tell(f"image cache: waiting for another process, which decodes the images into {folder}")
            stack.enter_context(locked(folder))
        yield


class MappedData(ImageData):
    """Images in a mapped file. Batches, labels and fingerprint are those of the stream that it was made of.

    A broken image is replaced as in a stream, by the next readable one of the same part.
    """

    in_memory = True  # mapped from disk: fetching is indexing

    def __init__(
        self, stream: ImageData, file: Path, pixels: Tensor, good: Tensor | None, rows: Tensor | None = None
    ) -> None:
        self.name, self.tally, self.annotations, self.unread = (
            stream.name,
            stream.tally,
            stream.annotations,
            stream.unread,
        )
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
                raise BrokenImagesError(f"{self.name}: not one image can be read: {self.tally.names()}")
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
        with open(self.file, "rb") as file:
            self._pixel_map = _mapped(file, (state["_pixel_map"], self.channels, self.height, self.width))


def _next_good(good: Tensor) -> Tensor | None:
    """For each row itself or the next good one, beginning again at the end; None if all are good."""
    if bool(good.all()):
        return None
    numbers = good.nonzero()[:, 0]
    if len(numbers) == 0:
        return numbers
    return numbers[torch.searchsorted(numbers, torch.arange(len(good))) % len(numbers)]


def _shape(data: ImageData) -> tuple[int, int, int]:
    return data.channels, data.height, data.width


def _image_bytes(data: ImageData) -> int:
    return data.channels * data.height * data.width


def _stamp(data: ImageData) -> Stamp:
    """Of the stored images, the rows that are taken, and the versions of what decodes them."""
    stored = data.source.stamp() if isinstance(data, StreamData) else Stamp(data.pixel_digest(), 0.0)
    rows = hashlib.sha256(data.rows.numpy().data if isinstance(data, StreamData) else b"").hexdigest()
    text = json.dumps([stored.text, rows, len(data), _shape(data), FORMAT, __version__, pillow_version()])
    return Stamp(digest(text.encode()), stored.newest)


def _no_room(folder: Path, data: ImageData, options: Options) -> str | None:
    """Why the file may not be made; None if it may."""
    place = folder
    while not os.path.exists(place):  # unlike that of Path, no error where this user may not look
        place = place.parent
    wanted = len(data) * _image_bytes(data)
    here = sum(os.path.getsize(folder / name) for name in (PIXELS, UNFINISHED) if os.path.exists(folder / name))
    room = shutil.disk_usage(place).free + here
    most, whose = options.image_cache_limit, "--image-cache-limit"
    if most is None:
        most, whose = room // 2, f"half of what is free at {place}; --image-cache-limit says otherwise"
    if wanted > most:
        return f"{len(data)} decoded images take {byte_size(wanted)}, and it may have {byte_size(most)} ({whose})"
    if wanted + SPARE > room:
        return f"{len(data)} decoded images take {byte_size(wanted)}, and {place} has {byte_size(room)} free"
    return None


# Making the file


def _make(folder: Path, data: ImageData, stamp: Stamp, options: Options) -> ImageData:
    """Under the lock of the folder."""
    if time.time() - stamp.newest < SETTLED:  # a file may change twice within one tick of a file system's clock
        time.sleep(SETTLED)
        stamp = _stamp(data)
    for name in (MANIFEST, PIXELS):  # of other files, or damaged
        with writing(folder / name):
            (folder / name).unlink(missing_ok=True)
    prepare()
    try:
        found = _fill(folder, data, stamp, options)
    except CannotWriteError:  # a full disk is given its room back
        _remove(folder, UNFINISHED, PROGRESS)
        raise
    if _stamp(data).text != stamp.text:
        _remove(folder, UNFINISHED, PROGRESS)
        return _streamed(data, options, f"{data.name} was changed while it was decoded")
    with writing(folder):
        os.replace(folder / UNFINISHED, folder / PIXELS)
        sync(folder)
        values = {**found, "file": _identity(os.stat(folder / PIXELS))}
    _write_signed(folder / MANIFEST, values)
    _remove(folder, PROGRESS)
    made = _open(folder, data, stamp.text)
    return _streamed(data, options, f"{folder} was changed by someone else") if made is None else made


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def _fill(folder: Path, data: ImageData, stamp: Stamp, options: Options) -> dict[str, Any]:
    """Decodes into `unfinished`, from where an earlier process was. What the manifest is to say of it."""
    size, total = _image_bytes(data), len(data)
    done, bad, sha = _continued(folder, data, stamp.text)
    goes_on = f", of which {done} are there" if done else ""
    options.tell(
        f"image cache: decoding {total} images once into {folder}, {byte_size(total * size)}{goes_on} "
        f"(--image-cache none decodes them when they are fetched)"
    )

    def note() -> dict[str, Any]:
        broken = [[broken.name, broken.reason] for broken in data.broken]
        return {"stamp": stamp.text, "images": done, "bad": bad, "broken": broken, "sha256": sha.hexdigest()}

    def save() -> None:
        file.flush()
        os.fsync(file.fileno())

    with ExitStack() as stack:
        with writing(folder):
            file = stack.enter_context(open(folder / UNFINISHED, "r+b" if done else "wb"))
            file.seek(done * size)
            file.truncate()
        noted = time.monotonic()
        for rows, images, actual in _in_order(data, done):
            bad += rows[actual != rows].tolist()
            content = images.numpy().data.cast("B")
            with writing(folder):
                file.write(content)
            sha.update(content)
            done += len(rows)
            if time.monotonic() - noted > NOTE_EVERY:
                with writing(folder):
                    save()
                _write_signed(folder / PROGRESS, note())
                noted = time.monotonic()
            if options.progress is not None:
                options.progress(done, total)
        with writing(folder):
            save()
    return note()


def _in_order(data: ImageData, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows, images and the rows that these really are of. A few chunks ahead, in threads: Pillow decodes without the
    interpreter's lock."""
    threads = min(8, os.cpu_count() or 1)
    ahead: deque[tuple[Tensor, Future[tuple[Tensor, Tensor]]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for rows in torch.arange(start, len(data)).split(max(1, min(256, AT_A_TIME // _image_bytes(data)))):
            ahead.append((rows, pool.submit(data._read, rows)))
            if len(ahead) > 2 * threads:
                rows, future = ahead.popleft()
                yield rows, *future.result()
        while ahead:
            rows, future = ahead.popleft()
            yield rows, *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _continued(folder: Path, data: ImageData, stamp: str) -> tuple[int, list[int], Any]:
    """How many images an earlier process left that can be trusted, which of them are broken, and their hash."""
    values = _read_signed(folder / PROGRESS)
    if values is not None and values.get("stamp") == stamp:
        with suppress(OSError), open(folder / UNFINISHED, "rb") as file:
            sha = _hash_of(file, values["images"] * _image_bytes(data))
            if sha is not None and sha.hexdigest() == values["sha256"]:
                _count_broken(data, values)
                return values["images"], values["bad"], sha
    return 0, [], hashlib.sha256()


def _count_broken(data: ImageData, values: dict[str, Any]) -> None:
    for name, reason in values["broken"]:
        data.tally.add(BrokenImage(name, reason))


def _hash_of(file: BinaryIO, count: int) -> Any:
    """sha256 of the first bytes; None if there are fewer."""
    sha = hashlib.sha256()
    while count:
        content = file.read(min(count, AT_A_TIME))
        if not content:
            return None
        sha.update(content)
        count -= len(content)
    return sha


# Using it


def _open(folder: Path, data: ImageData, stamp: str) -> MappedData | None:
    """None if it is not there, of other files, or damaged."""
    values, shape = _read_signed(folder / MANIFEST), _shape(data)
    if values is None or values.get("stamp") != stamp:
        return None
    try:
        with open(folder / PIXELS, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size != len(data) * _image_bytes(data):
                return None
            # A file that nobody has touched since is what was written; of any other the checksum tells.
            if values["file"] != _identity(found):
                sha = _hash_of(file, found.st_size)
                if sha is None or sha.hexdigest() != values["sha256"]:
                    return None
                with suppress(OSError):
                    _write_signed(folder / MANIFEST, {**values, "file": _identity(found)})
            pixels = _mapped(file, (len(data), *shape))
    except OSError:
        return None
    _count_broken(data, values)
    good = None
    if values["bad"]:
        good = torch.ones(len(data), dtype=torch.bool)
        good[torch.tensor(values["bad"])] = False
        data.tally.warn()
    return MappedData(data, folder / PIXELS, pixels, good)


def _identity(found: os.stat_result) -> list[int]:
    """Changes with every write: the time of the inode cannot be set back."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _mapped(file: BinaryIO, shape: tuple[int, ...]) -> Tensor:
    import numpy as np

    pixels = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8).reshape(shape)
    with warnings.catch_warnings():
        # It must not be written to, and is not: batches are copies. A private map could be written to, but the system
        # refuses one that is larger than its memory.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(pixels)


def _write_signed(path: Path, values: dict[str, Any]) -> None:
    text = json.dumps(values)
    write_text(path, f"{digest(text.encode())}\n{text}")


def _read_signed(path: Path) -> dict[str, Any] | None:
    """None if it is not there or not what was written."""
    try:
        known, _, text = path.read_text(encoding="utf-8").partition("\n")
        return parse_json(text) if known == digest(text.encode()) else None
    except (OSError, ValueError):
        return None
