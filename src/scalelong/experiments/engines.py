"""Where jobs run. This file has the interface and the engine of this machine.

A job is a file, `OUT/jobs/NAME.json`, and a command, `python -m scalelong.experiments.worker OUT/jobs/NAME.json`. The
command may be given again at any time: what is finished costs nothing, and a run that was killed goes on after its
last checkpoint. So an engine only starts commands and says which have ended, and a sweep that was begun on one engine
goes on with another one. Every machine must see the folder under the same path.
"""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfigError
from ..files import make_folder, writing

INTERRUPTED = 130
"""Exit code of a worker that was asked to stop and has saved: 128 + SIGINT, as shells count."""


@dataclass(frozen=True)
class Job:
    """One command of a worker."""

    name: str
    file: Path
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """With more than one, torchrun starts them, one per GPU."""

    @property
    def arguments(self) -> list[str]:
        """The command line after `python`."""
        parallel = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        worker = ["-m", "scalelong.experiments.worker", str(self.file)]
        return [*(parallel if self.processes > 1 else []), *worker]


class Engine(ABC):
    """The interface: `check`, then `submit` once and `ended` in turns; `stop` ends early.

    `jobs` is the number of runs at a time; `cpus` and `gpus` belong to each run, which has as many threads as cores.
    """

    name: str = ""
    detach: bool = False
    """Submit the jobs, and do not wait for them."""

    def __init__(self, *, jobs: int | None = None, cpus: int | None = None, gpus: int | None = None) -> None:
        for name, value, low in (("jobs", jobs, 1), ("cpus_per_run", cpus, 1), ("gpus_per_run", gpus, 0)):
            if value is not None and value < low:
                raise InvalidConfigError(f"`{name}` must be at least {low}, got {value}")
        self.jobs, self.cpus, self.gpus = jobs, cpus, gpus

    def threads(self, runs: int) -> int:  # noqa: ARG002
        """Threads of each run."""
        return self.cpus or 1

    @abstractmethod
    def check(self) -> None:
        """Refuse what is missing or cannot be reached, before anything is written."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], folder: Path) -> None:
        """Take the jobs of a sweep in this folder, and return at once."""

    @abstractmethod
    def ended(self) -> dict[str, int | None]:
        """The jobs that have ended since the last call, with their exit codes; None where the code is unknown."""

    @abstractmethod
    def stop(self) -> None:
        """End all jobs, each of which saves first. Returns when they have ended."""


def start_worker(job: Job, more: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """A worker that saves and ends when its standard input closes, so that it does not outlive this process."""
    make_folder(job.log.parent)
    with writing(job.log), open(job.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, *job.arguments, "--tied"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **job.environment, **(more or {})},
        )


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
    """A pool of processes of this machine: one per core, each with its share of the threads, or one per GPU.

    They end with this process. Small networks do not use several cores well, and a GPU is not shared.
    """

    name = "local"

    def __init__(self, **share: Any) -> None:
        super().__init__(**share)
        self.devices = [] if self.gpus == 0 else devices()
        self._queue: list[Job] = []
        self._active: dict[subprocess.Popen[bytes], tuple[Job, int]] = {}

    def at_once(self, runs: int) -> int:
        most = len(self.devices) // max(1, self.gpus or 1) if self.devices else cores() // (self.cpus or 1)
        return max(1, min(runs, self.jobs or most))

    def threads(self, runs: int) -> int:
        return self.cpus or max(1, cores() // (self.jobs or self.at_once(runs)))

    def check(self) -> None:
        if (self.gpus or 0) > len(self.devices):
            raise EngineError(
                f"`gpus_per_run` {self.gpus} asks for more GPUs than this machine has: found {len(self.devices)}"
            )

    def submit(self, jobs: Sequence[Job], folder: Path) -> None:  # noqa: ARG002
        self._queue += jobs
        self._start()

    def ended(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for process in [process for process in self._active if process.poll() is not None]:
            found[self._active.pop(process)[0].name] = process.returncode
            process.communicate()  # closes the pipe
        self._start()
        return found

    def stop(self) -> None:
        self._queue.clear()
        for process in self._active:
            process.terminate()
        for process in self._active:
            process.communicate()
        self._active.clear()

    def _start(self) -> None:
        while self._queue and len(self._active) < self.at_once(len(self._active) + len(self._queue)):
            taken = {slot for _, slot in self._active.values()}
            slot = next(number for number in range(len(taken) + 1) if number not in taken)
            job = self._queue.pop(0)
            self._active[start_worker(job, self._visible(slot))] = job, slot

    def _visible(self, slot: int) -> dict[str, str]:
        """Each run sees its own GPUs. With more jobs than GPUs, they are shared in turn."""
        if not self.devices:
            return {}
        count = max(1, self.gpus or 1)
        own = [self.devices[(slot * count + number) % len(self.devices)] for number in range(count)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
