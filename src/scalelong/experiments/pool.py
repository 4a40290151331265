"""Many runs on one machine: as many at a time as there are cores, each with its share of the threads."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ScaleLongError
from ..runs.config import to_dict
from ..runs.folder import read_metrics
from ..training.loop import Interrupt
from .one_run import INTERRUPTED
from .runs import PlannedRun, carry_out

POLL_SECONDS = 0.5
LINE_SECONDS = 15.0
"""Seconds between lines of progress where the output is not a terminal."""


class RunFailedError(ScaleLongError, RuntimeError):
    """A run of a comparison ended with an error; its log says which."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(runs: int) -> int:
    """Small networks do not use several cores well, so each core gets a run; an accelerator is not shared."""
    return 1 if torch.cuda.is_available() else max(1, min(cores(), runs))


def run_all(runs: Sequence[PlannedRun], every: int, jobs: int | None = None, logs: Path | None = None) -> bool:
    """Carry out the runs that are not finished. False if they were interrupted; all that was done is kept."""
    waiting = [run for run in runs if not run.finished]
    jobs = default_jobs(len(waiting)) if jobs is None else jobs
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already", flush=True)
    if jobs > 1:
        return Pool(runs, every, jobs, logs or runs[0].folder.parent / "logs").work(waiting)
    for number, run in enumerate(waiting, start=1):
        print(f"[{number}/{len(waiting)}] {run.name}", flush=True)
        if not carry_out(run, every):
            return False
    return True


class Pool:
    def __init__(self, runs: Sequence[PlannedRun], every: int, jobs: int, logs: Path) -> None:
        self.runs, self.every, self.jobs, self.logs = runs, every, jobs, logs
        self.active: dict[subprocess.Popen[str], PlannedRun] = {}
        self.live = sys.stdout.isatty()
        self.started = self.printed = time.monotonic()

    def work(self, waiting: list[PlannedRun]) -> bool:
        queue, told = list(waiting), False
        self.logs.mkdir(parents=True, exist_ok=True)
        with Interrupt() as interrupt:
            try:
                while self.active or (queue and not told):
                    while queue and not told and len(self.active) < self.jobs:
                        self._start(queue.pop(0))
                    if interrupt.requested and not told:
                        told = True
                        self._tell_to_stop()
                    told |= self._collect()
                    self._report()
                    time.sleep(POLL_SECONDS)
            finally:
                self._tell_to_stop()
                for process in self.active:
                    process.wait()
        self._report(final=True)
        return not told

    def _start(self, run: PlannedRun) -> None:
        threads = str(max(1, cores() // self.jobs))
        # The process keeps the log open after it is closed here.
        with open(self.log(run), "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "scalelong.experiments.one_run"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
        self.active[process] = run
        given: dict[str, Any] = {"folder": str(run.folder), "every": self.every, "config": to_dict(run.config)}
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(given))

    def log(self, run: PlannedRun) -> Path:
        return self.logs / f"{run.name}.txt"

    def _collect(self) -> bool:
        """Take note of processes that ended; True if one was interrupted."""
        interrupted = False
        for process in [process for process in self.active if process.poll() is not None]:
            run = self.active.pop(process)
            if process.returncode == INTERRUPTED:
                interrupted = True
            elif process.returncode != 0:
                tail = "\n".join(self.log(run).read_text(encoding="utf-8").splitlines()[-5:])
                raise RunFailedError(f"{run.name} ended with code {process.returncode}, see {self.log(run)}:\n{tail}")
        return interrupted

    def _tell_to_stop(self) -> None:
        """Each run saves what it has and ends."""
        for process in self.active:
            process.terminate()

    def _report(self, final: bool = False) -> None:
        now = time.monotonic()
        if not final and not self.live and now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        done = sum(run.finished for run in self.runs)
        parts = [f"{done}/{len(self.runs)} runs", *(_state(run) for run in self.active.values())]
        line = f"{now - self.started:4.0f} s  " + "   ".join(parts)
        print(f"\r\x1b[K{line}" if self.live else line, end="\n" if final or not self.live else "", flush=True)


def _state(run: PlannedRun) -> str:
    # Only lines of the trainer itself have a loss; those of hooks and held-out losses come in between.
    lines = [line for line in read_metrics(run.folder) if "loss" in line]
    if not lines:
        return f"{run.name} starting"
    return f"{run.name} {lines[-1]['step']}/{run.config.steps} loss {lines[-1]['loss']:.3f}"
