"""SIGTERM and Ctrl-C as a wish that the loop can ask for between two steps."""

import signal
import threading
import time
from types import FrameType
from typing import Any

IMPATIENT_AFTER = 3.0
"""Seconds after which a second Ctrl-C stops at once. Launchers repeat the first one."""


class Interrupt:
    """Within a `with` block signals only set `requested`, so that the loop can save before it ends."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > IMPATIENT_AFTER:
            raise KeyboardInterrupt
