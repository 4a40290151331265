"""A folder that is complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from ..errors import ExportError


def copy_code(name: str, folder: Path) -> None:
    """One of the files in `code`, without the remarks for our own tools."""
    text = files("scalelong.export").joinpath("code", name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(("# ruff:", "# pyright:"))]
    (folder / name).write_text("".join(lines), encoding="utf-8")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Write into a temporary neighbour, which takes the name at the end."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(f"{target} exists already and is not an empty folder; choose another one with --out")
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        if target.exists():
            target.rmdir()
        os.replace(part, target)
    except OSError as error:
        raise ExportError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
