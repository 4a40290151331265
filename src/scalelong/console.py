"""Rows of numbers: as a pandas data frame for those who compute on, as plain text for those who read."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .optional import needs

if TYPE_CHECKING:
    from pandas import DataFrame


def data_frame(rows: Sequence[Mapping[str, Any]]) -> "DataFrame":
    pandas = needs("pandas", "report", "a data frame of results")
    return pandas.DataFrame(list(rows))


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns in the order of the first row; numbers to four significant digits."""
    if not rows:
        return "(nothing)"
    columns = list(rows[0])
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[position]) for line in cells) for position in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# What a person sees while a run goes on.


class Progress:
    """One line, rewritten in a terminal; a line per record elsewhere."""

    def __init__(self, steps: int, enabled: bool) -> None:
        self.steps, self.enabled = steps, enabled
        self.live = enabled and sys.stdout.isatty()

    def say(self, text: str) -> None:
        if self.enabled:
            print(f"\r\x1b[K{text}" if self.live else text, flush=True)

    def record(self, metrics: dict[str, float]) -> None:
        if self.enabled:
            print(f"\r\x1b[K{self._line(metrics)}", end="", flush=True) if self.live else self.say(self._line(metrics))

    def close(self) -> None:
        if self.live:
            print(flush=True)

    def _line(self, metrics: dict[str, float]) -> str:
        speed = metrics["images_per_second"]
        left = (self.steps - metrics["step"]) * metrics["seconds_per_step"]
        parts = [
            f"step {metrics['step']}/{self.steps}",
            f"loss {metrics['loss']:.4f}",
            f"gradient {metrics['gradient_norm']:.3g}",
            f"{speed:.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s",
            f"{duration(left)} left",
        ]
        return "  ".join(parts)


class StopWatch:
    """Seconds of training, without what is done in between (saving, sampling)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.start(0)

    def start(self, step: int) -> None:
        self._since, self._step = self.clock(), step

    def lap(self, step: int) -> tuple[float, int]:
        """Seconds and steps since the start or the last lap."""
        seconds, steps = self.clock() - self._since, step - self._step
        self.start(step)
        return seconds, steps

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = self.clock()
        try:
            yield
        finally:
            self._since += self.clock() - before


def duration(seconds: float) -> str:
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600:d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} days {text}" if days else text
