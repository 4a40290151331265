"""How the modules end that are run with `python -m`."""

import sys
from collections.abc import Callable

from ..errors import ScaleLongError


def exit_code(work: Callable[[], int | None]) -> int:
    """What the work returns, or 0. An error of ours is one line instead of a traceback, and 1."""
    try:
        return work() or 0
    except ScaleLongError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
