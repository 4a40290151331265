"""Engines that others have built: submitit, SLURM through it, and Ray.

A job of SLURM is one of an array. Before a time limit, or when it is preempted, submitit tells the worker to save, and
queues the job again; SLURM itself does so where a node fails. A task of Ray that loses its node is begun again on
another one. Each time the run goes on after its last checkpoint.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import EngineError, InvalidConfigError
from ..files import in_words
from ..optional import needs
from .engines import Engine, Job, ThisMachine, start_worker
from .units import JOBS

GRACE_SECONDS = 60.0
"""How long runs may take to save what they have when they are to stop."""


# submitit's local executor


class Submitted:
    """What submitit carries out: a worker. submitit calls `checkpoint` before a time limit or a preemption ends the
    job; the worker then saves, and the job is queued again."""

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
        submitit = needs("submitit", "slurm", "a job of submitit")
        return submitit.helpers.DelayedSubmission(Submitted(self.job))

    def _end(self) -> None:
        """Let the worker save and end. By the system's own calls, which take no locks of Python's."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


SUBMITIT_FOLDER = "submitit"
NO_LIMIT = 60 * 24 * 365
"""Minutes: submitit's local executor knows no job without a time limit."""


class SubmititEngine(ThisMachine):
    """submitit's local executor. Jobs outlive this command if it is killed, as those of SLURM do."""

    name = "submitit"

    def __init__(self, **share: Any) -> None:
        super().__init__(**share)
        self._queue: list[Job] = []
        self._active: dict[str, Any] = {}
        self._executor: Any = None

    def check(self) -> None:
        super().check()
        needs("submitit", "slurm", "--engine submitit")

    def open(self, folder: Path) -> None:
        submitit = needs("submitit", "slurm", "--engine submitit")
        self._executor = submitit.LocalExecutor(folder=folder / JOBS / SUBMITIT_FOLDER)
        self._executor.update_parameters(timeout_min=NO_LIMIT, gpus_per_node=self.gpus or 0)

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        self._queue += jobs
        self._start()
        return {}  # what outlives this process is known by its signs of life

    def poll(self) -> dict[str, int | None]:
        ended: dict[str, int | None] = {}
        for name, job in [(name, job) for name, job in self._active.items() if job.done()]:
            del self._active[name]
            ended[name] = _code(job)
        self._start()
        return ended

    def stop(self) -> None:
        self._queue.clear()
        for job in self._active.values():
            job.cancel()
        until = time.monotonic() + GRACE_SECONDS
        while any(not job.done() for job in self._active.values()) and time.monotonic() < until:
            time.sleep(0.2)
        self._active.clear()

    def _start(self) -> None:
        while self._queue and len(self._active) < self.at_once(len(self._active) + len(self._queue)):
            job = self._queue.pop(0)
            self._active[job.name] = self._executor.submit(Submitted(job))


def _code(job: Any) -> int | None:
    """What the worker returned. A job that was cancelled or killed wrote nothing."""
    try:
        outcome, result = job._get_outcome_and_result()
    except Exception:  # submitit's UncompletedJobError, or a result that cannot be read
        return None
    return result if outcome == "success" and isinstance(result, int) else 1


# SLURM

DEFAULT_MINUTES = 24 * 60
"""The time limit of a job, unless --time says otherwise or the partition allows less."""
TIMEOUTS = 1000
"""How often a run may go on after its time limit: it is resumed, so there is no reason to give up."""
ASK_SECONDS = 5.0
"""Between two questions to SLURM's controller."""


class SlurmEngine(Engine):
    """SLURM through submitit: an array of jobs, each with the same command as on any other engine."""

    name = "slurm"

    def __init__(
        self,
        *,
        partition: str | None = None,
        time: str | None = None,
        options: Mapping[str, Any] | None = None,
        detach: bool = False,
        **share: Any,
    ) -> None:
        super().__init__(**share)
        self.partition, self.minutes, self.detach = partition, None if time is None else minutes_of(time), detach
        self.options = dict(options or {})
        self._executor: Any = None
        self._active: dict[str, Any] = {}
        self._asked = 0.0
        self._missed: dict[str, int] = {}

    def check(self) -> None:
        needs("submitit", "slurm", "--engine slurm")
        for command in ("sbatch", "squeue", "sinfo", "scancel"):
            if shutil.which(command) is None:
                raise EngineError(
                    f"--engine slurm needs SLURM's {command} on this machine, and it is not in PATH: give the command "
                    f"on a login node of the cluster; --engine submitit tries the same without a cluster"
                )
        listed = [line.split("|") for line in _ask(["sinfo", "--noheader", "--format=%P|%l"], attempts=1).splitlines()]
        known = {name.strip().rstrip("*"): limit.strip() for name, limit in listed}
        for name in [] if self.partition is None else self.partition.split(","):
            if name not in known:
                raise EngineError(
                    f"SLURM has no partition {name!r} here: --partition must be one of {', '.join(known)}"
                )
        if self.minutes is None:  # submitit's own default is five minutes
            usual = next((name.strip("* ") for name, _ in listed if "*" in name), next(iter(known), ""))
            limits = [known[name] for name in (self.partition or usual).split(",") if name in known]
            self.minutes = min([DEFAULT_MINUTES, *(minutes_of(limit) for limit in limits if limit[:1].isdigit())])

    def open(self, folder: Path) -> None:
        submitit = needs("submitit", "slurm", "--engine slurm")
        self._executor = submitit.SlurmExecutor(folder=folder / JOBS / SUBMITIT_FOLDER, max_num_timeout=TIMEOUTS)
        self._folder = folder / JOBS / SUBMITIT_FOLDER
        own: dict[str, Any] = {"job_name": f"scalelong-{folder.name}"[:60], "cpus_per_task": self.cpus or 1}
        own |= {} if self.partition is None else {"partition": self.partition}
        own |= {"time": self.minutes or DEFAULT_MINUTES}
        own |= {"gpus_per_node": self.gpus} if self.gpus else {}
        own |= {} if self.jobs is None else {"array_parallelism": self.jobs}
        known = set(submitit.SlurmExecutor._valid_parameters())
        # What submitit has no name for goes to sbatch as it is.
        for name, given in self.options.items():
            value = int(given) if isinstance(given, str) and given.isdecimal() else given
            if name in ("setup", "teardown", "srun_args") and isinstance(value, str):
                value = [value]
            if name in known:
                own[name] = value
            else:
                own.setdefault("additional_parameters", {})[name] = value
        try:
            self._executor.update_parameters(**own)
        except (ValueError, TypeError) as error:
            raise InvalidConfigError(f"submitit refuses --engine-options: {in_words(error)}") from error

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        submitit = needs("submitit", "slurm", "--engine slurm")
        try:
            with self._executor.batch():  # one array
                found = [self._executor.submit(Submitted(job)) for job in jobs]
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
            raise EngineError(
                f"SLURM refuses the jobs: {in_words(error)}. Check --partition, --time, --gpus-per-run, --cpus-per-run "
                f"and --engine-options (such as account=NAME); where an array is too long, give --runs-per-job"
            ) from error
        self._active |= {job.name: each for job, each in zip(jobs, found, strict=True)}
        return {job.name: str(each.job_id) for job, each in zip(jobs, found, strict=True)}

    def adopt(self, given: Mapping[str, str]) -> set[str]:
        submitit = needs("submitit", "slurm", "--engine slurm")
        queued = _queued(list(given.values()))
        found = {name: job for name, job in given.items() if job in queued}
        self._active |= {name: submitit.SlurmJob(folder=self._folder, job_id=job) for name, job in found.items()}
        return set(found)

    def poll(self) -> dict[str, int | None]:
        """A job is over when SLURM's queue no longer has it. One that is requeued has a result as well, for a while."""
        if not self._active or time.monotonic() - self._asked < ASK_SECONDS:
            return {}
        self._asked = time.monotonic()
        queued = _queued([str(job.job_id) for job in self._active.values()])
        ended: dict[str, int | None] = {}
        for name, job in list(self._active.items()):
            if str(job.job_id) in queued:
                self._missed.pop(name, None)
                continue
            # Between the end of a job and its place in the queue as a requeued one there may be a moment.
            self._missed[name] = self._missed.get(name, 0) + 1
            if self._missed[name] >= 2:
                del self._active[name]
                ended[name] = _code(job)
        return ended

    def stop(self) -> None:
        jobs = [str(job.job_id) for job in self._active.values()]
        if not jobs:
            return
        _ask(["scancel", *jobs])
        until = time.monotonic() + GRACE_SECONDS
        while _queued(jobs) and time.monotonic() < until:
            time.sleep(1.0)
        self._active.clear()


def _queued(jobs: Sequence[str]) -> set[str]:
    """Of these jobs those that wait or run, or are about to end. `squeue` asks the controller; no accounting needed."""
    if not jobs:
        return set()
    listed = _ask(["squeue", "--noheader", "--array", "--format=%i", f"--user={os.getuid()}"])
    return set(listed.split()) & set(jobs)


def _ask(command: list[str], attempts: int = 3) -> str:
    reason: object = ""
    for attempt in range(attempts):
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        except subprocess.TimeoutExpired as error:
            reason = error
        except subprocess.CalledProcessError as error:
            reason = error.stderr.strip() or error
        if attempt < attempts - 1:
            time.sleep(5.0 * (attempt + 1))  # a controller that is busy answers a moment later
    raise EngineError(
        f"SLURM's controller does not answer `{' '.join(command[:2])}`: {reason}; try again when it is up"
    )


def minutes_of(text: str) -> int:
    """Minutes of a time limit as SLURM writes it: 90, 1:30:00, 2-12:00:00."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if dash else [])]) or len(parts) > 3:
        raise InvalidConfigError(f"--time must be minutes, or look like 4:00:00 or 2-12:00:00, got {text!r}")
    numbers = [int(part) for part in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes[:seconds]
        hours, minutes, seconds = 0, *(*numbers, 0)[:2]
    found = 60 * (24 * int(days or 0) + hours) + minutes + -(-seconds // 60)
    if found < 1:
        raise InvalidConfigError(f"--time must be at least a minute, got {text!r}")
    return found


# Ray

RETRIES = 3
"""How often a task is begun again whose node was lost."""


class RayEngine(Engine):
    """Tasks of a Ray cluster. Ray places them by their cores, GPUs and other resources."""

    name = "ray"

    def __init__(self, *, address: str | None = None, options: Mapping[str, Any] | None = None, **share: Any) -> None:
        super().__init__(**share)
        self.address, self.options = address, dict(options or {})
        self._queue: list[Job] = []
        self._active: dict[Any, str] = {}
        self._ray: Any = None

    def check(self) -> None:
        self._ray = ray = needs("ray", "ray", "--engine ray")
        if ray.is_initialized():
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "auto"
        if address not in ("auto", "local"):
            _require_listener(address)
        mend = "start one with `ray start --head`, and give --address HOST:PORT as it prints it"
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
        except ConnectionError as error:
            raise EngineError(f"no Ray cluster is found at --address {address}: {mend}") from error
        except Exception as error:  # Ray has errors of many kinds: another version, a wrong password, a lost node
            raise EngineError(f"Ray refuses --address {address}: {in_words(error)}; {mend}") from error
        self._require_fit(ray.nodes(), address)

    def _require_fit(self, nodes: Sequence[Mapping[str, Any]], address: str) -> None:
        """A task that fits no node would wait forever."""
        wanted = {"CPU": self.cpus or 1, "GPU": self.gpus or 0, **_resources(self.options)}
        alive = [dict(node["Resources"]) for node in nodes if node["Alive"]]
        if not any(all(node.get(name, 0) >= count for name, count in wanted.items()) for node in alive):
            names = sorted({name for node in alive for name in node if not name.startswith(("node:", "object_store"))})
            most = {name: max(node.get(name, 0) for node in alive) for name in names}
            raise EngineError(
                f"no node of the Ray cluster at {address} has what a run asks for ("
                f"{', '.join(f'{name} {count:g}' for name, count in wanted.items() if count)}); the most that one has: "
                f"{', '.join(f'{name} {count:g}' for name, count in most.items()) or 'nothing'}. Lower --cpus-per-run, "
                f"--gpus-per-run or --engine-options"
            )

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        self._queue += jobs
        self._start()
        return {}

    def poll(self) -> dict[str, int | None]:
        if not self._active:
            return {}
        done, _ = self._ray.wait(list(self._active), num_returns=len(self._active), timeout=0)
        ended: dict[str, int | None] = {}
        for reference in done:
            name = self._active.pop(reference)
            try:
                ended[name] = self._ray.get(reference)
            except self._ray.exceptions.RayError:  # cancelled, or its node was lost too often
                ended[name] = None
        self._start()
        return ended

    def stop(self) -> None:
        self._queue.clear()
        for reference in self._active:
            self._ray.cancel(reference, force=False)
        if self._active:
            self._ray.wait(list(self._active), num_returns=len(self._active), timeout=GRACE_SECONDS)
        self._active.clear()

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()

    def _start(self) -> None:
        most = self.jobs or len(self._active) + len(self._queue)
        resources = _resources(self.options)
        asked = {"num_cpus": self.cpus or 1, "num_gpus": self.gpus or 0, "max_retries": RETRIES}
        asked |= {"memory": resources.pop("memory", None), "resources": resources or None}
        task = self._ray.remote(_task())
        while self._queue and len(self._active) < most:
            job = self._queue.pop(0)
            given = [*job.arguments, "--tied"], {**job.environment, **_python_path()}, str(Path.cwd()), str(job.log)
            self._active[task.options(**asked, name=job.name).remote(*given)] = job.name


def _task() -> Any:
    """Made here and not above, so that Ray sends the code itself: its workers need not import scalelong."""

    def carry_out(arguments: list[str], environment: dict[str, str], folder: str, log: str) -> int:
        import os
        import subprocess
        import sys
        import time

        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "ab") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment},
            )
        # Not `wait`: Ray cancels a task by an interrupt that does not wake a process which waits in the system.
        try:
            while process.poll() is None:
                time.sleep(0.2)
        except BaseException:
            process.terminate()
            while process.poll() is None:
                time.sleep(0.2)
            raise
        finally:
            if process.stdin is not None:  # open until now: it closes by itself where this process is killed
                process.stdin.close()
        return process.returncode

    return carry_out


def _resources(options: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in options.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise InvalidConfigError(
                f"--engine-options of Ray are amounts of resources, such as memory=8e9 or fast_disk=1; got "
                f"{name}={value}"
            ) from error
    return found


def _python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}


def _require_listener(address: str) -> None:
    """Ray itself tries for a minute before it says that nobody is there."""
    plain = address.removeprefix("ray://")
    host, _, port = plain.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidConfigError(f"--address must be HOST:PORT, ray://HOST:PORT or auto, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"nobody answers at --address {address}: {in_words(error)}. Start the cluster there with `ray start "
            f"--head --port={port}`, or give the address that it printed"
        ) from error
