"""The cache: results of pure functions on disk. The key is a hash of the inputs; a checksum tells what is damaged.

What is there and whole is read without a lock, so that a filled cache which this user may only read is used. Where
nothing can be written, results are computed and not kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import (
    CannotReadError,
)
from .access import StrPath, reading, writing
from .locks import locked
from .readers import MOST_TEXT, digest, file_digest, parse_json, read_bytes
from .whole import part_beside, remove_leftovers, sync, write_bytes, write_text

if TYPE_CHECKING:
    import numpy as np

VARIABLE = "SCALELONG_CACHE"
MANIFEST = "manifest.json"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return at_home(given, VARIABLE) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or at_home("~/.cache", "HOME")) / "scalelong" / kind


def at_home(text: StrPath, origin: str) -> Path:
    """A path with ~ written out. `origin` is the variable or flag that says it."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CannotReadError(f"{origin} names the home folder of nobody ({text}): give a full path") from error


def key_of(about: dict[str, Any]) -> str:
    """A short hash of plain values."""
    return digest(json.dumps(about, sort_keys=True).encode())[:16]


def cached_bytes(
    kind: str, about: dict[str, Any], name: str, compute: Callable[[], bytes], say: Callable[[str], None] = print
) -> tuple[bytes, Path]:
    """The content of a file of the cache, and its place. Computed if it is missing or damaged."""
    folder = cache_folder(kind) / key_of(about)
    content, _ = _read_whole(folder, name)
    if content is not None:
        return content, folder / name
    with to_be_filled(folder, kind, say) as writable:
        content, fault = _read_whole(folder, name)  # another process may have computed it while this one waited
        if content is None:
            if fault:
                say(f"{kind}: {fault}; computing it again")
            content = compute()
            if writable:
                with not_kept(folder, kind, say):
                    (folder / MANIFEST).unlink(missing_ok=True)
                    write_bytes(folder / name, content)
                    _write_manifest(folder, {"about": about, "sha256": digest(content)})
    return content, folder / name


def _read_whole(folder: Path, name: str) -> tuple[bytes | None, str]:
    """The content if it is what was written, and why not if something else is there."""
    try:
        if not ((folder / name).exists() and (folder / MANIFEST).exists()):
            return None, ""
        content = read_bytes(folder / name)
        expected = parse_json(read_bytes(folder / MANIFEST, MOST_TEXT))["sha256"]
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"damaged ({error})"
    return (content, "") if digest(content) == expected else (None, "damaged (checksum mismatch)")


def cached_array(
    kind: str,
    about: dict[str, Any],
    shape: tuple[int, ...],
    dtype: str,
    compute: Callable[[], Iterable[np.ndarray]],
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """A read-only array that stays on disk, computed in chunks of rows if it is missing or damaged."""
    import numpy as np

    folder = cache_folder(kind) / key_of(about)
    if _fault(folder) is not None:
        with to_be_filled(folder, kind, say) as writable:
            fault = _fault(folder)
            if fault is not None and not writable:
                return np.concatenate(list(compute())).astype(dtype)
            if fault is not None:
                say(f"{kind}: {fault}; computing {shape[0]} rows into {folder}")
                with writing(folder):
                    _write_array(folder, about, shape, dtype, compute())
    with reading(folder):
        return np.load(folder / "array.npy", mmap_mode="r", allow_pickle=False)


@contextmanager
def to_be_filled(folder: Path, kind: str, say: Callable[[str], None]) -> Iterator[bool]:
    """Under the lock of a folder of the cache; False where it cannot be written to."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except OSError as error:
            say(_unkept(kind, folder, error))
            yield False
            return
        remove_leftovers(folder)
        yield True


def _unkept(kind: str, folder: Path, error: OSError) -> str:
    return f"{kind}: {folder} cannot be written ({error.strerror or error}), so the result is not kept; see {VARIABLE}"


@contextmanager
def not_kept(folder: Path, kind: str, say: Callable[[str], None]) -> Iterator[None]:
    """A result that cannot be written down is still a result."""
    try:
        yield
    except OSError as error:
        say(
            f"{kind}: {folder} cannot be written ({error.strerror or error}), so the result is not kept; see {VARIABLE}"
        )


def _fault(folder: Path) -> str | None:
    """Why the array of this folder cannot be used."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return "not computed yet"
    try:
        good = json.loads(manifest.read_text())["sha256"] == file_digest(folder / "array.npy")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"damaged ({error})"
    return None if good else "damaged (checksum mismatch)"


def _write_array(
    folder: Path, about: dict[str, Any], shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> None:
    import numpy as np

    # Without its manifest an array counts as not computed, so a kill from here on is harmless.
    (folder / MANIFEST).unlink(missing_ok=True)
    temporary = part_beside(folder / "array.npy")
    with ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)
        array: Any = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        row = 0
        for chunk in chunks:
            array[row : row + len(chunk)] = chunk
            row += len(chunk)
        assert row == shape[0], f"{row} rows instead of {shape[0]}"
        array.flush()
        del array
        sync(temporary)
        os.replace(temporary, folder / "array.npy")
    about = {"about": about, "shape": list(shape), "dtype": dtype, "sha256": file_digest(folder / "array.npy")}
    _write_manifest(folder, about)


def _write_manifest(folder: Path, about: dict[str, Any]) -> None:
    write_text(folder / MANIFEST, json.dumps(about, indent=2))
