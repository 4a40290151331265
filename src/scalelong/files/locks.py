"""Locks: one process at a time.

filelock takes the kernel's locks, on Windows as well: they end with their holder, so none goes stale, and a forked data
worker that outlives its parent does not keep one.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import CannotReadError, RunLockedError
from .access import StrPath, make_folder, writing
from .links import FolderBelow, below, refuse_link

_TURN = threading.RLock()


@contextmanager
def exclusive(folder: StrPath) -> Iterator[None]:
    """Changes of a folder's files that take moments, one process after the other. No lock file remains.

    The kernel locks the folder itself. Where it cannot (Windows, some network file systems) only the threads of this
    process take turns.
    """
    with _TURN, ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

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
    # Links are not followed: the folder may be a stranger's. On Windows a locked file itself cannot be read.
    inside, holder = below(folder), ".lock-holder"
    refuse_link(folder / ".lock")
    try:
        with writing(folder):
            lock.acquire()
    except Timeout as error:
        try:
            name = inside.read_text(holder, 1000).partition("\n")[0]
        except CannotReadError:
            name = "another process"
        name = "this process" if name == _this_process() else name
        raise RunLockedError(f"{folder} is in use by {name}; wait for it, stop it, or choose another folder") from error
    try:
        if not wait:
            _refuse_other_holder(inside, holder)
            inside.write_text(holder, f"{_this_process()}\n{_started(os.getpid())}", sync=False)
        try:
            yield
        finally:
            with suppress(OSError):
                inside.remove(holder)
    finally:
        lock.release()


def _refuse_other_holder(inside: FolderBelow, holder: str) -> None:
    """Someone may have removed the lock file under a process that still works in the folder: its name is left."""
    try:
        name, _, started = inside.read_text(holder, 1000).partition("\n")
    except CannotReadError:
        return
    process, _, host = name.removeprefix("process ").partition(" on ")
    if host == socket.gethostname() and process.isdecimal() and started == _started(int(process)) != "":
        raise RunLockedError(
            f"{inside.folder} is in use by {name}, although its lock file is gone; wait for it, stop it, or choose "
            f"another folder"
        )


def _started(process: int) -> str:
    """When a process began, in the kernel's ticks; "" where that is not known, or it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


GRACE = 1.0
"""Seconds. A worker that was forked a moment ago gives the lock of its dead parent back when it first runs."""


def forget_lock(folder: Path) -> None:
    """Remove the files of a lock, by its holder: the folder turned out not to be ours."""
    for name in (".lock", ".lock-holder"):
        with suppress(OSError):
            (folder / name).unlink()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
