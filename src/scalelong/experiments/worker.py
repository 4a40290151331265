"""The process that does the jobs of a sweep, one after the other, on whatever machine.

    python -m scalelong.experiments.worker runs/sweep/jobs/none-seed0.json ...

Exit codes: 0 when all are finished (a run that diverges is), 130 after SIGTERM or Ctrl-C with all that was done saved,
1 for an error, which stands in the log.
"""

import argparse
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
from .engines import INTERRUPTED
from .rates import run_part
from .sweeps import planned_run, train_planned


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scalelong.experiments.worker", description=__doc__)
    parser.add_argument("jobs", nargs="+", type=Path, help="job files of a sweep: FOLDER/jobs/NAME.json")
    parser.add_argument("--tied", action="store_true", help="save and end when the standard input closes")
    options = parser.parse_args(arguments)
    if options.tied:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, _exit)  # training has a handler of its own, which saves first
    try:
        with show_logs():
            return 0 if all(do(Path(os.path.abspath(job))) for job in options.jobs) else INTERRUPTED
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
        kind = job["kind"]
    except (CannotReadError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{file} is not a job of a sweep ({error}): give the command of the sweep again"
        ) from error
    if kind == "range":
        return run_part(file, job)
    # The README of the run folder says how to continue it: by the command of the sweep, not by this process.
    sys.argv[:] = job["command"]
    return train_planned(planned_run(file, job), job["every"])


def _exit(*_: object) -> None:
    raise SystemExit(INTERRUPTED)


def _end_with_parent() -> None:
    """Stop as by SIGTERM when the process at the other end of the standard input is gone."""
    # The descriptor itself: a thread that waits in sys.stdin would hold its lock when Python ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
