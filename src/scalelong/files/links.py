"""Files below a folder that someone else may have made.

A run folder can come from a stranger. A symbolic link in it may point to any file of this user, so links below such a
folder are never followed: not when a file is read, written or deleted, and not on the way to it. The folder's own path
is what the user typed, and links in that path are followed.

    run = below("runs/cats")
    run.write_text("notes/README.md", "...")
    run.read_bytes("config.yaml")
    run.remove_matching("checkpoints", ".step-*.part")
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from ..errors import CannotReadError, CannotWriteError, LinkRefusedError
from .access import StrPath, reading, writing

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_HAS_DIR_FD = {os.open, os.mkdir, os.unlink, os.rename, os.stat} <= os.supports_dir_fd and os.listdir in os.supports_fd
_FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}


def below(folder: StrPath) -> FolderBelow:
    """The files below a folder, with links refused."""
    return FolderBelow(folder)


class FolderBelow:
    """Opens, lists, writes and deletes names below one folder. Names use "/" and may not be absolute or hold ".."."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)

    def open(self, name: str, mode: Literal["rb", "r+b", "ab"] = "rb") -> IO[bytes]:
        """A regular file: to read, to read and change in place, or to append to (made if it is not there)."""
        with (
            (reading if mode == "rb" else writing)(self.folder / name),
            self._place(name) as (last, parent),
        ):
            if parent is None:
                refuse_link(last)
            # Without O_NONBLOCK, opening a named pipe would wait for ever.
            flags = _FLAGS[mode] | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            descriptor = os.open(last, flags, 0o666, dir_fd=parent)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise CannotReadError(f"{self.folder / name} is not a regular file: remove it, or give another folder")
            return open(descriptor, mode)

    def read_bytes(self, name: str, most: int | None = None) -> bytes:
        """The content of a file; a file of more than `most` bytes is refused."""
        with self.open(name) as file, reading(self.folder / name):
            content = file.read(-1 if most is None else most + 1)
        if most is not None and len(content) > most:
            raise CannotReadError(f"{self.folder / name} has more than {most} bytes: is it the right file?")
        return content

    def read_text(self, name: str, most: int | None = None) -> str:
        content = self.read_bytes(name, most)
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise CannotReadError(f"{self.folder / name} is not text in UTF-8 (byte {error.start})") from error

    def write_bytes(self, name: str, content: bytes | memoryview, *, sync: bool = True) -> None:
        """Replace a file, whole or not at all. Folders above it are made. A link of this name is replaced."""
        path = PurePosixPath(name)
        self.make_folder(str(path.parent))
        with writing(self.folder / name), self._place(name) as (last, parent):
            temporary = f"{last[: -len(path.name)]}.{path.name[:100]}.{uuid.uuid4().hex[:8]}.part"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | getattr(os, "O_BINARY", 0)
            try:
                with open(os.open(temporary, flags, 0o666, dir_fd=parent), "wb") as file:
                    file.write(content)
                    file.flush()
                    if sync:
                        os.fsync(file.fileno())
                os.replace(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise
            if sync and parent is not None:
                with suppress(OSError):  # some network file systems cannot sync a folder
                    os.fsync(parent)

    def write_text(self, name: str, text: str, *, sync: bool = True) -> None:
        self.write_bytes(name, text.encode(errors="backslashreplace"), sync=sync)

    def make_folder(self, name: str = ".") -> None:
        """The folder and those above it, where they are not there yet."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        parts = PurePosixPath(name).parts
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            with writing(self.folder / part), self._place(part) as (last, parent), suppress(FileExistsError):
                os.mkdir(last, dir_fd=parent)

    def exists(self, name: str) -> bool:
        """Whether there is a file or a folder of this name; a link counts as absent."""
        try:
            return not stat.S_ISLNK(self._status(name).st_mode)
        except (OSError, LinkRefusedError):
            return False

    def names(self, name: str = ".") -> list[str]:
        """The sorted names in a folder. A folder that is not there has none."""
        with (
            reading(self.folder / name),
            suppress(FileNotFoundError),
            self._place(f"{name}/_") as (last, parent),
        ):
            return sorted(os.listdir(os.path.dirname(last) if parent is None else parent))
        return []

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it. Of a link, the link itself. Absent names are fine."""
        with writing(self.folder / name), self._place(name) as (last, parent), suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode):
                shutil.rmtree(last, dir_fd=parent)
            else:
                os.unlink(last, dir_fd=parent)

    def remove_matching(self, name: str, *patterns: str) -> None:
        """Delete the names in a folder that match one of the patterns: those that we write, and no others."""
        for found in self.names(name):
            if any(fnmatchcase(found, pattern) for pattern in patterns):
                self.remove(f"{name}/{found}")

    def _status(self, name: str) -> os.stat_result:
        with self._place(name) as (last, parent):
            return os.stat(last, dir_fd=parent, follow_symlinks=False)

    @contextmanager
    def _place(self, name: str) -> Iterator[tuple[str, int | None]]:
        """The last part of a name and a descriptor of the folder that holds it; where the system has no such
        descriptors (Windows), the whole path and None."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or (os.name == "nt" and ":" in name):
            raise CannotWriteError(f"{name!r} does not stay below {self.folder}: give a relative name without '..'")
        *above, last = path.parts or (".",)
        try:
            if not _HAS_DIR_FD:
                for end in range(1, len(above) + 1):
                    refuse_link(os.path.join(self.folder, *above[:end]))
                yield os.path.join(self.folder, *path.parts), None
                return
            parent = os.open(self.folder, os.O_RDONLY | _DIRECTORY)
            try:
                for part in above:
                    inner = os.open(part, os.O_RDONLY | _DIRECTORY | _NO_FOLLOW, dir_fd=parent)
                    os.close(parent)
                    parent = inner
                yield last, parent
            finally:
                os.close(parent)
        except OSError as error:
            # A link is ELOOP for a file, and ENOTDIR for a folder on the way.
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
                for end in range(1, len(path.parts) + 1):
                    refuse_link(os.path.join(self.folder, *path.parts[:end]))
            raise


def refuse_link(path: StrPath) -> None:
    """Raise LinkRefusedError if there is a symbolic link at this path."""
    # Junctions are links of Windows; Python knows them from 3.12 on.
    is_junction = getattr(os.path, "isjunction", lambda _: False)
    if os.path.islink(path) or is_junction(path):
        raise LinkRefusedError(
            f"{path} is a symbolic link, and links inside a run folder are not followed: replace it by what it points "
            f"to, or remove it"
        )
