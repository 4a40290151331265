"""Which column of a table holds the images, which the labels and which the captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import MetadataError, UnreadableDataError

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
        f"{list(IMAGES)}; found {found}. The columns are {list(columns)}"
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
