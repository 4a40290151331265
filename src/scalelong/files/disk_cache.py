"""The cache: results of pure functions on disk. The key is a hash of the inputs; a checksum shows damage.

A complete result is read without a lock, so that a cache which this user may only read is used. Where nothing can be
written, results are computed and not kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CannotReadError
from .access import StrPath, in_words, reading, writing
from .locks import locked
from .readers import digest, file_digest, parse_json, read_bytes
from .whole import allocate, remove_leftovers, sync, temporary_name, write_bytes, write_text

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

VARIABLE = "SCALELONG_CACHE"
MANIFEST = "manifest.json"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return at_home(given, VARIABLE) / kind
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
    if not _is_whole(file):
        with to_be_filled(file.parent, kind) as writable:
            if not writable or not _is_whole(file):  # another process may have computed it while this one waited
                content = compute()
                if writable:
                    with not_kept(file.parent, kind):
                        (file.parent / MANIFEST).unlink(missing_ok=True)
                        write_bytes(file, content)
                        _write_manifest(file, about)
                return content, file
    return read_bytes(file), file


def cached_array(
    kind: str, about: dict[str, Any], shape: tuple[int, ...], dtype: str, compute: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """A read-only array that stays on disk, computed in chunks of rows if it is missing or damaged."""
    import numpy as np

    file = cache_folder(kind) / key_of(about) / "array.npy"
    if not _is_whole(file):
        with to_be_filled(file.parent, kind) as writable:
            if not writable:
                return np.concatenate(list(compute())).astype(dtype)
            if not _is_whole(file):
                logger.info("%s: computing %d rows into %s", kind, shape[0], file.parent)
                with writing(file.parent):
                    _write_array(file, shape, dtype, compute())
                    _write_manifest(file, about, shape=list(shape), dtype=dtype)
    with reading(file.parent):
        return np.load(file, mmap_mode="r", allow_pickle=False)


@contextmanager
def to_be_filled(folder: Path, kind: str) -> Iterator[bool]:
    """Holds the lock of a folder of the cache; False where it cannot be written to."""
    with ExitStack() as stack:
        writable = False
        with not_kept(folder, kind):
            stack.enter_context(locked(folder))
            remove_leftovers(folder)
            writable = True
        yield writable


@contextmanager
def not_kept(folder: Path, kind: str) -> Iterator[None]:
    """A result that cannot be written is still a result: the log says that it is not kept."""
    try:
        yield
    except OSError as error:
        logger.info("%s: the result is not kept in %s (%s); see %s", kind, folder, in_words(error), VARIABLE)


def _is_whole(file: Path) -> bool:
    """Whether the file is there and is what was written."""
    try:
        return parse_json((file.parent / MANIFEST).read_bytes())["sha256"] == file_digest(file)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_array(file: Path, shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]) -> None:
    import numpy as np

    # Without its manifest an array counts as not computed, so a kill from here on is harmless.
    (file.parent / MANIFEST).unlink(missing_ok=True)
    temporary = temporary_name(file)
    try:
        array: Any = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        with temporary.open("r+b") as opened:
            allocate(opened, temporary.stat().st_size)
        row = 0
        for chunk in chunks:
            array[row : row + len(chunk)] = chunk
            row += len(chunk)
        assert row == shape[0], f"{row} rows instead of {shape[0]}"
        array.flush()
        sync(temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _write_manifest(file: Path, about: dict[str, Any], **more: Any) -> None:
    write_text(file.parent / MANIFEST, json.dumps({"about": about, **more, "sha256": file_digest(file)}, indent=2))
