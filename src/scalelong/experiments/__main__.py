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
from ..errors import CannotReadError, RunFolderError, ScaleLongError
from ..files import read_json
from ..runs import COMMAND_VARIABLE
from .engines import INTERRUPTED
from .plan import run_one
from .rates import run_part
from .sweeps import planned_run


def main(arguments: Sequence[str]) -> int:
    if "--tied" in arguments:  # to the process that started this one
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, _exit)  # training has a handler of its own, which saves first
    try:
        with show_logs():
            return 0 if do(Path(os.path.abspath(arguments[0]))) else INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ScaleLongError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # one that is open at exit may abort the process


def do(file: Path) -> bool:
    """Do one job. False if it was interrupted."""
    try:
        job = read_json(file)
        is_run, command = job["kind"] == "run", job["command"]
    except (CannotReadError, KeyError, TypeError) as error:
        raise RunFolderError(f"{file} is not a job of a sweep: give the command of the sweep again") from error
    # The README of the run folder says how to continue it: by the command of the sweep, not by this process.
    os.environ[COMMAND_VARIABLE] = command
    return run_one(planned_run(file)) if is_run else run_part(file, job)


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
