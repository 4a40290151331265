"""What reading a large folder or archive found, kept in the cache: the second start does not decode it again.

The first start decodes (or, for what does not fit into memory, looks at) every image. What it found is written down
under the place and the options: pixels, labels, captions, broken images. A later start takes it if nothing has changed:
names, sizes and times of all files are the same, and the checksums fit. Anything else is read anew.

Small sets are not kept; they are decoded faster than this would be worth.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..files import cache_folder, digest, key_of, not_kept, remove_leftovers, write_bytes, write_text
from .dataset import Annotations, BrokenImage, ImageData, MemoryData, Options, Tally, log
from .files import FileTree, TreeSource
from .source import Stamp, StreamData

FORMAT = 1
INDEX, PIXELS = "index.json", "pixels"
FEWEST = 5000
"""Images from which on a set is kept."""
SETTLED = 2.0
"""Seconds for which nothing must have changed: a file may change twice within one tick of a file system's clock."""
ROOM = 3
"""The disk must have this many times the room that the pixels take."""


def stamp_of_file(path: Path) -> Stamp:
    """Size and times of an archive, and its end, where the list of its members stands."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        file.seek(max(0, found.st_size - (1 << 17)))
        end = digest(file.read())
    text = f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {end}"
    return Stamp(digest(text.encode()), max(found.st_mtime_ns, found.st_ctime_ns) / 1e9)


def indexed(
    name: str, path: Path, stamp: Stamp, options: Options, tree: Callable[[], FileTree], read: Callable[[], ImageData]
) -> ImageData:
    """The data set as it was found before, or else read now and written down. `tree` gives its files, if need be."""
    about = {
        "path": str(path.resolve()),
        "options": [options.shape, options.channels, options.split, options.memory_limit, options.max_broken],
        "limit": options.limit,
        "versions": [FORMAT, __version__, pillow_version()],
    }
    folder = cache_folder("images") / key_of(about)
    found = _known(folder, name, stamp, tree)
    if found is not None:
        found.tally.warn()
        return found
    data = read()
    if len(data) >= FEWEST and time.time() - stamp.newest > SETTLED:
        with not_kept(folder, "images", log.info):
            _write(folder, data, stamp)
    return data


def pillow_version() -> str:
    try:
        from PIL import __version__ as version
    except ImportError:
        return ""
    return version


# Writing, and reading below. The pixels come first: an index without them would be worth nothing.


def _write(folder: Path, data: ImageData, stamp: Stamp) -> None:
    about = data.annotations
    values: dict[str, Any] = {
        "stamp": stamp.text,
        "shape": [data.channels, data.height, data.width],
        "tally": [data.tally.where, data.tally.total, data.tally.allowed],
        "broken": [[broken.name, broken.reason] for broken in data.broken],
    }
    if isinstance(data, MemoryData):
        pixels = data.images.numpy()
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < ROOM * pixels.nbytes:
            return
        remove_leftovers(folder)
        (folder / INDEX).unlink(missing_ok=True)
        write_bytes(folder / PIXELS, pixels.data.cast("B"))
        values |= {"count": len(data), "pixels": data.pixel_digest()}
    elif isinstance(data, StreamData) and isinstance(data.source, TreeSource):
        about = data.source.annotations
        values |= {"rows": data.rows.tolist(), "names": data.source.names}
        folder.mkdir(parents=True, exist_ok=True)
    else:
        return
    values |= {
        "labels": None if about.labels is None else about.labels.tolist(),
        "classes": about.classes,
        "captions": about.captions,
    }
    text = json.dumps(values)
    write_text(folder / INDEX, f"{digest(text.encode())}\n{text}")


def _known(folder: Path, name: str, stamp: Stamp, tree: Callable[[], FileTree]) -> ImageData | None:
    """None if it was not kept, is of other files, or is damaged in whatever way."""
    try:
        known, _, text = (folder / INDEX).read_text(encoding="utf-8").partition("\n")
        if known != digest(text.encode()):
            return None
        values = json.loads(text)
        if values["stamp"] != stamp.text:
            return None
        where, total, allowed = values["tally"]
        tally = Tally(where, total, allowed, {entry: BrokenImage(entry, reason) for entry, reason in values["broken"]})
        labels = None if values["labels"] is None else torch.tensor(values["labels"], dtype=torch.int64)
        classes = None if values["classes"] is None else tuple(values["classes"])
        about = Annotations(labels, classes, values["captions"])
        if "rows" in values:
            rows, shape = torch.tensor(values["rows"], dtype=torch.int64), tuple(values["shape"])
            return StreamData(name, TreeSource(tree(), values["names"], about), rows, shape, tally)
        return _in_memory(folder, name, values, about, tally)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _in_memory(folder: Path, name: str, values: dict[str, Any], about: Annotations, tally: Tally) -> MemoryData | None:
    import numpy as np

    pixels = np.fromfile(folder / PIXELS, np.uint8).reshape(values["count"], *values["shape"])
    data = MemoryData(name, torch.from_numpy(pixels), about, tally)
    # The same hash that the fingerprint is made of: the pixels are hashed once.
    return data if data.pixel_digest() == values["pixels"] else None
