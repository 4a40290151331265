"""Files and folders that are either whole or not there, and JSON lines.

A file is written under a temporary name beside its place, synced to the disk, and renamed. So a reader never sees half
of it, a full disk or a kill leaves the previous version, and two writers do not mix.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CannotReadError, FolderInUseError
from .access import StrPath, reading, require_regular, writing
from .locks import exclusive
from .readers import parse_json


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
    with writing(path):
        if str(path) == "/dev/stdout":
            path.write_bytes(content)
            return
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent not in _TIDIED:  # what a kill left here, once per process: a folder may hold many files
            _TIDIED.add(path.parent)
            remove_leftovers(path.parent)
        temporary = temporary_name(path)
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                if synced:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if synced:
            sync(path.parent)


_TIDIED: set[Path] = set()


@contextmanager
def new_folder(target: StrPath) -> Iterator[Path]:
    """A temporary folder that becomes `target` at the end, or vanishes. FolderInUseError if `target` is in use.

    An empty folder may be there already; folders above it are made.
    """
    target = Path(target).absolute()  # "." has no name
    with writing(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FolderInUseError(
                f"{target} exists already and is not an empty folder: choose another place, or move it away"
            )
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
            if os.name == "nt" and target.exists():
                target.rmdir()
            try:
                os.rename(temporary, target)  # an empty folder is replaced
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise FolderInUseError(f"{target} was made by another process meanwhile: choose another") from error
                raise
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


def allocate(file: BinaryIO, size: int) -> None:
    """Reserve the bytes of a file, where the system can: a disk that is too small is an error now. Writing to a mapped
    file without reserved bytes ends the process (SIGBUS) when the disk is full."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # some file systems cannot
                raise


def temporary_name(path: Path) -> Path:
    """A name in the same folder that no other process and no other thread uses. It says who makes it."""
    return path.with_name(f".{path.name[:100]}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def _machine() -> str:
    """Eight letters for this machine: on a shared file system another one may have a process of the same number."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


_PART = re.compile(r"\..*\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.part")
ABANDONED_AFTER = 24 * 3600
"""Seconds after which a temporary file of another machine counts as abandoned."""


def remove_leftovers(folder: StrPath) -> None:
    """Remove the temporary files of killed processes in a folder; those of living ones stay."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(".part")]
    except OSError:
        return
    for entry in entries:
        match = _PART.fullmatch(entry.name)
        if match is None or not _is_abandoned(Path(entry.path), match[1], int(match[2])):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(entry.path)


def _is_abandoned(path: Path, machine: str, process: int) -> bool:
    # On Windows os.kill(process, 0) sends Ctrl-C.
    if machine != _machine() or os.name == "nt":
        with suppress(OSError):
            return time.time() - path.stat().st_mtime > ABANDONED_AFTER
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # a process of another user
        return False
    return False


# JSON lines: one object per line


def append_json_line(path: StrPath, value: Mapping[str, Any]) -> None:
    """Add a line, whole or not at all, also while other processes do the same.

    A file whose last line has no end (a kill, an editor) gets one first: two lines must not become one.
    """
    line = (json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
    with writing(path), exclusive(Path(path).parent), open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            written = file.write(line)
            if written < len(line):  # the disk is full: the rest would say so
                file.write(line[written:])
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
