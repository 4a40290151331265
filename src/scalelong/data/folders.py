"""Folders and zip archives of images: which files are images, to which part they belong, their labels and captions.

Parts ("train", "test", "validation") are read from the names of folders and files. Labels are the names of sub-folders.
Captions and labels also come from `metadata.jsonl` or `metadata.csv`, as in Hugging Face's imagefolder (a column
`file_name`, relative to the metadata file), captions also from `cat.txt` next to `cat.png`. Nothing is unpacked, and an
archive that looks unsafe is refused.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import os
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..errors import DataNotFoundError, MetadataError, UnreadableDataError, UnsafeArchiveError
from ..files import digest, in_words, parse_json, read_bytes, require_regular
from ..optional import needs
from .dataset import Annotations, first_names
from .decode import HEIC, Header, UndecodableError, read_header, suffixes
from .stream import Source

# Parts of a data set

PARTS = {"train": "train training", "test": "test testing", "validation": "val valid validation dev"}
WORDS = {word: part for part, words in PARTS.items() for word in words.split()}


def canonical(word: str) -> str:
    """The part that a word names, or the word itself."""
    return WORDS.get(word.lower(), word)


def split_in(name: str) -> str | None:
    """The part that a file name mentions, as in train-00000-of-00002.parquet."""
    words = re.split(r"[^a-z]+", PurePosixPath(name).name.lower())
    return next((WORDS[word] for word in words if word in WORDS), None)


def choose_part(parts: dict[str, list[str]], split: str, where: str) -> list[str]:
    if canonical(split) not in parts:
        raise DataNotFoundError(
            f"{where} has no part {split!r}; found: {', '.join(map(repr, parts))}. Ask for one of these, or use "
            "data.split(held_out=...)"
        )
    return parts[canonical(split)]


def _by_folder(names: list[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each name its part, and its path without the folders that all share and without that of the part.

    Folders are parts only if all of them are: a class may be called "train" too.
    """
    paths = {name: PurePosixPath(name).parts for name in names}
    shared = _shared(paths.values())
    declared = [WORDS[folder.lower()] for folder in shared if folder.lower() in WORDS]
    paths = {name: path[len(shared) :] for name, path in paths.items()}
    if declared or not all(len(path) > 1 and path[0].lower() in WORDS for path in paths.values()):
        return {name: (declared[-1] if declared else "train", path) for name, path in paths.items()}
    below = 1 + len(_shared(path[1:] for path in paths.values()))
    return {name: (canonical(path[0]), path[below:]) for name, path in paths.items()}


def _shared(paths: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The folders that all paths begin with."""
    folders = [path[:-1] for path in paths]
    alike = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*folders, strict=False))
    return tuple(level[0] for level in alike)


# Files with names, in a folder or in an archive

HEAD = 64 * 1024  # bytes, enough for most headers
MAX_MEMBER = 512 * 1024**2  # bytes of one image file
ABOUT = frozenset({".txt", ".json", ".jsonl", ".csv", ".md", ".ini", ".db"})  # captions, tables, and what systems leave
FILMS = frozenset({".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v"})


class FileTree(ABC):
    """Names are relative, with forward slashes, sorted, without hidden files."""

    path: Path
    names: list[str]

    @abstractmethod
    def read(self, name: str) -> bytes: ...

    def head(self, name: str) -> bytes:
        """The beginning of the file, where that is cheaper to read than all of it."""
        return self.read(name)

    @abstractmethod
    def version(self, name: str) -> str:
        """Changes when the size of the file does; in archives also when its content does."""

    def images(self) -> list[str]:
        found = [name for name in self.names if os.path.splitext(name)[1].lower() in suffixes()]
        if not found:
            kinds = Counter(PurePosixPath(name).suffix.lower() or "no suffix" for name in self.names)
            if kinds.keys() & HEIC:
                needs(
                    "pillow_heif",
                    "heic",
                    f"reading the HEIC photographs in {self.path}, unless you convert them to JPEG,",
                )
            inside = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(8)) or "nothing"
            films = kinds.keys() & FILMS
            advice = "extract frames first (ffmpeg -i FILE -r 1 %04d.png)" if films else "give a folder that holds some"
            raise DataNotFoundError(
                f"no images in {self.path} and its sub-folders: found {inside}; looked for "
                f"{' '.join(sorted(suffixes()))}: {advice}"
            )
        return found

    def unread(self) -> tuple[str, ...]:
        """Files that are neither images nor texts about them, such as videos: logs name them."""
        known = suffixes() | ABOUT
        return tuple(name for name in self.names if PurePosixPath(name).suffix.lower() not in known)


class Folder(FileTree):
    def __init__(self, path: Path) -> None:
        self.path, self.names = path, sorted(_walk(path))

    def read(self, name: str) -> bytes:
        return read_bytes(self.path / name, MAX_MEMBER)

    def head(self, name: str) -> bytes:
        require_regular(self.path / name, MAX_MEMBER)
        with (self.path / name).open("rb") as file:
            return file.read(HEAD)

    def version(self, name: str) -> str:
        try:
            return str((self.path / name).stat().st_size)
        except OSError:  # a dangling link: broken, as reading it will show
            return "unreadable"


def stamp_of_files(paths: Iterable[Path]) -> str:
    """A hash of names, sizes and times. The time of the inode changes also where the file's own time was set back."""
    lines = []
    for path in paths:
        try:
            found = path.stat()
            lines.append(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}\n")
        except OSError:
            lines.append(f"{path}\0unreadable\n")
    return digest("".join(lines).encode("utf-8", "surrogateescape"))


def hidden(name: str) -> bool:
    """Files that systems add: dot files, and the folder that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)


SAMPLES = "samples.json"
OURS = (
    {"config.yaml", "data.json"},
    {"comparison.json", "table.txt"},
    {"command.txt", "diagnosis.json"},
    {"range.json"},
    {"settings.json", "runs.jsonl"},
    {"decoded.json", "pixels"},
)
"""Files by which folders of runs, comparisons, ranges and decoded images are known. None of it is data."""


def _walk(root: Path) -> Iterable[str]:
    """All files below. Linked folders are followed, each real folder once, so that a circle of links ends.

    What this software made is left out: `cd images; scalelong train .` writes its run among the images. Samples are
    data if their folder itself is asked for, without the grid of all of them.
    """
    seen: set[str] = set()
    for folder, inner, files in os.walk(root, followlinks=True):
        real, base = os.path.realpath(folder), os.path.relpath(folder, root).replace(os.sep, "/")
        ours = any(kind <= set(files) for kind in OURS) or (SAMPLES in files and base != ".")
        if real in seen or ours:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not hidden(name))
        for name in files:
            if not hidden(name) and not (SAMPLES in files and name == "grid.png"):
                yield name if base == "." else f"{base}/{name}"


MAX_RATIO = 100  # images are compressed already, so honest archives stay near 1; deflate can reach 1032
RATIO_FROM = 1024**2  # bytes below which a ratio does no harm (a small flat BMP may well exceed it)


class ZipTree(FileTree):
    """A zip, read in place. Nothing is unpacked to disk, so names can do no harm."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise UnreadableDataError(
                f"{path} cannot be read as a zip archive ({in_words(error)}): pack or download it again"
            ) from error
        members = [info for info in self._zip.infolist() if not info.is_dir()]
        _require_safe(members, path)
        self._versions = {info.filename: f"{info.file_size}:{info.CRC:08x}" for info in members}
        self.names = sorted(name for name in self._versions if not hidden(name))

    def read(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise UndecodableError(f"damaged in the archive: {in_words(error)}") from error

    def version(self, name: str) -> str:
        return self._versions[name]


def _require_safe(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Refuses what would unpack to a multiple of its size, encrypted members, and names that occur twice."""
    on_disk, stored = path.stat().st_size, sum(info.compress_size for info in members)
    for info in members:
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UnreadableDataError(  # the other methods unpack without bounds
                f"{path}: {info.filename!r} is encrypted or packed by other means than deflate; pack it again"
            )
    twice = [name for name, times in Counter(info.filename for info in members).items() if times > 1]
    if twice:
        raise MetadataError(f"{path} holds these names more than once: {first_names(twice)}; pack it again")
    sizes = [(info.filename, info.file_size, info.compress_size) for info in members]
    for name, unpacked, packed in [*sizes, ("the whole", sum(info.file_size for info in members), on_disk)]:
        if unpacked > max(RATIO_FROM, MAX_RATIO * packed) or (unpacked > MAX_MEMBER and name != "the whole"):
            raise UnsafeArchiveError(
                f"{path} is refused: {name} would unpack from {packed} to {unpacked} bytes; unpack it yourself if you "
                "trust it, and give the folder"
            )
    if stored > on_disk:
        raise UnsafeArchiveError(f"{path} is refused: its members overlap ({stored} bytes in {on_disk}); pack it again")


class TreeSource(Source):
    """The images of one part of a tree, with their labels and captions."""

    def __init__(self, tree: FileTree, split: str) -> None:
        placed = _by_folder(tree.images())
        parts: dict[str, list[str]] = {}
        for name, (part, _) in placed.items():
            parts.setdefault(part, []).append(name)
        self.tree, self.names = tree, choose_part(parts, split, str(tree.path))
        self.annotations = _annotate(tree, self.names, {name: path for name, (_, path) in placed.items()})

    def __len__(self) -> int:
        return len(self.names)

    def name(self, row: int) -> str:
        return self.names[row]

    def read(self, row: int) -> bytes:
        return self.tree.read(self.names[row])

    def header(self, row: int) -> Header:
        try:
            return read_header(self.tree.head(self.names[row]))
        except UndecodableError:  # some formats keep their header at the end
            return super().header(row)

    def version(self) -> str:
        sha = hashlib.sha256()
        for name in self.names:
            sha.update(f"{name}\0{self.tree.version(name)}\0".encode("utf-8", "surrogateescape"))
        return sha.hexdigest()


# Labels and captions

MOST_CLASSES = 1_000_000  # beyond this they are identifiers, not classes
METADATA_FILES = ("metadata.jsonl", "metadata.csv")
# Names of columns of metadata, tables and items of data set objects.
IMAGES = ("image", "img", "images", "jpg", "png", "picture", "photo")
LABELS = ("label", "labels", "class", "class_name", "fine_label", "target")
CAPTIONS = ("text", "caption", "captions", "prompt", "description")


def first_of(names: tuple[str, ...], columns: Iterable[str]) -> str | None:
    return next((name for name in names if name in set(columns)), None)


def number_labels(
    values: Sequence[Any], where: str, classes: Sequence[str] | None = None
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Labels as numbers, and the class names: those given, or the distinct names sorted, or "0", "1", ...

    All labels -1 means unlabelled: it is how hidden test labels are published.
    """
    if values and all(value == -1 for value in values):
        return None, None
    if all(isinstance(value, str) for value in values):
        classes = tuple(classes or sorted(set(values)))
        number = {name: index for index, name in enumerate(classes)}
        values = [number.get(value, -1) for value in values]
    elif not all(isinstance(value, int) for value in values):
        wrong = next(row for row, value in enumerate(values) if value is None or not isinstance(value, int))
        raise MetadataError(
            f"{where}: labels must be all whole numbers or all names, and that of row {wrong} is {values[wrong]!r}: "
            "correct it, or remove the column"
        )
    count = max(values, default=-1) + 1
    if min(values, default=0) < 0 or count > (len(classes) if classes else MOST_CLASSES):
        known = f"one of the classes {list(classes)[:20]}" if classes else f"from 0 to {MOST_CLASSES - 1}"
        raise MetadataError(f"{where}: labels must be {known}; there are others, up to {count - 1}")
    return torch.tensor(values, dtype=torch.int64), tuple(classes or map(str, range(count)))


def check_captions(values: Sequence[Any], where: str) -> list[str]:
    """One line of text for each image; of several captions the first."""
    texts: list[Any] = [value[0] if isinstance(value, list) and value else value for value in values]
    wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise MetadataError(f"{where}: the caption of image {wrong} must be a text, found {values[wrong]!r}")
    return [" ".join(text.split()) for text in texts]


def _annotate(tree: FileTree, images: list[str], paths: dict[str, tuple[str, ...]]) -> Annotations:
    """What the tree says about these images; `paths` are those of all images, in their part."""
    where, rows = f"the metadata of {tree.path}", _metadata_rows(tree, images)
    absent = sorted(rows.keys() - paths.keys())
    if absent:
        raise MetadataError(
            f"{where} names {len(absent)} images that are not there: {first_names(absent)}. Remove these rows, or put "
            "the images back"
        )
    _require_all([not rows or name in rows for name in images], images, f"{where} has no row")
    labels, captions = (_column(rows, images, columns, where) for columns in (LABELS, CAPTIONS))
    if rows and labels is None and captions is None:
        raise MetadataError(
            f"{where} has neither captions nor labels: looked for captions in {list(CAPTIONS)}, for labels in "
            f"{list(LABELS)}: rename a column, or move the file away"
        )
    if captions is None:
        captions = _text_files(tree, images)
    if labels is not None:
        numbered = number_labels(labels, where)
    elif any(len(path) < 2 for path in paths.values()):  # one folder alone is a place, not a class
        numbered = None, None
    else:  # counted over the whole tree: a name must have the same number in "train" and in "test"
        classes = sorted({path[0] for path in paths.values()})
        numbered = number_labels([paths[image][0] for image in images], "sub-folders", classes)
    return Annotations(*numbered, None if captions is None else check_captions(captions, where))


def _require_all(good: list[bool], images: list[str], what: str) -> None:
    without = [image for image, fine in zip(images, good, strict=True) if not fine]
    if without:
        raise MetadataError(
            f"{what} for {len(without)} of {len(images)} images: {first_names(without)}. Add it for these, or remove "
            "all of it"
        )


def _text_files(tree: FileTree, images: list[str]) -> list[str] | None:
    present = set(tree.names)
    texts = [str(PurePosixPath(image).with_suffix(".txt")) for image in images]
    good = [text in present for text in texts]
    if not any(good):
        return None
    _require_all(good, texts, f"{tree.path} has no caption file (.txt)")
    return [_text(tree, text) for text in texts]


def _metadata_rows(tree: FileTree, images: list[str]) -> dict[str, dict[str, Any]]:
    """Rows by image name, from all metadata files in folders above these images."""
    above = {folder for image in images for folder in PurePosixPath(image).parents}
    rows: dict[str, dict[str, Any]] = {}
    for file in tree.names:
        folder = PurePosixPath(file).parent
        if PurePosixPath(file).name.lower() not in METADATA_FILES or folder not in above:
            continue
        for line, row in _parsed(tree, file):
            where = f"{file} of {tree.path}, line {line}"
            name = row.get("file_name")
            if not isinstance(name, str) or not name or ".." in name or name.startswith("/"):
                raise MetadataError(f"{where}: 'file_name' must name an image below the metadata file, found {name!r}")
            image = (folder / name.replace("\\", "/")).as_posix()
            if image in rows:
                raise MetadataError(f"{where} names {image!r} again; keep one row for each image")
            rows[image] = row
    return rows


def _parsed(tree: FileTree, file: str) -> Iterable[tuple[int, dict[str, Any]]]:
    """The rows of a metadata file with the numbers of their lines."""
    text, line = _text(tree, file), 0
    try:
        if file.lower().endswith(".csv"):
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise ValueError(f"it needs {len(reader.fieldnames or ())} fields")
                yield line, row
            return
        for line, content in enumerate(text.split("\n"), start=1):
            if content.strip():
                row = parse_json(content)
                if not isinstance(row, dict):
                    raise ValueError(f"it needs an object with 'file_name', found {content[:60]!r}")
                yield line, row
    except (csv.Error, ValueError) as error:
        raise MetadataError(f"{file} of {tree.path}, line {line}, cannot be read: {error}; correct it") from error


def _column(rows: dict[str, dict[str, Any]], images: list[str], columns: tuple[str, ...], where: str) -> Any:
    """The first of these columns that the rows have, for these images."""
    column = first_of(columns, {column for row in rows.values() for column in row})
    if column is None:
        return None
    values = [rows[image].get(column) for image in images]
    empty = (None, "") if columns is LABELS else (None,)  # a caption may be empty, a label may not
    _require_all([value not in empty for value in values], images, f"{where} has no {column!r}")
    if columns is LABELS and all(isinstance(value, str) and value.isdecimal() and len(value) < 19 for value in values):
        return [int(value) for value in values if value is not None]  # CSV knows no numbers
    return values


def _text(tree: FileTree, file: str) -> str:
    try:
        return tree.read(file).decode("utf-8-sig")
    except (UnicodeDecodeError, UndecodableError) as error:
        raise MetadataError(f"{file} of {tree.path} cannot be read: {error}; save it again as UTF-8") from error
