"""Where the runs of a sweep are trained: on this machine, on SLURM through submitit, or on a Ray cluster.

A job is a file, `OUT/jobs/NAME.json`, and a command, `python -m scalelong.experiments OUT/jobs/NAME.json`. The command
may be given again at any time: what is finished costs nothing, and a run that was killed continues after its last
checkpoint. So an engine only starts commands, and a sweep that was begun on one engine continues on another one. Every
machine must see the folder under the same path.

An engine has three methods for jobs: `start` returns a handle at once, `poll` gives None while the job runs and its
exit code afterwards, `terminate` lets it save and end.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidConfigError, RunFailedError, require
from ..files import in_words, make_folder, writing
from ..optional import needs

INTERRUPTED = 130
"""Exit code of a worker that was asked to stop and has saved: 128 + SIGINT, as shells count."""
LOST = -1
"""Stands for an exit code that is not known: the job was cancelled, or its node was lost."""


@dataclass(frozen=True, eq=False)
class Job:
    """One command of a worker."""

    name: str
    file: Path
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """With more than one, torchrun starts them, one per GPU."""
    cwd: str = field(default_factory=os.getcwd)

    @property
    def arguments(self) -> list[str]:
        """The command line after `python`."""
        parallel = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        return [*(parallel if self.processes > 1 else []), "-m", "scalelong.experiments", str(self.file)]


class Worker(subprocess.Popen[bytes]):
    """A worker that saves and ends when its standard input closes, so that it does not outlive this process."""

    def __init__(self, job: Job, more: Mapping[str, str] | None = None) -> None:
        make_folder(job.log.parent)
        environment = {**os.environ, **job.environment, **(more or {})}
        command = [sys.executable, *job.arguments, "--tied"]
        with writing(job.log), open(job.log, "ab") as log:
            super().__init__(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=job.cwd, env=environment
            )

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None and self.stdin is not None:
            self.stdin.close()
        return code


class Engine:
    """What all engines share: how many runs go at once, and with what each is given."""

    devices: Sequence[str] = ()
    """GPUs of this machine that it gives to runs."""

    def __init__(
        self,
        name: str = "local",
        jobs: int | None = None,
        cpus: int | None = None,
        gpus: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        for field_name, value, low in (("jobs", jobs, 1), ("cpus", cpus, 1), ("gpus", gpus, 0)):
            require(value is None or value >= low, f"`{field_name}` must be at least {low}, got {value}")
        self.name, self.jobs, self.cpus, self.gpus, self.options = name, jobs, cpus, gpus, dict(options or {})

    def at_once(self, runs: int) -> int:
        """Jobs that are started before one has ended."""
        return self.jobs or runs

    def threads(self, runs: int) -> int:  # noqa: ARG002
        """Threads of each run."""
        return self.cpus or 1

    def check(self) -> None:
        """Refuse what is missing or cannot be reached, before anything is written."""

    def start(self, job: Job) -> Any:
        """Start a job, and return at once what `poll` and `terminate` take."""
        raise NotImplementedError

    def poll(self, started: Any) -> int | None:
        return started.poll()

    def terminate(self, started: Any) -> None:
        started.terminate()


# This machine


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]


class LocalEngine(Engine):
    """Processes of this machine: one per core, each with its share of the threads, or one per GPU."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.devices = [] if self.gpus == 0 else devices()
        self._slots: dict[Worker, int] = {}

    def at_once(self, runs: int) -> int:
        most = len(self.devices) // max(1, self.gpus or 1) if self.devices else cores() // (self.cpus or 1)
        return max(1, min(runs, self.jobs or most))

    def threads(self, runs: int) -> int:
        return self.cpus or max(1, cores() // (self.jobs or self.at_once(runs)))

    def check(self) -> None:
        require(not self.options, "the engine local has no `options`: leave them out")
        if (self.gpus or 0) > len(self.devices):
            raise RunFailedError(
                f"`gpus` {self.gpus} asks for more GPUs than this machine has: found {len(self.devices)}"
            )

    def start(self, job: Job) -> Any:
        """The job sees its own GPUs; with more jobs than GPUs, they are shared in turn."""
        taken = {slot for worker, slot in self._slots.items() if worker.poll() is None}
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        count = max(1, self.gpus or 1)
        own = [self.devices[(slot * count + i) % len(self.devices)] for i in range(count)] if self.devices else []
        worker: Any = Worker(job, {"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})
        self._slots[worker] = slot
        return worker


# Other machines


class OnNode:
    """The function that submitit and Ray call on a node: it starts a worker and waits for it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process: Worker | None = None

    def __call__(self) -> int:
        self._process = Worker(self.job)
        try:
            # Not `wait`: it holds a lock, and `checkpoint` is called in a signal handler, in the middle of this. Ray's
            # interrupt does not wake a process that waits in the system.
            while (code := self._process.poll()) is None:
                time.sleep(0.2)
            return code
        except BaseException:
            self._end()
            self._process.poll()
            raise

    def checkpoint(self) -> Any:
        """Called by submitit before a time limit or a preemption: save, and queue the job again."""
        self._end()
        return needs("submitit", "slurm", "a job of submitit").helpers.DelayedSubmission(OnNode(self.job))

    def _end(self) -> None:
        """Let the worker save and end, by system calls, which take no locks of Python's."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


MINUTES = 24 * 60
"""Time limit of a SLURM job, where none is given. A run that takes longer continues in its next job."""
TIMEOUTS = 1000
"""How often a job may be queued again. The run advances each time, so there is no reason to give up."""


class SubmititEngine(Engine):
    """SLURM through submitit; as "submitit", its local executor, which tries the same without a cluster.

    `options` are those of submitit (partition, time in minutes, setup, ...) or else of sbatch.
    """

    def check(self) -> None:
        needs("submitit", "slurm", f"the engine {self.name}")
        require(
            isinstance(self.options.get("time", 1), int),
            "the time limit among `options` is in minutes, such as time=240",
        )
        if self.name == "slurm" and shutil.which("sbatch") is None:
            raise RunFailedError(
                "the engine slurm needs SLURM's `sbatch`, which is not in PATH: give the command on a login node of "
                "the cluster; the engine submitit tries the same without a cluster"
            )

    def start(self, job: Job) -> Any:
        submitit = needs("submitit", "slurm", f"the engine {self.name}")
        cluster = "slurm" if self.name == "slurm" else "local"
        place = job.file.parents[job.name.count("/")] / "submitit"
        executor = submitit.AutoExecutor(folder=place, cluster=cluster, slurm_max_num_timeout=TIMEOUTS)
        known = submitit.SlurmExecutor._valid_parameters()
        given = {n: [v] if n in ("setup", "teardown", "srun_args") else v for n, v in self.options.items()}
        others = {name: value for name, value in given.items() if name not in known}
        try:
            executor.update_parameters(
                name=f"scalelong-{job.name}"[:60],
                cpus_per_task=self.cpus or 1,
                gpus_per_node=self.gpus,
                timeout_min=365 * 24 * 60,
                slurm_additional_parameters=others,
                **{"slurm_time": MINUTES} | {f"slurm_{name}": value for name, value in given.items() if name in known},
            )
            return executor.submit(OnNode(job))
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError, ValueError, TypeError) as error:
            raise RunFailedError(
                f"SLURM or submitit refuses the job: {in_words(error)}. Check `gpus`, `cpus` and `options` "
                f"(such as partition=NAME account=NAME)"
            ) from error

    def poll(self, started: Any) -> int | None:
        if not started.done():
            return None
        try:
            return started.result()
        except Exception:  # cancelled, lost, or a result that cannot be read
            return LOST

    def terminate(self, started: Any) -> None:
        started.cancel()


RETRIES = 3
"""How often a task of Ray is begun again when its node is lost. Its run continues after its last checkpoint."""


class RayEngine(Engine):
    """Tasks of the Ray cluster at RAY_ADDRESS, or of this machine. `options` are resources, such as memory=8e9."""

    @property
    def ray(self) -> Any:
        return needs("ray", "ray", "the engine ray")

    def check(self) -> None:
        ray = self.ray
        address = os.environ.get("RAY_ADDRESS") or "auto"
        if ray.is_initialized():
            return
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except Exception as error:  # Ray has errors of many kinds: no cluster, another version, a wrong password
            raise RunFailedError(
                f"no Ray cluster can be used at the address {address}: {in_words(error)}. Start one with `ray start "
                f"--head`, and set RAY_ADDRESS to the address HOST:PORT that it prints"
            ) from error

    def start(self, job: Job) -> Any:
        try:
            resources = {name: float(amount) for name, amount in self.options.items()}
        except ValueError as error:
            raise InvalidConfigError("`options` of Ray are amounts of resources, such as memory=8e9") from error
        memory = resources.pop("memory", None)
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
        task = self.ray.remote(_call).options(
            num_cpus=self.cpus or 1,
            num_gpus=self.gpus or 0,
            max_retries=RETRIES,
            memory=memory,
            resources=resources or None,
            runtime_env={"env_vars": path},  # the node imports scalelong from where this process does
        )
        return task.remote(OnNode(job))

    def poll(self, started: Any) -> int | None:
        if not self.ray.wait([started], timeout=0)[0]:
            return None
        try:
            return self.ray.get(started)
        except self.ray.exceptions.RayError:  # cancelled, or its node was lost too often
            return LOST

    def terminate(self, started: Any) -> None:
        self.ray.cancel(started, force=False)


def _call(function: OnNode) -> int:
    return function()


ENGINES = {"local": LocalEngine, "submitit": SubmititEngine, "slurm": SubmititEngine, "ray": RayEngine}


def make_engine(name: str = "local", **given: Any) -> Engine:
    """An engine by name: `make_engine("slurm", gpus=1, options={"partition": "gpu"})`.

    jobs: runs at a time (default: one per core or GPU here; as many as the cluster gives elsewhere).
    cpus, gpus: of each run, which has as many threads as cores.
    options: of the engine itself: for SLURM those of submitit and sbatch, for Ray resources.
    """
    require(name in ENGINES, f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    return ENGINES[name](name, **given)
