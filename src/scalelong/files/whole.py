"""Files and folders that are either whole or not there, locks, and JSON lines.

A file is written under a temporary name next to its place, synced to the disk, and renamed. So a reader never sees half
of it, a full disk or a kill leaves the previous version, and two writers do not mix.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CannotReadError, FolderInUseError, RunLockedError
from .access import StrPath, make_folder, parse_json, reading, require_regular, writing
from .links import PART, below, machine, refuse_link, temporary_name


def write_text(path: StrPath, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all."""
    # Names of files need not be valid text. Escaped as \\udcff, they stay readable, in JSON too.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: StrPath, content: bytes | memoryview, *, synced: bool = True) -> None:
    """Write a file, whole or not at all. Of a symbolic link, the file that it points to is replaced.

    Syncing takes milliseconds. Without it a power failure may lose the file: fine for one of many that can be made
    again, such as sampled images.
    """
    path = Path(path)
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.parent not in _TIDIED:  # what a kill left here, once per process: a folder may hold many files
        _TIDIED.add(path.parent)
        remove_leftovers(path.parent)
    below(path.parent).write_bytes(path.name, content, sync=synced)


_TIDIED: set[Path] = set()


@contextmanager
def new_folder(target: StrPath) -> Iterator[Path]:
    """A temporary folder that becomes `target` at the end, or vanishes. FolderInUseError if `target` is in use.

    An empty folder may be there already; folders above it are made.
    """
    target = Path(target).absolute()  # "." has no name
    with writing(target):
        _require_empty(target)
        temporary = temporary_name(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        temporary.mkdir()
    try:
        with writing(target):
            yield temporary
            for folder, _, names in os.walk(temporary):
                for name in names:
                    sync(Path(folder) / name)
                sync(Path(folder))
            _require_empty(target)  # another process may have filled it meanwhile
            if target.exists():
                target.rmdir()
            os.rename(temporary, target)
            sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _require_empty(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FolderInUseError(
            f"{target} exists already and is not an empty folder: choose another place, or move it away"
        )


def sync(path: StrPath) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep its names by other means.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def allocate(file: BinaryIO, size: int) -> None:
    """Reserve the bytes of a file, where the system can: a disk that is too small is an error now. Writing to a mapped
    file without reserved bytes ends the process (SIGBUS) when the disk is full."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # some file systems cannot
                raise


ABANDONED_AFTER = 24 * 3600
"""Seconds after which a temporary file of another machine counts as abandoned."""


def remove_leftovers(folder: StrPath) -> None:
    """Remove the temporary files of killed processes in a folder; those of living ones stay."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            match = PART.fullmatch(entry.name)
            if match is None or not _is_abandoned(Path(entry.path), match[1], int(match[2])):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def _is_abandoned(path: Path, made_on: str, process: int) -> bool:
    if made_on != machine():
        return time.time() - path.stat().st_mtime > ABANDONED_AFTER
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # a process of another user
        pass
    return False


# Locks. filelock takes the kernel's locks, which end with their holder: none goes stale.

_TURN = threading.RLock()
_HOLDER = ".lock-holder"

GRACE = 1.0
"""Seconds. A worker that was forked a moment ago gives the lock of its dead parent back when it first runs."""


@contextmanager
def exclusive(folder: StrPath) -> Iterator[None]:
    """Changes of a folder's files that take moments, one process after the other. No lock file remains.

    The kernel locks the folder itself. Where it cannot (some network file systems) only the threads of this process
    take turns.
    """
    with _TURN, ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """The lock of a folder. A second process waits (for a cache: it then finds what the first one computed), or is
    refused with RunLockedError (for a run folder)."""
    from filelock import FileLock, Timeout

    make_folder(folder)
    lock = FileLock(folder.resolve() / ".lock", timeout=-1 if wait else GRACE)
    # Links are not followed: the folder may be a stranger's.
    inside, this = below(folder), f"process {os.getpid()} on {socket.gethostname()}"
    refuse_link(folder / ".lock")
    try:
        with writing(folder):
            lock.acquire()
    except Timeout as error:
        name = "another process"
        with suppress(CannotReadError):
            name = inside.read_text(_HOLDER, 1000).partition("\n")[0]
        name = "this process" if name == this else name
        raise RunLockedError(f"{folder} is in use by {name}; wait for it, stop it, or choose another folder") from error
    try:
        if not wait:
            _refuse_living_holder(folder)
            inside.write_text(_HOLDER, f"{this}\n{_started(os.getpid())}", sync=False)
        try:
            yield
        finally:
            with suppress(OSError):
                inside.remove(_HOLDER)
    finally:
        lock.release()


def _refuse_living_holder(folder: Path) -> None:
    """The lock is free, but its file may have been deleted while the holder works on. A process number alone does not
    tell: in a container the next process has the same one."""
    with suppress(CannotReadError):
        name, _, started = below(folder).read_text(_HOLDER, 1000).partition("\n")
        found = re.fullmatch(rf"process (\d+) on {re.escape(socket.gethostname())}", name)
        if found and started and _started(int(found[1])) == started and int(found[1]) != os.getpid():
            raise RunLockedError(f"{folder} is in use by {name}, whose .lock was deleted; wait for it, or stop it")


def _started(process: int) -> str:
    """When a process began, in ticks of the system; "" where there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def forget_lock(folder: Path) -> None:
    """Remove the files of a lock, by its holder: the folder turned out not to be ours."""
    for name in (".lock", _HOLDER):
        with suppress(OSError):
            (folder / name).unlink()


# JSON lines: one object per line


def append_json_line(path: StrPath, value: Mapping[str, Any]) -> None:
    """Add a line, whole or not at all, also while other processes do the same.

    A file whose last line has no end (a kill, an editor) gets one first: two lines must not become one.
    """
    line = (json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
    with writing(path), exclusive(Path(path).parent), open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        line = line if file.read(1) in (b"", b"\n") else b"\n" + line
        try:
            while line:  # a short write is a full disk: the next one says so
                line = line[file.write(line) :]
        except OSError:
            file.truncate(size)
            raise


def write_json_lines(path: StrPath, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines as a whole."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


MOST_LINE = 16 * 1024**2
"""Bytes of the longest line of a file of JSON lines. A file of a stranger may be one line without an end."""


def read_json_lines(path: StrPath) -> list[dict[str, Any]]:
    """The objects of a file. A line that a kill cut off, or that is no object, is left out."""
    found = []
    require_regular(path)
    with reading(path), open(path, "rb") as file:
        while line := file.readline(MOST_LINE):
            if len(line) == MOST_LINE:
                raise CannotReadError(f"{path} has a line of more than {MOST_LINE} bytes: it is no file of JSON lines")
            with suppress(ValueError):
                value = parse_json(line)
                found += [value] if isinstance(value, dict) else []
    return found
