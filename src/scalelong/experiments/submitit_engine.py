"""SLURM through submitit, or submitit's local executor, which does the same without a cluster.

Before a time limit, or when a job is preempted, submitit calls `Submitted.checkpoint`: the worker saves, the job is
queued again, and the run goes on after its last checkpoint.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfigError
from ..files import in_words, read_json, write_text
from ..optional import needs
from .engines import Engine, Job, cores, start_worker

DEFAULT_MINUTES = 24 * 60
"""Time limit of a SLURM job. A run that takes longer goes on in its next job."""
TIMEOUTS = 1000
"""A job may be queued again so often: each time the run goes on, so there is no reason to give up."""
GRACE_SECONDS = 60.0
"""Runs that are to stop may take so long to save."""
SUBMITTED = "submitit.json"
"""The jobs of a sweep by name, with the ids that SLURM knows them by."""


class Submitted:
    """The function that submitit calls in its job: it starts a worker and waits for it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        self._process = start_worker(self.job)
        try:
            # Not `wait`: it holds a lock, and `checkpoint` is called in a signal handler, in the middle of this.
            while (code := self._process.poll()) is None:
                time.sleep(0.2)
            return code
        except BaseException:
            self._end()
            raise

    def checkpoint(self) -> Any:
        self._end()
        return needs("submitit", "slurm", "a job of submitit").helpers.DelayedSubmission(Submitted(self.job))

    def _end(self) -> None:
        """Let the worker save and end, by system calls, which take no locks of Python's."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


class SubmititEngine(Engine):
    """Jobs of submitit. Those of SLURM outlive this command: given again, it follows the ones still in the queue."""

    def __init__(
        self,
        cluster: str = "local",
        *,
        partition: str | None = None,
        time: str | None = None,
        options: Mapping[str, Any] | None = None,
        detach: bool = False,
        **share: Any,
    ) -> None:
        super().__init__(**share)
        self.name = "slurm" if cluster == "slurm" else "submitit"
        self.partition, self.options, self.detach = partition, dict(options or {}), detach
        self.minutes = DEFAULT_MINUTES if time is None else minutes_of(time)
        self._queue: list[Job] = []
        self._active: dict[str, Any] = {}
        self._folder = Path()
        self._executor: Any = None

    def check(self) -> None:
        needs("submitit", "slurm", f"the engine {self.name}")
        if self.name == "slurm" and shutil.which("sbatch") is None:
            raise EngineError(
                "the engine slurm needs SLURM's `sbatch`, which is not in PATH: give the command on a login node of "
                "the cluster; the engine submitit tries the same without a cluster"
            )

    def submit(self, jobs: Sequence[Job], folder: Path) -> None:
        submitit = needs("submitit", "slurm", f"the engine {self.name}")
        self._folder = folder / "jobs"
        if self.name != "slurm":
            self._executor = submitit.LocalExecutor(folder=self._folder / "submitit")
            self._executor.update_parameters(timeout_min=365 * DEFAULT_MINUTES, gpus_per_node=self.gpus or 0)
            self._queue += jobs
            self._start()
            return
        self._follow_earlier(submitit, jobs)
        waiting = [job for job in jobs if job.name not in self._active]
        executor = submitit.SlurmExecutor(folder=self._folder / "submitit", max_num_timeout=TIMEOUTS)
        try:
            executor.update_parameters(**self._parameters(folder, set(executor._valid_parameters())))
            with executor.batch():  # one array
                found = [executor.submit(Submitted(job)) for job in waiting]
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError, ValueError, TypeError) as error:
            raise EngineError(
                f"SLURM or submitit refuses the jobs: {in_words(error)}. Check `partition`, `time`, `gpus_per_run`, "
                f"`cpus_per_run` and `engine_options` (such as account=NAME)"
            ) from error
        self._active |= {job.name: each for job, each in zip(waiting, found, strict=True)}
        ids = {name: str(each.job_id) for name, each in self._active.items()}
        write_text(self._folder / SUBMITTED, json.dumps(ids, indent=1))

    def _follow_earlier(self, submitit: Any, jobs: Sequence[Job]) -> None:
        path = self._folder / SUBMITTED
        known = read_json(path) if path.exists() else {}
        for name in {job.name for job in jobs} & set(known):
            job = submitit.SlurmJob(folder=self._folder / "submitit", job_id=known[name])
            if job.state in ("PENDING", "RUNNING", "REQUEUED", "COMPLETING", "SUSPENDED", "PREEMPTED"):
                self._active[name] = job

    def _parameters(self, folder: Path, known: set[str]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "job_name": f"scalelong-{folder.name}"[:60],
            "cpus_per_task": self.cpus or 1,
            "time": self.minutes,
            **({"partition": self.partition} if self.partition else {}),
            **({"gpus_per_node": self.gpus} if self.gpus else {}),
            **({"array_parallelism": self.jobs} if self.jobs else {}),
        }
        # Options that submitit has no name for go to sbatch as they are.
        for name, given in self.options.items():
            value = int(given) if isinstance(given, str) and given.isdecimal() else given
            value = [value] if name in ("setup", "teardown", "srun_args") and isinstance(value, str) else value
            (found if name in known else found.setdefault("additional_parameters", {}))[name] = value
        return found

    def ended(self) -> dict[str, int | None]:
        over = {name: job for name, job in self._active.items() if job.done()}
        for name in over:
            del self._active[name]
        self._start()
        return {name: _code(job) for name, job in over.items()}

    def stop(self) -> None:
        self._queue.clear()
        for job in self._active.values():
            job.cancel(check=False) if self.name == "slurm" else job.cancel()
        until = time.monotonic() + GRACE_SECONDS
        while any(not job.done() for job in self._active.values()) and time.monotonic() < until:
            time.sleep(0.2)
        self._active.clear()

    def _start(self) -> None:
        """SLURM limits the jobs of an array itself; the local executor starts all that it is given."""
        while self._queue and len(self._active) < (self.jobs or max(1, cores() // (self.cpus or 1))):
            job = self._queue.pop(0)
            self._active[job.name] = self._executor.submit(Submitted(job))


def _code(job: Any) -> int | None:
    """The exit code of the worker; a job that was cancelled or killed wrote none."""
    try:
        outcome, result = job._get_outcome_and_result()
    except Exception:  # submitit's UncompletedJobError, or a result that cannot be read
        return None
    return result if outcome == "success" and isinstance(result, int) else 1


def minutes_of(text: str) -> int:
    """Minutes of a time limit as SLURM writes it: 90, 1:30:00, 2-12:00:00."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise InvalidConfigError(f"`time` must be minutes, or look like 4:00:00 or 2-12:00:00, got {text!r}")
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:  # [days-]hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    found = 60 * (24 * int(days or 0) + hours) + minutes + -(-seconds // 60)
    if found < 1:
        raise InvalidConfigError(f"`time` must be at least a minute, got {text!r}")
    return found
