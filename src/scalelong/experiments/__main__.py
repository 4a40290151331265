"""The process that does a job of a sweep, on whatever machine: `python -m scalelong.experiments OUT/jobs/NAME.json`.

Exit codes: 0 when it is finished (a run that diverges is), 130 after SIGTERM or Ctrl-C with all that was done saved,
1 for an error, which stands in the log.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from ..console import show_logs
from ..errors import ScaleLongError
from ..runs import COMMAND_VARIABLE
from .engines import INTERRUPTED
from .plan import run_one
from .sweeps import read_job


def main(arguments: Sequence[str]) -> int:
    if "--tied" in arguments:  # to the process that started this one
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, _exit)  # training has a handler of its own, which saves first
    try:
        with show_logs():
            run, command = read_job(Path(os.path.abspath(arguments[0])))
            # The README of the run folder says how to continue it: by the command of the sweep.
            os.environ[COMMAND_VARIABLE] = command
            return 0 if run_one(run) else INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ScaleLongError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # one that is open at exit may abort the process


def _exit(*_: object) -> None:
    raise SystemExit(INTERRUPTED)


def _end_with_parent() -> None:
    """Stop as by SIGTERM when the process at the other end of the standard input is gone."""
    # The descriptor itself: a thread that waits in sys.stdin would hold its lock when Python ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
