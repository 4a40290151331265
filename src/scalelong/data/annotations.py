"""Labels and captions: numbers for the names of classes, columns of tables, and files next to the images."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..errors import DuplicateNameError, LabelError, MetadataError, UnreadableDataError
from ..files import parse_json
from .dataset import Annotations, first_names
from .decode import UndecodableError
from .files import FileTree, inside

Numbered = tuple[Tensor, tuple[str, ...]] | tuple[None, None]  # numbers and class names, or unlabelled
MOST_CLASSES = 1_000_000  # beyond this they are identifiers, not classes


def number_labels(values: Sequence[Any], where: str, classes: Sequence[str] | None = None) -> Numbered:
    """Labels as numbers, and the class names: those given, or the distinct names sorted, or "0", "1", ...

    All labels -1 means unlabelled: it is how hidden test labels are published.
    """
    missing = [row for row, value in enumerate(values) if value is None]
    if missing:
        raise LabelError(
            f"{where}: {len(missing)} of {len(values)} labels are missing, the first in row {missing[0]}; fill them, "
            "or remove the column"
        )
    if all(isinstance(value, str) for value in values):
        names = tuple(classes) if classes else tuple(sorted(set(values)))
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise LabelError(f"{where}: labels {unknown[:5]} are not among the classes {list(names)[:20]}: add them")
        number = {name: index for index, name in enumerate(names)}
        return torch.tensor([number[value] for value in values], dtype=torch.int64), names
    if not all(isinstance(value, int) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise LabelError(f"{where}: labels must be all whole numbers or all names, found {', '.join(kinds)}")
    if values and all(value == -1 for value in values):
        return None, None
    beyond = next((value for value in values if not 0 <= value < MOST_CLASSES), None)
    if beyond is not None:
        raise LabelError(f"{where}: labels must lie between 0 and {MOST_CLASSES - 1}, found {beyond}")
    count = max(values, default=0) + 1
    if classes and count > len(classes):
        raise LabelError(f"{where}: label {count - 1} has no name; there are {len(classes)}: {list(classes)[:20]}")
    names = tuple(classes) if classes else tuple(map(str, range(count)))
    return torch.tensor(list(values), dtype=torch.int64), names


def check_captions(values: Sequence[Any], where: str) -> list[str]:
    """One line of text for each image; of several captions the first."""
    captions = []
    for row, value in enumerate(values):
        text = value[0] if isinstance(value, list) and value else value
        if not isinstance(text, str):
            raise MetadataError(f"{where}: the caption of image {row} must be a text, found {value!r}")
        captions.append(" ".join(text.split()))
    return captions


# Which column of a table holds the images, which the labels and which the captions.

IMAGES = ("image", "img", "images", "jpg", "png", "picture", "photo")
LABELS = ("label", "labels", "class", "class_name", "fine_label", "target")
CAPTIONS = ("text", "caption", "captions", "prompt", "description")


def first_of(names: tuple[str, ...], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def image_column(candidates: list[str], columns: Sequence[str], where: str) -> str:
    """The column with encoded images: by its name, or because it is the only one that can be."""
    found = first_of(IMAGES, candidates)
    if found is not None or len(candidates) == 1:
        return found or candidates[0]
    raise UnreadableDataError(
        f"{where}: a column of encoded images is needed, by preference {list(IMAGES)}; found "
        f"{f'several that could be: {candidates}' if candidates else 'none'}. The columns are {list(columns)}: "
        "rename one"
    )


# Labels and captions in files next to the images.
#
# Labels are the names of sub-folders. Captions and labels come from `metadata.jsonl` or `metadata.csv` as in Hugging
# Face's imagefolder (a column `file_name`, relative to the metadata file), captions also from `cat.txt` next to
# `cat.png`.

METADATA_FILES = ("metadata.jsonl", "metadata.csv")


def annotate(tree: FileTree, images: list[str]) -> Annotations:
    """What the tree says about these images."""
    where = f"the metadata of {tree.where}"
    rows = _metadata_rows(tree, images)
    if rows is None:
        return Annotations(*_folder_labels(tree, images), _text_files(tree, images))
    absent = sorted(rows.keys() - set(tree.images()))
    if absent:
        raise MetadataError(
            f"{where} names {len(absent)} images that are not there: {first_names(absent)}. Remove these rows, or put "
            "the images back"
        )
    _require_all([name in rows for name in images], images, f"{where} has no row")
    labels, captions = _column(rows, images, LABELS, where), _column(rows, images, CAPTIONS, where)
    if labels is None and captions is None:
        columns = sorted({column for row in rows.values() for column in row})
        raise MetadataError(
            f"{where} has neither captions nor labels: its columns are {columns}; looked for captions in "
            f"{list(CAPTIONS)}, for labels in {list(LABELS)}: rename one, or move the file away"
        )
    captions = _text_files(tree, images) if captions is None else check_captions(captions, where)
    numbered = _folder_labels(tree, images) if labels is None else number_labels(labels, where)
    return Annotations(*numbered, captions)


def _require_all(good: list[bool], images: list[str], what: str) -> None:
    without = [image for image, fine in zip(images, good, strict=True) if not fine]
    if without:
        raise MetadataError(
            f"{what} for {len(without)} of {len(images)} images: {first_names(without)}. Add it for these, or remove "
            "all of it"
        )


def _folder_labels(tree: FileTree, images: list[str]) -> Numbered:
    """The first folder below the one that all share is the class. One folder alone is a place, not a class.

    Classes are counted over the whole tree: the same name must have the same number in "train" and in "test".
    """
    everything = tree.images()
    paths = {name: PurePosixPath(path).parts for name, path in zip(everything, inside(everything), strict=True)}
    if any(len(path) < 2 for path in paths.values()):
        return None, None
    classes = sorted({path[0] for path in paths.values()})
    for name in classes:
        if not name.isprintable() or "\ufffd" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise LabelError(f"{tree.where}: the sub-folder {name!r} has a name that is no text: rename it")
    return number_labels([paths[image][0] for image in images], "sub-folders", classes)


def _text_files(tree: FileTree, images: list[str]) -> list[str] | None:
    present = set(tree.names)
    texts = [str(PurePosixPath(image).with_suffix(".txt")) for image in images]
    good = [text in present for text in texts]
    if not any(good):
        return None
    _require_all(good, texts, f"{tree.where} has no caption file (.txt)")
    return check_captions([_text(tree, text) for text in texts], tree.where)


def _metadata_rows(tree: FileTree, images: list[str]) -> dict[str, dict[str, Any]] | None:
    """Rows by image name, from all metadata files in folders above these images; None if there are none."""
    above = {str(folder) for image in images for folder in PurePosixPath(image).parents}
    files = [name for name in tree.names if PurePosixPath(name).name.lower() in METADATA_FILES]
    files = [name for name in files if str(PurePosixPath(name).parent) in above]
    if not files:
        return None
    folders = [str(PurePosixPath(name).parent) for name in files]
    if len(set(folders)) < len(folders):
        raise MetadataError(f"{tree.where} has both metadata.jsonl and metadata.csv in one folder; remove one of them")
    rows: dict[str, dict[str, Any]] = {}
    for file, folder in zip(files, folders, strict=True):
        for line, row in _parsed(tree, file):
            image = _image_name(row, f"{file} of {tree.where}, line {line}", folder)
            if image in rows:
                raise DuplicateNameError(
                    f"{file} of {tree.where} names {image!r} twice, the second time in line {line}; "
                    "keep one row for each image"
                )
            rows[image] = row
    return rows


def _parsed(tree: FileTree, file: str) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a metadata file with the numbers of their lines."""
    text, where = _text(tree, file), f"{file} of {tree.where}"
    rows, line = [], 0
    try:
        if file.lower().endswith(".csv"):
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            for row in reader:
                line = reader.line_num
                if None in row or None in row.values():
                    raise ValueError(f"it needs {len(reader.fieldnames or ())} fields")
                rows.append((line, row))
            return rows
        for line, content in enumerate(text.split("\n"), start=1):
            if content.strip():
                row = parse_json(content)
                if not isinstance(row, dict):
                    raise ValueError(f"it needs an object with 'file_name', found {content[:60]!r}")
                rows.append((line, row))
    except (csv.Error, ValueError) as error:
        raise MetadataError(f"{where}, line {line}, cannot be read: {error}; correct it") from error
    return rows


def _image_name(row: dict[str, Any], where: str, folder: str) -> str:
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise MetadataError(
            f"{where}: no 'file_name'; its columns are {sorted(map(str, row))}; each row must name its image"
        )
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise MetadataError(f"{where}: file_name {name!r} must be relative and stay below the metadata file")
    return (PurePosixPath(folder) / path).as_posix()


def _column(rows: dict[str, dict[str, Any]], images: list[str], columns: tuple[str, ...], where: str) -> Any:
    """The first of these columns that the rows have, for these images."""
    column = next((column for column in columns if any(column in rows[image] for image in images)), None)
    if column is None:
        return None
    values = [rows[image].get(column) for image in images]
    empty = (None, "") if columns is LABELS else (None,)  # a caption may be empty, a label may not
    _require_all([value not in empty for value in values], images, f"{where} has no {column!r}")
    if columns is LABELS and all(isinstance(value, str) and value.isdecimal() for value in values):
        return [int(value) for value in values if value is not None]  # CSV knows no numbers
    return values


def _text(tree: FileTree, file: str) -> str:
    try:
        return tree.read(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MetadataError(f"{file} of {tree.where} is not UTF-8 (byte {error.start}): save it again") from error
    except UndecodableError as error:
        raise MetadataError(f"{file} of {tree.where} cannot be read: {error}; write it again") from error
