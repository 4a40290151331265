"""Files below a folder that someone else may have made.

A run folder can come from a stranger. A symbolic link in it may point to any file of this user, so links below such a
folder are never followed: not when a file is read, written or deleted, and not on the way to it. The folder's own path
is what the user typed, and links in that path are followed.

    run = below("runs/cats")
    run.write_text("README.md", "...")
    run.read_bytes("checkpoints/step-00000100/manifest.json")
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import socket
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from ..errors import CannotReadError, CannotWriteError, LinkRefusedError
from .access import StrPath, decoded, make_folder, reading, writing

_FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}

PART = re.compile(r"\..*\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.part")
"""A temporary name: of which machine, and which process."""


def temporary_name(path: Path) -> Path:
    """A name in the same folder that no other process or thread uses. It says who makes it."""
    return path.with_name(f".{path.name[:100]}.{machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def machine() -> str:
    """Eight letters for this machine: on a shared file system another one may have a process of the same number."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


class FolderBelow:
    """Opens, lists, writes and deletes files below one folder. Names use "/" and may not be absolute or hold ".."."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(folder)

    def open(self, name: str, mode: Literal["rb", "r+b", "ab"] = "rb") -> IO[bytes]:
        """A regular file: to read, to read and change in place, or to append to (made if it is not there)."""
        named = reading if mode == "rb" else writing
        with named(self.folder / name), self._place(name) as (last, parent):
            # Without O_NONBLOCK, opening a named pipe would wait for ever.
            descriptor = os.open(last, _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=parent)
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
        return decoded(self.read_bytes(name, most), self.folder / name)

    def write_bytes(self, name: str, content: bytes | memoryview, *, sync: bool = True) -> None:
        """Replace a file, whole or not at all. The folder is made. A link of this name is replaced."""
        with writing(self.folder / name):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._place(name) as (last, parent):
                temporary = str(temporary_name(Path(last)))
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
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
                if sync:
                    with suppress(OSError):  # some network file systems cannot sync a folder
                        os.fsync(parent)

    def write_text(self, name: str, text: str, *, sync: bool = True) -> None:
        self.write_bytes(name, text.encode(errors="backslashreplace"), sync=sync)

    def names(self, name: str = ".") -> list[str]:
        """The sorted names in a folder. A folder that is not there has none."""
        with reading(self.folder / name), suppress(FileNotFoundError), self._place(f"{name}/_") as (_, folder):
            return sorted(os.listdir(folder))
        return []

    def remove(self, name: str) -> None:
        """Delete a file; of a link, the link itself. An absent name is fine."""
        with writing(self.folder / name), self._place(name) as (last, parent), suppress(FileNotFoundError):
            os.unlink(last, dir_fd=parent)

    @contextmanager
    def _place(self, name: str) -> Iterator[tuple[str, int]]:
        """The last part of a name, and a descriptor of the folder that holds it."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise CannotWriteError(f"{name!r} does not stay below {self.folder}: give a relative name without '..'")
        *above, last = path.parts or (".",)
        try:
            parent = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for part in above:
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
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


below = FolderBelow


def refuse_link(path: StrPath) -> None:
    """Raise LinkRefusedError if there is a symbolic link at this path."""
    if os.path.islink(path):
        raise LinkRefusedError(
            f"{path} is a symbolic link, and links inside a run folder are not followed: replace it by what it points "
            f"to, or remove it"
        )


def refuse_links_in(folder: StrPath) -> None:
    """Raise LinkRefusedError if there is a symbolic link anywhere below a folder.

    checkpoints/latest and checkpoints/best are links of ours, to a name in the same folder.
    """
    for root, folders, files in os.walk(folder):
        for path in (os.path.join(root, name) for name in (*folders, *files)):
            ours = os.path.basename(root) == "checkpoints" and os.path.basename(path) in ("latest", "best")
            if not (ours and os.path.islink(path) and os.sep not in os.readlink(path)):
                refuse_link(path)


def results_folder(path: StrPath) -> Path:
    """A folder that results are written into, made if it is not there. It may hold no links (`refuse_links_in`)."""
    refuse_links_in(path)
    return make_folder(path)
