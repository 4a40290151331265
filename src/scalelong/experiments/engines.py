"""Where the runs of a sweep are carried out: the interface of engines, and the one of this machine.

An engine knows nothing of training: it carries out commands of a worker, `python -m scalelong.experiments.worker
jobs/none-seed0.json`, and says which have ended. All that a run needs is in the folder of the sweep, which every
machine must see under the same path. So a sweep that was begun on one engine goes on with another one. Engines of
clusters are in `clusters.py`; `sweeps.make_engine` makes one by name.
"""

import os
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfigError
from ..files import make_folder, writing

ENGINE_VARIABLE = "SCALELONG_ENGINE"
"""Tells a worker which engine it belongs to."""
INTERRUPTED = 130
"""What a worker returns that was told to stop and has saved: 128 + SIGINT, as shells count."""


@dataclass(frozen=True)
class Job:
    """A command of a worker: one or several units, one after the other."""

    name: str
    units: tuple[Path, ...]
    """Their job files."""
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """More than one: torchrun starts them, one per GPU."""

    @property
    def arguments(self) -> list[str]:
        """What follows `python`."""
        parallel = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        return [*(parallel if self.processes > 1 else []), "-m", "scalelong.experiments.worker", *map(str, self.units)]

    def shell_line(self) -> str:
        """For a shell, in the folder where the sweep was planned."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items() if name in THREADS]
        return " ".join([*variables, "python", shlex.join(self.arguments)])


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Engine(ABC):
    """The interface. `check` and `open`, then `submit` and `poll` in turns, `stop` to end early, `close`."""

    name: str = ""
    here: bool = False
    """Whether jobs run on this machine, so that a step can be timed on it before they start."""
    detach: bool = False
    """Submit, and do not wait."""

    def __init__(self, *, jobs: int | None = None, cpus: int | None = None, gpus: int | None = None) -> None:
        for flag, value, low in (("--jobs", jobs, 1), ("--cpus-per-run", cpus, 1), ("--gpus-per-run", gpus, 0)):
            if value is not None and value < low:
                raise InvalidConfigError(f"{flag} must be at least {low}, got {value}")
        self.jobs, self.cpus, self.gpus = jobs, cpus, gpus

    def at_once(self, runs: int) -> int | None:
        """How many jobs go at a time; None if the engine decides."""
        return None if self.jobs is None else min(self.jobs, runs)

    def threads(self, runs: int) -> int:  # noqa: ARG002
        """Threads of each run."""
        return self.cpus or 1

    @abstractmethod
    def check(self) -> None:
        """What is missing, unreachable or unknown is refused, before anything is written."""

    def open(self, folder: Path) -> None:  # noqa: B027
        """Begin with a sweep in this folder."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Take jobs, and return at once. The engine's own names of those that outlive this process, by name."""

    @abstractmethod
    def poll(self) -> dict[str, int | None]:
        """Jobs that have ended since the last call, with their exit codes; None where nobody knows."""

    @abstractmethod
    def stop(self) -> None:
        """End all jobs: each saves what it has. Returns when they have ended."""

    def adopt(self, given: Mapping[str, str]) -> set[str]:  # noqa: ARG002
        """Names of jobs, of an earlier process, that are still queued or running; they are polled from now on."""
        return set()

    def close(self) -> None:  # noqa: B027
        """Let go of the engine. Jobs that are detached go on."""


# This machine


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]


class ThisMachine(Engine):
    """As many runs at a time as there are cores, each with its share of the threads; or one per GPU."""

    here = True
    _devices: list[str] | None = None

    @property
    def devices(self) -> list[str]:
        if self._devices is None:
            self._devices = [] if self.gpus == 0 else devices()
        return self._devices

    def at_once(self, runs: int) -> int:
        """Small networks do not use several cores well, so each core gets a run; a GPU is not shared."""
        if self.devices:
            most = len(self.devices) // max(1, self.gpus or 1)
        else:
            most = cores() // (self.cpus or 1)
        return max(1, min(runs, self.jobs or most))

    def threads(self, runs: int) -> int:
        return self.cpus or max(1, cores() // (self.jobs or self.at_once(runs)))

    def check(self) -> None:
        need, have = self.gpus or 0, len(self.devices)
        if need > have:
            raise EngineError(f"--gpus-per-run {need} asks for more GPUs than this machine has: found {have}")


class LocalEngine(ThisMachine):
    """Processes of this machine, which end with this one."""

    name = "local"

    def __init__(self, **share: Any) -> None:
        super().__init__(**share)
        self._queue: list[Job] = []
        self._active: dict[subprocess.Popen[bytes], tuple[Job, int]] = {}

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        self._queue += jobs
        self._start()
        return {}

    def poll(self) -> dict[str, int | None]:
        ended: dict[str, int | None] = {}
        for process in [process for process in self._active if process.poll() is not None]:
            ended[self._active.pop(process)[0].name] = process.returncode
            _hang_up(process)
        self._start()
        return ended

    def stop(self) -> None:
        self._queue.clear()
        for process in self._active:
            process.terminate()
        for process in self._active:
            process.wait()
            _hang_up(process)
        self._active.clear()

    def close(self) -> None:
        self.stop()

    def _start(self) -> None:
        while self._queue and len(self._active) < self.at_once(len(self._active) + len(self._queue)):
            taken = {slot for _, slot in self._active.values()}
            slot = next(number for number in range(len(taken) + 1) if number not in taken)
            job = self._queue.pop(0)
            self._active[start_worker(job, self._seen_by(slot))] = job, slot

    def _seen_by(self, slot: int) -> dict[str, str]:
        """A run sees its own GPUs alone. With more --jobs than GPUs, they are shared in turn."""
        if not self.devices:
            return {}
        count = max(1, self.gpus or 1)
        own = [self.devices[(slot * count + number) % len(self.devices)] for number in range(count)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def start_worker(job: Job, more: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """A worker that ends, and saves before, when its standard input closes: so it does not outlive who started it."""
    make_folder(job.log.parent)
    # The process keeps the log open after it is closed here.
    with writing(job.log), open(job.log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, *job.arguments, "--tied"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **job.environment, **(more or {})},
        )


def _hang_up(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


# Everything else: commands to be carried out by whatever one has


class PrintedCommands(Engine):
    """Carries out nothing: `lines` holds one shell line per job."""

    name, here = "print", False

    def __init__(self, **share: Any) -> None:
        super().__init__(**share)
        self.lines: list[str] = []
        self.detach = True

    def check(self) -> None:
        pass

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        self.lines += [job.shell_line() for job in jobs]
        return {}

    def poll(self) -> dict[str, int | None]:
        return {}

    def stop(self) -> None:
        pass
