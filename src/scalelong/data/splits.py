"""Which part of a data set is meant: "train", "test" or "validation", read from the names of folders and files."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from ..errors import UnknownSplitError

WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "t10k": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
}


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
