"""How far a measurement is: on a terminal one line that changes, elsewhere a line now and then."""

import sys
import time

EVERY = 15.0
"""Seconds between two lines in a log."""


class Progress:
    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.terminal = sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if self.terminal:
            end = "\n" if done == self.total else ""
            print(f"\r  {self.text(done, now)}\033[K", end=end, file=sys.stderr, flush=True)
        elif now - self.shown >= EVERY:
            self.shown = now
            print(f"  {self.text(done, now)}", file=sys.stderr, flush=True)

    def text(self, done: int, now: float) -> str:
        return f"{self.what}: {done} of {self.total}, {now - self.began:.0f} s"
