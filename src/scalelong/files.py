"""Files that are either whole or not there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RunLockedError

if TYPE_CHECKING:
    import numpy as np


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# One process at a time in a run folder. The kernel drops the lock when its holder dies, so it cannot go stale.

_HELD: set[Path] = set()
"""Folders locked by this process; the kernel's locks do not see a second attempt from within."""


class FolderLock:
    """Record locks (`lockf`), not `flock`: a forked data worker that outlives its parent must not keep the lock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / ".lock"

    def __enter__(self) -> FolderLock:
        if self.path in _HELD:
            raise self._refusal("this process")
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise self._refusal(holder or "another process") from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _HELD.add(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        _HELD.discard(self.path)
        os.close(self._descriptor)

    def _refusal(self, holder: str) -> RunLockedError:
        return RunLockedError(
            f"{self.path.parent} is in use by {holder}; wait for it, stop it, or choose another folder with --out"
        )


# What is expensive to compute and a pure function of its inputs: kept on disk under the hash of those inputs.

VARIABLE = "SCALELONG_CACHE"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalelong" / kind


def key_of(about: dict[str, Any]) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time: the first one computes, the others find what it left."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_array(
    kind: str,
    about: dict[str, Any],
    shape: tuple[int, ...],
    dtype: str,
    compute: Callable[[], Iterable[np.ndarray]],
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """A read-only array that stays on disk, computed in chunks of rows if it is not there or damaged."""
    import numpy as np

    folder = cache_folder(kind) / key_of(about)
    with locked(folder):
        fault = _fault(folder)
        if fault is not None:
            say(f"{kind}: {fault}; computing {shape[0]} rows into {folder}")
            _write(folder, about, shape, dtype, compute())
        return np.load(folder / "array.npy", mmap_mode="r", allow_pickle=False)


def _fault(folder: Path) -> str | None:
    """Why the array of this folder cannot be used."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return "not computed yet"
    try:
        good = json.loads(manifest.read_text())["sha256"] == file_digest(folder / "array.npy")
    except (OSError, ValueError, KeyError) as error:
        return f"damaged ({error})"
    return None if good else "damaged (its checksum is another one)"


def _write(
    folder: Path, about: dict[str, Any], shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> None:
    import numpy as np

    (folder / "manifest.json").unlink(missing_ok=True)
    part = folder / "array.part"
    array: Any = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
    row = 0
    for chunk in chunks:
        array[row : row + len(chunk)] = chunk
        row += len(chunk)
    assert row == shape[0], f"{row} rows instead of {shape[0]}"
    array.flush()
    del array
    os.replace(part, folder / "array.npy")
    manifest = {"about": about, "shape": list(shape), "dtype": dtype, "sha256": file_digest(folder / "array.npy")}
    temporary = folder / "manifest.part"
    temporary.write_text(json.dumps(manifest, indent=2))
    os.replace(temporary, folder / "manifest.json")
