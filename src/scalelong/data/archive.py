"""A zip of images, read in place. Nothing is unpacked, and an archive that looks unsafe is refused as a whole."""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from collections import Counter
from pathlib import Path, PurePosixPath

from ..errors import DuplicateNameError, UnreadableDataError, UnsafeArchiveError
from .broken import listed
from .decode import UndecodableError
from .tree import FileTree, hidden

# Images are compressed already, so honest archives stay near 1; deflate can reach 1032.
MAX_RATIO = 100
RATIO_FROM = 1024**2  # bytes below which a ratio does no harm (a small flat BMP may well exceed it)
MAX_MEMBER = 512 * 1024**2
MAX_TOTAL = 1024**4


class ZipTree(FileTree):
    """Opened once in each process: a file handle must not be shared with forked workers."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.path = path
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        members = self._zip().infolist()
        check_safe(members, path)
        self._stamps = {info.filename: f"{info.file_size}:{info.CRC:08x}" for info in members if not info.is_dir()}
        self.names = sorted(name for name in self._stamps if not hidden(name))

    def read(self, name: str) -> bytes:
        try:
            return self._zip().read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise UndecodableError(f"damaged in the archive: {error}") from error

    def stamp(self, name: str) -> str:
        return self._stamps[name]

    def _zip(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), zipfile.ZipFile(self.path)
            except (zipfile.BadZipFile, OSError) as error:
                raise UnreadableDataError(f"{self.path} cannot be read as a zip archive: {error}") from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}


def check_safe(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuses paths that leave the archive, links, encrypted members, bombs, and names that occur twice."""
    for info in members:
        reason = _unsafe_name(info) or _unsafe_size(info)
        if reason:
            raise UnsafeArchiveError(f"{path} is refused: {info.filename!r} {reason}")
        if info.flag_bits & 1:
            raise UnreadableDataError(f"{path} is encrypted ({info.filename!r}); give an archive without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others unpack without bounds
            raise UnreadableDataError(f"{path}: {info.filename!r} is packed by other means than deflate; pack it anew")
    total, stored = sum(info.file_size for info in members), sum(info.compress_size for info in members)
    on_disk = path.stat().st_size
    if stored > on_disk:
        raise UnsafeArchiveError(f"{path} is refused: its members overlap ({stored} bytes in a file of {on_disk})")
    if total > MAX_TOTAL or (total > 16 * RATIO_FROM and total > MAX_RATIO * on_disk):
        raise UnsafeArchiveError(f"{path} is refused: {on_disk} bytes would unpack to {total}")
    twice = [name for name, times in Counter(info.filename for info in members).items() if times > 1]
    if twice:
        raise DuplicateNameError(f"{path} holds these names more than once: {listed(twice)}")


def _unsafe_name(info: zipfile.ZipInfo) -> str | None:
    name = info.orig_filename.replace("\\", "/")
    if name.startswith("/") or re.match(r"^[A-Za-z]:", name):
        return "is an absolute path"
    if ".." in PurePosixPath(name).parts:
        return "leaves the archive"
    if "\0" in info.orig_filename:
        return "has a zero byte in its name"
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a special file"
    return None


def _unsafe_size(info: zipfile.ZipInfo) -> str | None:
    if info.file_size > MAX_MEMBER:
        return f"would unpack to {info.file_size} bytes"
    if info.file_size > RATIO_FROM and info.file_size > MAX_RATIO * max(info.compress_size, 1):
        return f"would unpack from {info.compress_size} to {info.file_size} bytes"
    return None
