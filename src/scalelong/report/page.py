"""The HTML file: template, style, script and data in one, without any reference to the outside."""

import json
from collections.abc import Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path

from .._version import __version__
from ..errors import NoRunsError
from ..files import write_text
from .collect import collect


def write_report(folders: Sequence[str | PathLike[str]], out: str | PathLike[str]) -> Path:
    """Write the report of these runs, atomically. Returns its path."""
    path = Path(out)
    if path.is_dir():
        raise NoRunsError(f"the report cannot be written to {path}, which is a folder: give a file, such as r.html")
    write_text(path, render(collect(folders)))
    return path


def render(data: dict[str, object]) -> str:
    # Inside a script element only "</" could end it, and "<!--" could begin a comment.
    text = json.dumps({**data, "version": __version__}, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    page = _asset("page.html")
    for mark, content in (("/*STYLE*/", _asset("style.css")), ("/*SCRIPT*/", _script()), ("/*DATA*/", text)):
        page = page.replace(mark, content)
    return page


def _script() -> str:
    return "\n".join(_asset(name) for name in ("chart.js", "glossary.js", "skips.js", "range.js", "app.js"))


def _asset(name: str) -> str:
    return (files("scalelong.report") / "assets" / name).read_text(encoding="utf-8")
