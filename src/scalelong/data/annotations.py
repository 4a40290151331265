"""Labels and captions: numbers for the names of classes, columns of tables, and files next to the images."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..errors import (
    DuplicateNameError,
    LabelError,
    MetadataError,
    UnreadableDataError,
)
from ..files import parse_json
from .dataset import Annotations, first_names
from .decode import UndecodableError
from .files import FileTree, inside

# From what files call labels (numbers, names) to int64 numbers and the names of the classes.

Numbered = tuple[Tensor, tuple[str, ...]] | tuple[None, None]  # numbers and class names, or unlabelled
MOST_CLASSES = 1_000_000  # beyond this they are identifiers, not classes


def number_labels(values: Sequence[object], where: str, classes: Sequence[str] | None = None) -> Numbered:
    """Labels as numbers, and the class names: those given, or the distinct names sorted, or "0", "1", ...

    All labels -1 means unlabelled: it is how hidden test labels are published.
    """
    missing = [row for row, value in enumerate(values) if value is None]
    if missing:
        raise LabelError(
            f"{where}: {len(missing)} of {len(values)} labels are missing, the first in row {missing[0]}; "
            f"fill them, or "
            f"remove the column"
        )
    if all(isinstance(value, str) for value in values):
        names = tuple(classes) if classes else tuple(sorted(set(map(str, values))))
        unknown = sorted(set(map(str, values)) - set(names))
        if unknown:
            raise LabelError(f"{where}: labels {unknown[:5]} are not among the classes {list(names)[:20]}: add them")
        number = {name: index for index, name in enumerate(names)}
        return torch.tensor([number[str(value)] for value in values], dtype=torch.int64), names
    if not all(isinstance(value, int) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise LabelError(f"{where}: labels must be all whole numbers or all names, found {', '.join(kinds)}")
    beyond = next((value for value in values if not -1 <= int(value) < MOST_CLASSES), None)  # pyright: ignore
    if beyond is not None:
        raise LabelError(f"{where}: labels must lie between 0 and {MOST_CLASSES - 1}, found {beyond}")
    return number_tensor(torch.tensor(list(values), dtype=torch.int64), where, classes)


def number_tensor(labels: Tensor, where: str, classes: Sequence[str] | None = None) -> Numbered:
    """The same for numbers that are a tensor already."""
    labels = labels.to(torch.int64)
    if len(labels) and bool((labels == -1).all()):
        return None, None
    least, most = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if least < 0 or most >= MOST_CLASSES:
        raise LabelError(f"{where}: labels must lie between 0 and {MOST_CLASSES - 1}, found {least} to {most}")
    if classes and most >= len(classes):
        raise LabelError(f"{where}: label {most} has no name; there are {len(classes)} classes: {list(classes)[:20]}")
    return labels, tuple(classes) if classes else tuple(str(label) for label in range(most + 1))


# Which column of a table holds the images, which the labels and which the captions.

IMAGES = ("image", "img", "images", "jpg", "png", "picture", "photo")
LABELS = ("label", "labels", "class", "class_name", "fine_label", "target")
CAPTIONS = ("text", "caption", "captions", "prompt", "description")


def image_column(candidates: list[str], columns: Sequence[str], where: str) -> str:
    """The column with encoded images: by its name, or because it is the only one that can be."""
    for name in IMAGES:
        if name in candidates:
            return name
    if len(candidates) == 1:
        return candidates[0]
    found = f"several that could be: {candidates}" if candidates else "none"
    raise UnreadableDataError(
        f"{where}: looked for a column of encoded images (bytes, or a struct with 'bytes'), by preference "
        f"{list(IMAGES)}; found {found}. The columns are {list(columns)}: rename one"
    )


def first_of(names: tuple[str, ...], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def check_captions(values: Sequence[Any], where: str) -> list[str]:
    """One line of text for each image; of several captions the first."""
    captions = []
    for row, value in enumerate(values):
        text = value[0] if isinstance(value, list) and value else value
        if not isinstance(text, str):
            raise MetadataError(f"{where}: the caption of image {row} must be a text, found {value!r}")
        captions.append(" ".join(text.split()))
    return captions


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
    _check_rows_fit(tree, images, rows)
    labels = _column(rows, images, LABELS, where)
    captions = _column(rows, images, CAPTIONS, where)
    if labels is None and captions is None:
        columns = sorted({column for row in rows.values() for column in row})
        raise MetadataError(
            f"{where} has neither captions nor labels: its columns are {columns}; looked for captions in "
            f"{list(CAPTIONS)}, for labels in {list(LABELS)}: rename one, or move the file away"
        )
    captions = _text_files(tree, images) if captions is None else check_captions(captions, where)
    numbered = _folder_labels(tree, images) if labels is None else number_labels(labels, where)
    return Annotations(*numbered, captions)


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
    missing = [text for text in texts if text not in present]
    if len(missing) == len(texts):
        return None
    if missing:
        raise MetadataError(
            f"{tree.where}: {len(missing)} of {len(texts)} images have no caption file next to them: "
            f"{first_names(missing)}. Add them, or remove all of them to train without captions"
        )
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
    text = _text(tree, file)
    where = f"{file} of {tree.where}"
    if file.lower().endswith(".csv"):
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = []
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise MetadataError(f"{where}, line {reader.line_num}: needs {len(reader.fieldnames or ())} fields")
                rows.append((reader.line_num, row))
        except csv.Error as error:
            raise MetadataError(f"{where}, line {reader.line_num}: not CSV ({error}); correct it") from error
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise MetadataError(f"{where}, line {number}: not JSON ({error}); correct it") from error
            if not isinstance(row, dict):
                raise MetadataError(f"{where}, line {number}: needs an object with 'file_name', found {line[:60]!r}")
            rows.append((number, row))
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


def _check_rows_fit(tree: FileTree, images: list[str], rows: dict[str, dict[str, Any]]) -> None:
    present = set(tree.images())
    absent = [name for name in rows if name not in present]
    if absent:
        raise MetadataError(
            f"the metadata of {tree.where} names {len(absent)} images that are not there: {first_names(absent)}. "
            f"Remove these "
            f"rows, or put the images back"
        )
    silent = [name for name in images if name not in rows]
    if silent:
        raise MetadataError(
            f"the metadata of {tree.where} has no row for {len(silent)} of {len(images)} images: "
            f"{first_names(silent)}. Add rows for them or move them away"
        )


def _column(rows: dict[str, dict[str, Any]], images: list[str], columns: tuple[str, ...], where: str) -> Any:
    """The first of these columns that the rows have, for these images."""
    column = next((column for column in columns if any(column in rows[image] for image in images)), None)
    if column is None:
        return None
    empty = (None, "") if columns is LABELS else (None,)  # a caption may be empty, a label may not
    without = [image for image in images if rows[image].get(column) in empty]
    if without:
        raise MetadataError(
            f"{where} has no {column!r} for {len(without)} of {len(images)} images: {first_names(without)}. Fill "
            f"them, or remove "
            f"the column"
        )
    values = [rows[image][column] for image in images]
    if columns is LABELS and all(isinstance(value, str) and value.isdecimal() for value in values):
        return [int(value) for value in values]  # CSV knows no numbers
    return values


def _text(tree: FileTree, file: str) -> str:
    try:
        return tree.read(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MetadataError(f"{file} of {tree.where} is not UTF-8 (byte {error.start}): save it again") from error
    except UndecodableError as error:
        raise MetadataError(
            f"{file} of {tree.where} cannot be read ({error}): write it again, or move it away"
        ) from error
