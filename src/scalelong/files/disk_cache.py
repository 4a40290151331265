"""The cache: results of pure functions on disk. The key is a hash of the inputs; a checksum shows damage.

A complete result is read without a lock, so that a cache which this user may only read is used. Where nothing can be
written, results are computed and not kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CannotReadError
from .access import StrPath, digest, file_digest, in_words, parse_json, read_bytes, reading, writing
from .links import temporary_name
from .whole import allocate, locked, remove_leftovers, sync, write_text

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SCALELONG_CACHE"
MANIFEST = "manifest.json"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return at_home(given, CACHE_VARIABLE) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or at_home("~/.cache", "HOME")) / "scalelong" / kind


def at_home(text: StrPath, origin: str) -> Path:
    """A path with ~ written out. `origin` is the variable or parameter that holds it."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CannotReadError(f"{origin}: there is no such home folder ({text}); give a full path") from error


def key_of(about: dict[str, Any]) -> str:
    """A short hash of plain values."""
    return digest(json.dumps(about, sort_keys=True).encode())[:16]


def cached_bytes(kind: str, about: dict[str, Any], name: str, compute: Callable[[], bytes]) -> tuple[bytes, Path]:
    """The content of a file of the cache, and its place. Computed if it is missing or damaged."""
    file = cache_folder(kind) / key_of(about) / name
    kept = _keep(file, kind, about, lambda place: place.write_bytes(compute()))
    return (read_bytes(file) if kept else compute()), file


def cached_array(
    kind: str, about: dict[str, Any], shape: tuple[int, ...], dtype: str, compute: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """A read-only array that stays on disk, computed in chunks of rows if it is missing or damaged."""
    import numpy as np

    def write(place: Path) -> None:
        array: Any = np.lib.format.open_memmap(place, mode="w+", dtype=dtype, shape=shape)
        with place.open("r+b") as opened:
            allocate(opened, place.stat().st_size)
        row = 0
        for chunk in compute():
            array[row : row + len(chunk)] = chunk
            row += len(chunk)
        assert row == shape[0], f"{row} rows instead of {shape[0]}"
        array.flush()

    file = cache_folder(kind) / key_of(about) / "array.npy"
    if not _keep(file, kind, about, write):
        return np.concatenate(list(compute())).astype(dtype)
    with reading(file.parent):
        return np.load(file, mmap_mode="r", allow_pickle=False)


def _keep(file: Path, kind: str, about: dict[str, Any], write: Callable[[Path], object]) -> bool:
    """Have a file of the cache written if it is missing or damaged. False where nothing can be written."""
    if _is_whole(file):
        return True
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(file.parent))
        except OSError as error:
            logger.info("%s: not kept in %s (%s); see %s", kind, file.parent, in_words(error), CACHE_VARIABLE)
            return False
        if _is_whole(file):  # another process computed it while this one waited
            return True
        logger.info("%s: computing %s", kind, file)
        remove_leftovers(file.parent)
        temporary = temporary_name(file)
        stack.callback(temporary.unlink, missing_ok=True)
        with writing(file.parent):
            # Without its manifest a file counts as not computed, so a kill from here on is harmless.
            (file.parent / MANIFEST).unlink(missing_ok=True)
            write(temporary)
            sync(temporary)
            os.replace(temporary, file)
        write_text(file.parent / MANIFEST, json.dumps({"about": about, "sha256": file_digest(file)}, indent=2))
    return True


def _is_whole(file: Path) -> bool:
    """Whether the file is there and is what was written."""
    try:
        return parse_json((file.parent / MANIFEST).read_bytes())["sha256"] == file_digest(file)
    except (OSError, ValueError, KeyError, TypeError):
        return False
