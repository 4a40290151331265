"""Output for people: tables, messages, progress, durations, sizes.

A table is rows of plain values: `text_table` writes it as plain text, `html_table` for notebooks. `show_logs` shows
what the library logs. `Progress` is a bar in a terminal; in a pipe, without rich or with NO_COLOR a line now and then.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, TextIO

Row = Mapping[str, Any]


# Tables


def text_table(rows: Sequence[Row], left: bool | Collection[str] = False, rule: bool = True) -> str:
    """Columns in the order of the first row; floats to four significant digits.

    Columns are aligned to the right, or to the left: all of them (`left=True`), or those that `left` names.
    """
    if not rows:
        return "(nothing)"
    columns = list(rows[0])
    cells = [columns, *([cell_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[position]) for line in cells) for position in range(len(columns))]
    aligned = [str.ljust if _is_left(column, left) else str.rjust for column in columns]
    lines = [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], *(["-" * len(lines[0])] if rule else []), *lines[1:]])


def show_table(rows: Sequence[Row], title: str = "", left: bool | Collection[str] = False, rule: bool = True) -> None:
    """Print a table on the standard output."""
    print(f"{title}\n" * bool(title) + text_table(rows, left, rule), flush=True)


def html_table(rows: Sequence[Row], title: str = "") -> str:
    """The same table for notebooks (`_repr_html_`). All text is escaped."""
    if not rows:
        return html_lines([title, "(nothing)"])
    head = "".join(f"<th style='text-align:left'>{escape(str(column))}</th>" for column in rows[0])
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{escape(cell_text(row.get(c, '')))}</td>" for c in rows[0])
        + "</tr>"
        for row in rows
    )
    caption = f"<p><b>{escape(title)}</b></p>" if title else ""
    return f"{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(lines: Sequence[str]) -> str:
    """Lines of text for notebooks, escaped."""
    return f"<p>{'<br>'.join(escape(line) for line in lines if line)}</p>"


def listed(names: Sequence[str], most: int | None = None) -> str:
    """Names in a sentence: "a, b and c"; of more than `most` the rest is counted: "a, b, c and 2 others"."""
    rest = 0 if most is None else len(names) - most
    shown = [*names[:most], f"{rest} other{'s' if rest > 1 else ''}"] if rest > 0 else list(names)
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def cell_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_left(column: str, left: bool | Collection[str]) -> bool:
    return left if isinstance(left, bool) else column in left


# Where the output goes


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads the stream now, at a terminal that can move its cursor. A closed one is None (`>&-`)."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _rich(stream: TextIO | None) -> Any:
    """A console of rich, or None where the output is to be plain."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)


# Messages. The library logs; commands, `train` and the workers of a sweep show what it logs.

_QUIET: list[bool] = []
"""The `quiet` of each `show_logs` that is open."""


@contextmanager
def show_logs(quiet: bool = False) -> Iterator[None]:
    """Show what the library logs inside, on the standard error: the standard output is for results.

    Of several processes the first one shows all; the others, and a quiet command, show warnings alone, and no progress.
    """
    logger = logging.getLogger("scalelong")
    handler, before = _LogLines(), logger.level
    outermost = not _QUIET
    _QUIET.append(quiet)
    if outermost:
        logger.addHandler(handler)
    logger.setLevel(logging.WARNING if any(_QUIET) or not _is_first_process() else logging.INFO)
    try:
        yield
    finally:
        _QUIET.pop()
        logger.removeHandler(handler)
        logger.setLevel(before)


class _LogLines(logging.Handler):
    """Writes messages as plain lines, above a bar if there is one.

    The stream is looked up for every message, so that a redirected one is respected. The same message is written once:
    many runs of one command, in processes that are forked, log the same of one network.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if sys.stderr is None or text in self.written:  # None: closed by the shell (`2>&-`)
            return
        self.written.add(text)
        if _BARS:
            _BARS[-1].console.print(text, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


# Progress

PATIENCE = 1.0
"""Seconds before a bar is shown: what is over sooner needs none."""
EVERY = 15.0
"""Seconds between two lines in a pipe."""
_BARS: list[Any] = []
"""The bars that are shown now."""


class Progress:
    """How far some work is: `progress(done)` or `progress(done, total)`.

    It goes to the standard error: a bar in a terminal, a line every 15 seconds elsewhere. Nothing runs in a thread, so
    that data workers can be forked meanwhile.
    """

    def __init__(
        self, what: str = "", total: int | None = None, *, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self.what, self.total = what, total
        self.enabled = enabled and not any(_QUIET) and _is_first_process()
        self.stream = stream or sys.stderr
        self.live = self.enabled and _rich(self.stream) is not None
        self.began = self.shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        self.total = total if total is not None else self.total
        now = time.monotonic()
        if now - (self.began if self.live else self.shown) >= (PATIENCE if self.live else EVERY):
            self.show(done, note)
        if done == self.total:
            self.close()

    def show(self, done: int, note: str = "") -> None:
        """Show it now."""
        self.shown = time.monotonic()
        if self.live:
            self._bar = self._bar or self._new_bar()
            self._bar.update(self._task, completed=done, total=self.total, note=note)
            self._bar.refresh()
        elif self.enabled:
            print(self.text(done, note), file=self.stream, flush=True)

    def text(self, done: int, note: str = "") -> str:
        of = f" of {self.total}" if self.total is not None else ""
        seconds = f"{time.monotonic() - self.began:.0f} s"
        return "  ".join(part for part in (f"{self.what}: {done}{of}", note, seconds) if part)

    def close(self) -> None:
        """End the bar. It may begin again with the next call."""
        if self._bar is not None:
            self._bar.stop()
            _BARS.remove(self._bar)
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_bar(self) -> Any:
        import rich.progress as columns

        bar = columns.Progress(
            columns.TextColumn("{task.description}", markup=False),
            columns.BarColumn(),
            columns.MofNCompleteColumn(),
            columns.TextColumn("{task.fields[note]}", markup=False),
            columns.TimeElapsedColumn(),
            console=_rich(self.stream),
            auto_refresh=False,
        )
        self._task = bar.add_task(self.what, total=self.total, note="")
        bar.start()
        _BARS.append(bar)
        return bar


# Numbers


def duration(seconds: float) -> str:
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600:d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} days {text}" if days else text


def counted(number: int, noun: str) -> str:
    """1 image, 2 images."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def byte_size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
