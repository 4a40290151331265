"""What people see: tables, progress, durations, sizes.

A table is rows of plain values. `text_table` writes it as plain text, the same on every machine: for `__str__`, files
and pipes. `show_table` prints it: with rich where a terminal reads, as that plain text elsewhere. `html_table` is for
notebooks. `Progress` is a bar in a terminal, and a line now and then in a pipe. Without rich, or with NO_COLOR set, all
is plain.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, TextIO

from .optional import needs

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, Any]


# Tables


def data_frame(rows: Sequence[Row]) -> DataFrame:
    return needs("pandas", "report", "a data frame of results").DataFrame(list(rows))


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
    """Print a table on the standard output: drawn by rich in a terminal, as plain text elsewhere."""
    rich = _rich(sys.stdout)
    if rich is None or not rows:
        print(f"{title}\n" * bool(title) + text_table(rows, left, rule), flush=True)
        return
    table = needs("rich.table", "train", "tables").Table(box=needs("rich.box", "train", "tables").SIMPLE_HEAD)
    text = needs("rich.text", "train", "tables").Text
    for column in rows[0]:
        table.add_column(text(column), justify="left" if _is_left(column, left) else "right", overflow="fold")
    for row in rows:
        # As Text, since [1, 2] in a cell is an interval and no markup.
        table.add_row(*(text(cell_text(row.get(column, ""))) for column in rows[0]))
    if title:
        rich.print(text(title, style="bold"))
    rich.print(table)


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


class _LogLines(logging.Handler):
    """Writes messages as plain lines to the standard error: the standard output is for results.

    The stream is looked up for every message, so that a redirected one is respected. The same message is written once:
    many runs of one command, in processes that are forked, say the same of one network.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if sys.stderr is not None and text not in self.said:  # None: closed by the shell (`2>&-`)
            self.said.add(text)
            print(text, file=sys.stderr, flush=True)


@contextmanager
def show_logs(level: int | str = "INFO") -> Iterator[None]:
    """Show what the library logs inside, as the command line does. Inside another `show_logs` it changes nothing."""
    logger = logging.getLogger("scalelong")
    if any(isinstance(handler, _LogLines) for handler in logger.handlers):
        yield
        return
    handler, before = _LogLines(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def silent(text: str) -> None:
    """Says nothing: for `say` arguments."""


# Progress

PATIENCE = 1.0
"""Seconds before a bar is shown: what is over sooner needs none."""
EVERY = 15.0
"""Seconds between two lines in a pipe."""


_HUSHED: list[bool] = []


@contextmanager
def hushed(quiet: bool = True) -> Iterator[None]:
    """No progress is shown, whoever makes it."""
    if not quiet:
        yield
        return
    _HUSHED.append(True)
    try:
        yield
    finally:
        _HUSHED.pop()


class Progress:
    """How far some work is: `progress(done)` or `progress(done, total)`.

    It goes to the standard error. In a terminal it is a bar that changes; elsewhere a line every 15 seconds. Of several
    processes, the first one speaks. Nothing runs in a thread of its own, so that data workers can be forked meanwhile.
    """

    def __init__(
        self, what: str = "", total: int | None = None, *, enabled: bool | None = None, stream: TextIO | None = None
    ) -> None:
        self.what, self.total = what, total
        self.enabled = not _HUSHED and os.environ.get("RANK", "0") == "0" if enabled is None else enabled
        self.stream = stream or sys.stderr
        self.live = self.enabled and is_terminal(self.stream)
        self.began = self.shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._line_open = False

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        self.total = total if total is not None else self.total
        now = time.monotonic()
        finished = done == self.total
        if self.live and now - self.began >= PATIENCE:
            self._draw(done, note)
        elif self.enabled and not self.live and now - self.shown >= EVERY:
            self.shown = now
            self._print(self.text(done, note))
        if finished:
            self.close()

    def text(self, done: int, note: str = "") -> str:
        of = f" of {self.total}" if self.total is not None else ""
        seconds = f"{time.monotonic() - self.began:.0f} s"
        return "  ".join(part for part in (f"{self.what}: {done}{of}", note, seconds) if part)

    def say(self, text: str) -> None:
        """A line that stays, above the bar if there is one."""
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.console.print(needs("rich.text", "train", "progress").Text(text))
        else:
            self._print(f"\r\x1b[K{text}" if self._line_open else text)
            self._line_open = False

    def close(self) -> None:
        """End the bar. It may begin again with the next call."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif self._line_open:
            self._print("")
        self._line_open = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self.stream, flush=True)

    def _draw(self, done: int, note: str) -> None:
        if self._bar is None and not self._line_open:
            self._bar = self._new_bar()
        if self._bar is None:
            self._print(f"\r\x1b[K{self.text(done, note)}", end="")
            self._line_open = True
            return
        self._bar.update(self._task, completed=done, total=self.total, note=note)
        self._bar.refresh()

    def _new_bar(self) -> Any:
        console = _rich(self.stream)
        if console is None:
            return None
        import rich.progress as columns

        bar = columns.Progress(
            columns.TextColumn("{task.description}", markup=False),
            columns.BarColumn(),
            columns.MofNCompleteColumn(),
            columns.TextColumn("{task.fields[note]}", markup=False),
            columns.TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = bar.add_task(self.what, total=self.total, note="")
        bar.start()
        return bar


# Numbers


def duration(seconds: float) -> str:
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600:d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} days {text}" if days else text


def byte_size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
