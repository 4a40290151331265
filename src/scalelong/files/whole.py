"""Files and folders that are either whole or not there, and JSON lines.

A file is written under a temporary name beside its place, synced to the disk, and renamed. So a reader never sees half
of it, a full disk or a kill leaves the previous version, and two writers do not mix. What cannot be renamed over (a
device, a pipe: `--out /dev/stdout`) is written to as it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from ..errors import (
    CannotReadError,
    CannotWriteError,
    FolderInUseError,
)
from .access import StrPath, reading, writing
from .locks import exclusive
from .readers import parse_json, require_regular

if TYPE_CHECKING:
    pass


def write_text(path: StrPath, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all."""
    # Names of files need not be valid text. Escaped as \\udcff, they stay readable, in JSON too.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: StrPath, content: bytes | memoryview) -> None:
    """Write a file, whole or not at all. Of a symbolic link, the file that it points to is replaced."""
    path = Path(path)
    with writing(path):
        if _is_stream(path):
            _write_stream(path, content)
        else:
            _replace(Path(os.path.realpath(path)) if path.is_symlink() else path, content)


_TIDIED: set[Path] = set()


def _replace(path: Path, content: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "", str(path))
    if path.parent not in _TIDIED:  # what a kill left here, once per process: a folder may hold many files
        _TIDIED.add(path.parent)
        remove_leftovers(path.parent)
    temporary = part_beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # of two errors, the first is told
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


PIPE_SECONDS = 10.0
"""How long a named pipe may be without a reader."""


def _write_stream(path: Path, content: bytes | memoryview) -> None:
    """Write to what is there, a terminal, a pipe or a device such as /dev/null. A disk is not written over."""
    mode = path.stat().st_mode
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        kind = "a disk" if stat.S_ISBLK(mode) else "a socket"
        raise CannotWriteError(f"{path} is {kind}, and a file is needed: name a file")
    descriptor = _open_pipe(path) if stat.S_ISFIFO(mode) else os.open(path, os.O_WRONLY | os.O_NOCTTY)
    with open(descriptor, "wb") as stream:
        stream.write(content)


def _open_pipe(path: Path) -> int:
    """A pipe that nobody reads would block for ever, so it is asked again and again for a while."""
    deadline = time.monotonic() + PIPE_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


@contextmanager
def new_folder(target: StrPath) -> Iterator[Path]:
    """A temporary folder that becomes `target` at the end, or vanishes. FolderInUseError if `target` is in use.

    An empty folder may be there already; folders above it are made.
    """
    target = Path(target)
    if not target.name:  # ".", which has no name that a folder beside it could take
        target = target.absolute()
    with writing(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FolderInUseError(
                f"{target} exists already and is not an empty folder: choose another place, or move it away"
            )
        temporary = part_beside(target)
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
            # An empty folder is replaced. If somebody else was faster, it is not empty, and this is an error.
            if os.name == "nt" and target.exists():
                target.rmdir()
            try:
                os.rename(temporary, target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise FolderInUseError(
                        f"{target} exists already, and is not empty: choose another place, or move it away"
                    ) from error
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


def part_beside(path: Path) -> Path:
    """A name in the same folder that no other process and no other thread uses. It says who makes it."""
    return path.with_name(f".{path.name[:100]}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def _machine() -> str:
    """Eight letters for this machine: on a shared file system another one may have a process of the same number."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


_PART = re.compile(r"\..*\.(?:([0-9a-f]{8})-)?(\d+)-[0-9a-f]{8}\.part")
ABANDONED_AFTER = 24 * 3600
"""Seconds after which a temporary file of another machine counts as left behind."""


def remove_leftovers(folder: StrPath) -> None:
    """Remove what killed processes left in a folder under temporary names; those of living ones stay."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(".part")]
    except OSError:
        return
    for entry in entries:
        match = _PART.fullmatch(entry.name)
        if match is None or not _left_behind(Path(entry.path), match[1], int(match[2])):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(entry.path)


def _left_behind(path: Path, machine: str | None, process: int) -> bool:
    if machine not in (None, _machine()):
        try:
            return time.time() - path.stat().st_mtime > ABANDONED_AFTER
        except OSError:
            return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # somebody else's process
        return False
    return False


def _is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe, or a descriptor of this process: a rename would put a file in its place."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or path.is_relative_to("/dev") or path.is_relative_to("/proc")


# JSON lines: one object per line

BLOCK = 1 << 16
MOST_LINE = 1 << 24
"""Bytes of a line; ours have hundreds. One without an end (a sparse file, a damaged disk) would fill the memory."""


def refuse_line(path: StrPath) -> NoReturn:
    raise CannotReadError(
        f"{path} has a line of more than {MOST_LINE >> 20} MB, which nothing here writes: restore it from a copy, or "
        f"remove that line"
    )


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


def read_json_lines(path: StrPath) -> list[dict[str, Any]]:
    """The objects of a file. A line that a kill cut off, or that is no object, is left out."""
    found = []
    if require_regular(path) == 0:
        return found
    with reading(path), open(path, "rb") as file:
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                refuse_line(path)
            with suppress(ValueError):
                value = parse_json(line)
                found += [value] if isinstance(value, dict) else []
    return found


def lines_from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(where it ends, line) of a file, the last line first. Reads no more than the lines that are asked for."""
    position, rest = file.seek(0, os.SEEK_END), b""
    end = position
    while position > 0:
        start = max(0, position - BLOCK)
        file.seek(start)
        rest = file.read(position - start) + rest
        position = start
        lines = rest.splitlines(keepends=True)
        # The first piece may be the end of a longer line, unless the file begins with it.
        for line in reversed(lines[1:] if position > 0 else lines):
            yield end, line
            end -= len(line)
        rest = lines[0] if position > 0 else b""
        if len(rest) > MOST_LINE:
            refuse_line(file.name)
