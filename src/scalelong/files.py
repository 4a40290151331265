"""Files and folders that are either whole or not there, JSON lines, digests, locks, and the cache.

A file is written under a temporary name beside its place, synced to the disk, and renamed. So a reader never sees half
of it, a full disk or a kill leaves the previous version, and two writers do not mix. What cannot be renamed over (a
device, a pipe: `--out /dev/stdout`) is written to as it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RunLockedError

if TYPE_CHECKING:
    import numpy as np

StrPath = str | os.PathLike[str]


# Whole files and folders


def write_text(path: StrPath, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write a file, whole or not at all. Of a symbolic link, the file that it points to is replaced."""
    path = Path(path)
    if _is_stream(path):
        with open(path, "wb") as stream:
            stream.write(content)
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def new_folder(target: StrPath) -> Iterator[Path]:
    """A temporary folder that becomes `target` at the end, or vanishes. FileExistsError if `target` is in use.

    An empty folder may be there already; folders above it are made.
    """
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists already and is not an empty folder", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(target)
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        if target.exists():
            target.rmdir()
        os.rename(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: StrPath) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk."""
    if os.name == "nt" and os.path.isdir(path):  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep its names by other means.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _beside(path: Path) -> Path:
    """A name in the same folder that no other process and no other thread uses."""
    return path.with_name(f".{path.name[:100]}.{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def _is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe, or a descriptor of this process: a rename would put a file in its place."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or path.is_relative_to("/dev") or path.is_relative_to("/proc")


# JSON lines: one object per line


def append_json_line(path: StrPath, value: Mapping[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def write_json_lines(path: StrPath, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines as a whole."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json_lines(path: StrPath) -> list[dict[str, Any]]:
    """The objects of a file. A line that a kill cut off is left out."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


# Digests


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: StrPath) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Locks: one process at a time

_HELD: set[Path] = set()
"""Folders locked by this process; the kernel's locks do not see a second attempt from within."""


class FolderLock:
    """The lock of a run folder: a second process is refused. The kernel drops it with its holder, so none goes stale.

    These are record locks (`lockf`), not `flock`: a forked data worker that outlives its parent must not keep the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder.resolve() / ".lock"

    def __enter__(self) -> FolderLock:
        import fcntl  # POSIX alone: here, so that the package can be imported elsewhere

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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock of a folder of the cache: a second process waits, and then finds what the first one computed."""
    from filelock import FileLock  # which torch brings along

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield


# The cache: results of pure functions on disk. The key is a hash of the inputs.

VARIABLE = "SCALELONG_CACHE"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser() / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalelong" / kind


def key_of(about: dict[str, Any]) -> str:
    """A short hash of plain values."""
    return digest(json.dumps(about, sort_keys=True).encode())[:16]


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
    with locked(folder):
        fault = _fault(folder)
        if fault is not None:
            say(f"{kind}: {fault}; computing {shape[0]} rows into {folder}")
            _write_array(folder, about, shape, dtype, compute())
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
    return None if good else "damaged (checksum mismatch)"


def _write_array(
    folder: Path, about: dict[str, Any], shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> None:
    import numpy as np

    # Without its manifest an array counts as not computed, so a kill from here on is harmless.
    (folder / "manifest.json").unlink(missing_ok=True)
    temporary = _beside(folder / "array.npy")
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
    manifest = {"about": about, "shape": list(shape), "dtype": dtype, "sha256": file_digest(folder / "array.npy")}
    write_text(folder / "manifest.json", json.dumps(manifest, indent=2))
