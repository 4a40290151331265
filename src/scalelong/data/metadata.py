"""Labels and captions that stand beside image files.

Labels are the names of sub-folders. Captions and labels come from `metadata.jsonl` or `metadata.csv` as Hugging Face's
imagefolder has them (a column `file_name`, relative to the metadata file), captions also from `cat.txt` beside
`cat.png`.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import PurePosixPath
from typing import Any

from ..errors import DuplicateNameError, MetadataError
from .broken import listed
from .columns import CAPTIONS, LABELS, check_captions
from .dataset import Annotations
from .labels import Numbered, number_labels
from .splits import inside
from .tree import FileTree

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
            f"{list(CAPTIONS)}, for labels in {list(LABELS)}"
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
    return number_labels(
        [paths[image][0] for image in images], "sub-folders", sorted({path[0] for path in paths.values()})
    )


def _text_files(tree: FileTree, images: list[str]) -> list[str] | None:
    present = set(tree.names)
    texts = [str(PurePosixPath(image).with_suffix(".txt")) for image in images]
    missing = [text for text in texts if text not in present]
    if len(missing) == len(texts):
        return None
    if missing:
        raise MetadataError(
            f"{tree.where}: {len(missing)} of {len(texts)} images have no caption file beside them: {listed(missing)}. "
            "Add them, or remove all of them to train without captions"
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
            raise MetadataError(f"{where}, line {reader.line_num}: {error}") from error
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise MetadataError(f"{where}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise MetadataError(f"{where}, line {number}: needs an object with 'file_name', found {line[:60]!r}")
            rows.append((number, row))
    return rows


def _image_name(row: dict[str, Any], where: str, folder: str) -> str:
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise MetadataError(f"{where}: no 'file_name'; its columns are {sorted(row)}")
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise MetadataError(f"{where}: file_name {name!r} must be relative and stay below the metadata file")
    return (PurePosixPath(folder) / path).as_posix()


def _check_rows_fit(tree: FileTree, images: list[str], rows: dict[str, dict[str, Any]]) -> None:
    present = set(tree.images())
    absent = [name for name in rows if name not in present]
    if absent:
        raise MetadataError(
            f"the metadata of {tree.where} names {len(absent)} images that are not there: {listed(absent)}"
        )
    silent = [name for name in images if name not in rows]
    if silent:
        raise MetadataError(
            f"the metadata of {tree.where} has no row for {len(silent)} of {len(images)} images: {listed(silent)}. "
            "Add rows for them or move them away"
        )


def _column(rows: dict[str, dict[str, Any]], images: list[str], columns: tuple[str, ...], where: str) -> Any:
    """The first of these columns that the rows have, for these images."""
    column = next((column for column in columns if any(column in rows[image] for image in images)), None)
    if column is None:
        return None
    empty = (None, "") if columns is LABELS else (None,)  # a caption may be empty, a label may not
    without = [image for image in images if rows[image].get(column) in empty]
    if without:
        raise MetadataError(f"{where} has no {column!r} for {len(without)} of {len(images)} images: {listed(without)}")
    values = [rows[image][column] for image in images]
    if columns is LABELS and all(isinstance(value, str) and value.isdecimal() for value in values):
        return [int(value) for value in values]  # CSV knows no numbers
    return values


def _text(tree: FileTree, file: str) -> str:
    try:
        return tree.read(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MetadataError(f"{file} of {tree.where} is not UTF-8: {error}") from error
