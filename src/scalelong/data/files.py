"""Image files in folders and archives, and which part of a data set is meant ("train", "test", "validation").

Parts are read from the names of folders and files. Nothing is unpacked, and an archive that looks unsafe is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ..errors import (
    DuplicateNameError,
    NoImagesError,
    UnknownSplitError,
    UnreadableDataError,
    UnsafeArchiveError,
)
from ..files import digest, in_words, read_bytes, require_regular
from ..optional import needs
from .dataset import Annotations, first_names
from .decode import HEIC, UndecodableError, suffixes
from .stream import Source

PARTS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("val", "valid", "validation", "dev"),
}
WORDS = {word: part for part, words in PARTS.items() for word in words}


def canonical(word: str) -> str | None:
    """The part that a word names, None if it names none."""
    return WORDS.get(word.lower())


def split_in(name: str) -> str | None:
    """The part that a file name mentions, as in train-00000-of-00002.parquet."""
    words = re.split(r"[^a-z0-9]+", PurePosixPath(name).name.lower())
    return next((part for word in words if (part := canonical(word) or canonical(word.rstrip("0123456789")))), None)


def by_folder(names: list[str], split: str, where: str) -> list[str]:
    """The names below the folder of this part. Without such folders everything is "train"."""
    parts: dict[str, list[str]] = {}
    for name, part in zip(names, _part_folders(names), strict=True):
        parts.setdefault(part or "train", []).append(name)
    return _chosen(parts, split, where)


def inside(names: list[str]) -> list[str]:
    """The names without the folders that all of them share and without the folders of the parts."""
    depth = len(common_parts(names))
    in_common = any(canonical(part) for part in common_parts(names))
    if not in_common and all(_part_folders(names)):
        depth += 1
    inner = ["/".join(PurePosixPath(name).parts[depth:]) for name in names]
    depth = len(common_parts(inner))
    return ["/".join(PurePosixPath(name).parts[depth:]) for name in inner]


def _part_folders(names: list[str]) -> list[str | None]:
    """The part of each name, or None for all: a class may be called "train" too, unless all folders are parts."""
    common = common_parts(names)
    declared = [part for folder in common if (part := canonical(folder))]
    if declared:
        return [declared[-1]] * len(names)
    inner = [PurePosixPath(name).parts[len(common) :] for name in names]
    parts = [canonical(path[0]) if len(path) > 1 else None for path in inner]
    return parts if all(parts) else [None] * len(names)


def by_file(names: list[str], split: str, where: str) -> list[str]:
    """The files that mention this part in their name. If none mentions any, everything is "train"."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(split_in(name) or "", []).append(name)
    return _chosen({"train": names} if set(parts) == {""} else parts, split, where)


def common_parts(names: list[str]) -> tuple[str, ...]:
    """The folders that all names share."""
    folders = [PurePosixPath(name).parts[:-1] for name in names]
    shared: list[str] = []
    for level in zip(*folders, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return tuple(shared)


def _chosen(parts: dict[str, list[str]], split: str, where: str) -> list[str]:
    wanted = canonical(split) or split
    if wanted not in parts:
        found = ", ".join(repr(part) for part in parts if part)
        raise UnknownSplitError(
            f"{where} has no part {split!r}; found: {found}. Ask for one of these, or use data.split(held_out=...)"
        )
    return parts[wanted]


# Files with names, in a folder or in an archive, and the images among them as a source.

HEAD = 64 * 1024  # bytes
ABOUT = frozenset({".txt", ".json", ".jsonl", ".csv", ".md", ".ini", ".db"})  # captions, tables, and what systems leave
FILMS = frozenset({".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v"})


class FileTree(ABC):
    """Names are relative, with forward slashes, sorted, without hidden files."""

    where: str  # for messages
    names: list[str]

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    def head(self, name: str) -> bytes:
        """Enough of the file for most headers."""
        return self.read(name)

    @abstractmethod
    def stamp(self, name: str) -> str:
        """Changes when the file does, without reading it."""

    def times(self, names: list[str]) -> str | None:  # noqa: ARG002, for those that have some
        """Sizes and times of these files in a hash; None where `stamp` says as much."""
        return None

    def images(self) -> list[str]:
        found = [name for name in self.names if os.path.splitext(name)[1].lower() in suffixes()]
        if not found:
            kinds = Counter(PurePosixPath(name).suffix.lower() or "no suffix" for name in self.names)
            if kinds.keys() & HEIC:
                needs("pillow_heif", "heic", f"reading the HEIC photographs in {self.where}")
            inside = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(8)) or "nothing"
            films = kinds.keys() & FILMS
            advice = "extract frames first (ffmpeg -i FILE -r 1 %04d.png)" if films else "give a folder that holds some"
            raise NoImagesError(
                f"no images in {self.where} and its sub-folders: found {inside}; looked for "
                f"{' '.join(sorted(suffixes()))}: {advice}"
            )
        return found

    def unread(self) -> tuple[str, ...]:
        """Files that are neither images nor texts about them, such as videos, so that the user can be told."""
        known = suffixes() | ABOUT
        return tuple(name for name in self.names if PurePosixPath(name).suffix.lower() not in known)


class Folder(FileTree):
    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.path = path
        self.names = sorted(_walk(path))

    def read(self, name: str) -> bytes:
        return read_bytes(self.path / name, MAX_MEMBER)

    def head(self, name: str) -> bytes:
        if require_regular(self.path / name, MAX_MEMBER) == 0:
            return b""
        with (self.path / name).open("rb") as file:
            return file.read(HEAD)

    def stamp(self, name: str) -> str:
        try:
            return str((self.path / name).stat().st_size)
        except OSError:  # a dangling link: broken, as reading it will show
            return "unreadable"

    def times(self, names: list[str]) -> str:
        return stamp_of_files(names, str(self.path))


def stamp_of_files(names: Iterable[str], root: str = "") -> str:
    """A hash of names, sizes and times. The time of the inode changes also where the file's own time was set back."""
    lines = []
    for name in names:
        try:
            found = os.stat(os.path.join(root, name))
            lines.append(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}\n")
        except OSError:  # a dangling link: broken, as reading it will show
            lines.append(f"{name}\0unreadable\n")
    return digest("".join(lines).encode("utf-8", "surrogateescape"))


class TreeSource(Source):
    """The images of a tree."""

    def __init__(self, tree: FileTree, names: list[str], annotations: Annotations) -> None:
        self.tree, self.names, self.annotations = tree, names, annotations

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return self.names[row]

    def read(self, row: int) -> bytes:
        return self.tree.read(self.names[row])

    def head(self, row: int) -> bytes:
        return self.tree.head(self.names[row])

    def version(self) -> str:
        sha = hashlib.sha256()
        for name in self.names:
            sha.update(f"{name}\0{self.tree.stamp(name)}\0".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()

    def stamp(self) -> str:
        return self.tree.times(self.names) or super().stamp()


def hidden(name: str) -> bool:
    """Files that systems add: dot files, and the folder that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def _walk(root: Path) -> Iterable[str]:
    """All files below. Linked folders are followed, each real folder once, so that a circle of links ends.

    What this software made is left out: `cd images; scalelong train .` writes its run among the images.
    """
    seen: set[str] = set()
    for folder, inner, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or is_our_output(folder, files, inner, top=folder == str(root)):
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not hidden(name))
        base = os.path.relpath(folder, root).replace(os.sep, "/")
        prefix = "" if base == "." else f"{base}/"
        grids = SAMPLES in files  # of a folder of samples that was asked for, without the grid of all of them
        for name in files:
            if not (name.startswith(".") or name == "__MACOSX" or (grids and name == "grid.png")):
                yield prefix + name


RUN, SAMPLES = {"config.yaml", "data.json"}, "samples.json"
OURS = (
    {"comparison.json", "table.txt"},
    {"commands.txt", "diagnosis.json"},
    {"range.json"},
    {"settings.json", "runs.jsonl"},
    {"decoded.json", "pixels"},
)
"""Files by which folders of runs, samples, comparisons, ranges and decoded images are known. None of it is data."""


def is_our_output(folder: str, files: list[str], inner: list[str], top: bool = False) -> bool:
    """Whether a folder is a run or the like, or the sample grids of one. Samples may be data if they are asked for."""
    there = set(files)
    if there >= RUN or ("config.yaml" in there and "checkpoints" in inner) or any(kind <= there for kind in OURS):
        return True
    if top:  # what is above it was not walked through
        above = os.path.dirname(os.path.realpath(folder))
        return os.path.basename(os.path.realpath(folder)) == "samples" and all(
            os.path.exists(os.path.join(above, name)) for name in RUN
        )
    return SAMPLES in there


# A zip of images, read in place. Nothing is unpacked to disk, so names can do no harm; what would unpack to a multiple
# of its size is refused.

MAX_RATIO = 100  # images are compressed already, so honest archives stay near 1; deflate can reach 1032
RATIO_FROM = 1024**2  # bytes below which a ratio does no harm (a small flat BMP may well exceed it)
MAX_MEMBER = 512 * 1024**2
MAX_TOTAL = 1024**4


class ZipTree(FileTree):
    """Opened once in each process: a file handle must not be shared with forked workers."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.path = path
        self._opened: tuple[int, zipfile.ZipFile] | None = None
        members = [info for info in self._zip().infolist() if not info.is_dir()]
        _require_safe(members, path)
        self._stamps = {info.filename: f"{info.file_size}:{info.CRC:08x}" for info in members}
        self.names = sorted(name for name in self._stamps if not hidden(name))

    def read(self, name: str) -> bytes:
        try:
            return self._zip().read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise UndecodableError(f"damaged in the archive: {in_words(error)}") from error

    def stamp(self, name: str) -> str:
        return self._stamps[name]

    def _zip(self) -> zipfile.ZipFile:
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                self._opened = os.getpid(), zipfile.ZipFile(self.path)
            except (zipfile.BadZipFile, OSError) as error:
                raise UnreadableDataError(
                    f"{self.path} cannot be read as a zip archive ({in_words(error)}): pack or download it again"
                ) from error
        return self._opened[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_opened": None}


def _require_safe(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuses bombs, encrypted members, and names that occur twice."""
    for info in members:
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnreadableDataError(  # the other methods unpack without bounds
                f"{path}: {info.filename!r} is encrypted or packed by other means than deflate; pack it again"
            )
    twice = [name for name, times in Counter(info.filename for info in members).items() if times > 1]
    if twice:
        raise DuplicateNameError(f"{path} holds these names more than once: {first_names(twice)}; pack it again")
    stored, on_disk = sum(info.compress_size for info in members), path.stat().st_size
    sizes = [(info.filename, info.file_size, info.compress_size, RATIO_FROM, MAX_MEMBER) for info in members]
    total = ("the whole", sum(info.file_size for info in members), on_disk, 16 * RATIO_FROM, MAX_TOTAL)
    for name, unpacked, packed, harmless, most in (*sizes, total):
        if unpacked > most or (unpacked > harmless and unpacked > MAX_RATIO * max(packed, 1)):
            raise UnsafeArchiveError(
                f"{path} is refused: {name} would unpack from {packed} to {unpacked} bytes; unpack it yourself if you "
                "trust it, and give the folder"
            )
    if stored > on_disk:
        raise UnsafeArchiveError(
            f"{path} is refused: its members overlap ({stored} bytes in a file of {on_disk}); pack it again"
        )
