"""Contenders for the tests of the harness: imported by worker processes."""

import os
import time

from scalelong.errors import InvalidInputError


class Sleeper:
    def __init__(self, seconds=0.0, megabytes=0):
        self.seconds, self.megabytes, self.kept = seconds, megabytes, b""

    def __call__(self):
        print("a contender that prints")
        time.sleep(self.seconds)
        self.kept = b"x" * (self.megabytes * 1_000_000)

    def answer(self):
        return {"threads": os.environ["OMP_NUM_THREADS"], "wish": os.environ.get("WISH")}


def refusing():
    raise InvalidInputError("this contender does not want to")


def dying():
    print("last words", flush=True)
    os._exit(3)


def failing_step():
    def step():
        raise ZeroDivisionError("in the step")

    return step
