"""The process that carries out units of a sweep, one after the other, on whatever machine.

    python -m scalelong.experiments.worker runs/sweep/jobs/none-seed0.json ...

Exit codes: 0 when all are finished (a run that diverges is), 130 after SIGTERM or Ctrl-C with all that was done saved,
1 for an error, which the state of the unit and the log tell. A unit that is finished already costs nothing, and one
that another process works on is waited for.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import RunLockedError, ScaleLongError
from ..files import write_text
from ..runs.config import from_dict
from .engines import ENGINE_VARIABLE, INTERRUPTED
from .rates import task_of
from .runs import ORPHAN_SECONDS, POLL_SECONDS, PlannedRun, run_one, wait_until_free
from .sweeps import of_threads
from .units import RATE, RUN, Ending, Unit, unit_at


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scalelong.experiments.worker", description=__doc__)
    parser.add_argument("jobs", nargs="+", type=Path, help="job files of a sweep: FOLDER/jobs/NAME.json")
    parser.add_argument("--tied", action="store_true", help="save and end when the standard input closes")
    options = parser.parse_args(arguments)
    if options.tied:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, _exit)  # training has a handler of its own, which saves first
    tasks: dict[str, Any] = {}
    try:
        for job in options.jobs:
            if not carry_out(unit_at(job), tasks):
                return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except ScaleLongError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        _leave_process_group()
    return 0


def carry_out(unit: Unit, tasks: dict[str, Any]) -> bool:
    """False if it was interrupted."""
    given = unit.read()
    engine = os.environ.get(ENGINE_VARIABLE, "shell")
    if _is_done(unit, given):
        print(f"{unit.name} is finished already", flush=True)
        return True
    # Of the processes of one run the first one speaks for all.
    first = os.environ.get("RANK", "0") == "0"
    if first:
        _wait_for_others(unit)
    # The run folder says how to go on: by the command that started all runs, not by that of this process.
    sys.argv[:] = given["command"]
    with ExitStack() as stack:
        ending = stack.enter_context(unit.at_work(engine) if first else nullcontext(Ending()))
        finished = _train(unit, given) if given["kind"] == RUN else _rate(unit, given, tasks)
        if not finished:
            ending.state = "interrupted"
    return finished


def _is_done(unit: Unit, given: dict[str, Any]) -> bool:
    return _planned(unit, given).finished if given["kind"] == RUN else unit.result.exists()


def _planned(unit: Unit, given: dict[str, Any]) -> PlannedRun:
    config = from_dict(given["config"])
    folder = unit.run_folder
    assert folder is not None
    return PlannedRun(given["method"], config.seed, folder, config, given["changes"])


def _train(unit: Unit, given: dict[str, Any]) -> bool:
    run = _planned(unit, given)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        wait_until_free(run.folder)
    return run_one(run, given["every"])


def _rate(unit: Unit, given: dict[str, Any], tasks: dict[str, Any]) -> bool:
    """One rate of a range. What the units of one process share is made once: the data, the networks that are tried."""
    assert given["kind"] == RATE
    key = json.dumps(given["range"], sort_keys=True)
    # A run of a range is short and has no checkpoints: what stops it stops it at once.
    with of_threads(1):
        if key not in tasks:
            tasks[key] = task_of(given["range"])
        run = tasks[key].run((given["method"], given["rate"], given["seed"]))
    write_text(unit.result, json.dumps(asdict(run), ensure_ascii=False))
    print(f"{unit.name}: {run.outcome}", flush=True)
    return True


def _exit(*_: object) -> None:
    raise SystemExit(INTERRUPTED)


def _wait_for_others(unit: Unit) -> None:
    """A job of an earlier command may have come out of a queue at the same time."""
    until = time.monotonic() + ORPHAN_SECONDS
    while (state := unit.state).alive and state.process != os.getpid():
        if time.monotonic() > until:
            raise RunLockedError(f"{unit.name} is at work in process {state.process} on {state.host}; wait for it")
        time.sleep(POLL_SECONDS)


def _end_with_parent() -> None:
    """Stop as by SIGTERM when whoever holds the other end of the standard input is gone."""
    # The descriptor itself: a thread that waits in sys.stdin would hold its lock when Python ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _leave_process_group() -> None:
    """One that is still open at exit may abort the process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
