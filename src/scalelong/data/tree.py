"""Files with names, in a folder or in an archive, and the images among them as a source."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ..errors import NoImagesError
from .dataset import Annotations
from .decode import SUFFIXES
from .source import Source

HEAD = 64 * 1024  # bytes


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

    def images(self) -> list[str]:
        found = [name for name in self.names if PurePosixPath(name).suffix.lower() in SUFFIXES]
        if not found:
            kinds = Counter(PurePosixPath(name).suffix.lower() or "no suffix" for name in self.names)
            inside = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(8)) or "nothing"
            raise NoImagesError(
                f"no images in {self.where}: found {inside}; looked for {' '.join(sorted(SUFFIXES))} "
                "in it and its sub-folders"
            )
        return found


class Folder(FileTree):
    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.path = path
        self.names = sorted(_walk(path))

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def head(self, name: str) -> bytes:
        with (self.path / name).open("rb") as file:
            return file.read(HEAD)

    def stamp(self, name: str) -> str:
        try:
            return str((self.path / name).stat().st_size)
        except OSError:  # a dangling link: broken, as reading it will show
            return "unreadable"


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


def hidden(name: str) -> bool:
    """What systems leave behind: dot files, and the folder that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


def _walk(root: Path) -> Iterable[str]:
    """All files below. Linked folders are followed, each real folder once, so that a circle of links ends."""
    seen: set[str] = set()
    for folder, inner, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not hidden(name))
        base = Path(folder).relative_to(root)
        yield from ((base / name).as_posix() for name in files if not hidden(name))
