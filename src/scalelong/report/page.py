"""The HTML file: template, style, script and data in one, without any reference to the outside."""

import json
import logging
import time
from collections.abc import Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path

from .._version import __version__
from ..errors import RunFolderError, ScaleLongError
from ..files import below, write_text
from .collect import collect

logger = logging.getLogger(__name__)

WATCH_SECONDS = 10.0
"""Between two versions of a page that is watched."""


def write_report(
    folders: Sequence[str | PathLike[str]], out: str | PathLike[str] | None = None, *, reload: float | None = None
) -> Path:
    """Write the report of these runs, atomically; without `out` as report.html in the first folder. Its path.

    `reload`: seconds after which the page loads itself again.
    """
    page = render({**collect(folders), "reload": reload})
    if out is None:  # in a folder that may be a stranger's: a link of this name is replaced, not followed
        below(folders[0]).write_text("report.html", page)
        return Path(folders[0]) / "report.html"
    if Path(out).is_dir():
        raise RunFolderError(f"the report cannot be written to {out}, which is a folder: give a file, such as r.html")
    write_text(out, page)
    return Path(out)


def watch_report(folders: Sequence[str | PathLike[str]], out: str | PathLike[str] | None = None) -> None:
    """Write the report again and again while runs go on, until Ctrl-C. A browser that has it open shows it anew."""
    path = write_report(folders, out, reload=WATCH_SECONDS)
    print(f"live report: {path.resolve()}; open it in a browser (Ctrl-C ends it)", flush=True)
    try:
        while True:
            time.sleep(WATCH_SECONDS)
            try:
                write_report(folders, out, reload=WATCH_SECONDS)
            except ScaleLongError as error:  # a file that is written at this moment
                logger.debug("%s", error)
    except KeyboardInterrupt:
        pass
    finally:
        write_report(folders, out)


def render(data: dict[str, object]) -> str:
    # Inside a script element only "</" could end it, and "<!--" could begin a comment.
    text = json.dumps({**data, "version": __version__}, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    script = "\n".join(_asset(name) for name in ("chart.js", "glossary.js", "skips.js", "range.js", "app.js"))
    page = _asset("page.html")
    for mark, content in (("/*STYLE*/", _asset("style.css")), ("/*SCRIPT*/", script), ("/*DATA*/", text)):
        page = page.replace(mark, content)
    return page


def _asset(name: str) -> str:
    return (files("scalelong.report") / "assets" / name).read_text(encoding="utf-8")
