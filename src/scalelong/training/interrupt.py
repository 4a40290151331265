"""Signals wait for the end of a step, so that nothing that was computed is lost."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

IMPATIENT_AFTER = 1.0
"""Seconds after which a second Ctrl-C stops at once. Launchers repeat the first one."""
STOPPING = (
    "stopping after this step, and saving; Ctrl-C once more stops now, without what came after the last checkpoint"
)


class Interrupt:
    """Within a `with` block SIGTERM and Ctrl-C only set `requested`, so that the loop can save before it ends.

    So do a closed terminal (SIGHUP), the signals that schedulers of clusters send before the end (SIGUSR1, SIGUSR2),
    and a limit of processor time (SIGXCPU).
    """

    SIGNALS: ClassVar[list[signal.Signals]] = [
        getattr(signal, name)
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
        if hasattr(signal, name)  # Windows has the first two
    ]

    latest: ClassVar[str | None] = None
    """The signal that ended the latest block early; the command line makes its exit code of it."""

    def __init__(self) -> None:
        self.requested: str | None = None
        Interrupt.latest = None
        self._since = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def between(self, progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Progress of work before the first step, when there is nothing to save: a signal ends it."""

        def check(done: int, total: int) -> None:
            progress(done, total)
            if self.requested == "SIGINT":
                raise KeyboardInterrupt
            if self.requested is not None:
                raise SystemExit(128 + signal.Signals[self.requested])

        return check

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._since = signal.Signals(number).name, time.monotonic()
            Interrupt.latest = self.requested
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"\n{self.requested}: {STOPPING}\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._since > IMPATIENT_AFTER:
            raise KeyboardInterrupt
