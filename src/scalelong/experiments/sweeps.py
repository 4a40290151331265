"""Sweeps: many runs, carried out by an engine and followed from their folder.

    run_all(plan_runs(config, ["none", "cs:0.7"], range(6), out), every=10, engine=make_engine("ray", address="auto"))

| engine | what it is |
|---|---|
| local | processes of this machine: one per core, or one per GPU with that GPU assigned |
| submitit | submitit's local executor: what `slurm` does, without a cluster, to try it |
| slurm | SLURM through submitit: one array of jobs, which go on after preemption and time limits |
| ray | tasks of a Ray cluster, by its address |

What is finished is not repeated, so the same call goes on with a sweep, on this engine or on another one. What is still
at work, because the command that started it was killed, is waited for and not started twice.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..console import is_terminal
from ..errors import InvalidConfigError, RunFailedError
from ..runs.config import to_dict
from ..runs.folder import COMMAND_VARIABLE, this_command
from ..training.loop import Interrupt
from .clusters import RayEngine, SlurmEngine, SubmititEngine
from .engines import ENGINE_VARIABLE, INTERRUPTED, THREADS, Engine, Job, LocalEngine
from .records import last_line
from .runs import POLL_SECONDS, PlannedRun, require_same, run_one, wait_until_free
from .units import RUN, Unit, share, shared

LINE_SECONDS = 15.0
"""Seconds between lines of progress where the output is not a terminal."""
LAST_WORDS_SECONDS = 30.0
SHOWN = 4
"""Runs at work that a line of progress names."""
Every = int | Callable[[PlannedRun], int]
"""Steps between two readings of features and coefficients: one number for all, or by run."""


def run_all(
    runs: Sequence[PlannedRun],
    every: Every,
    jobs: int | None = None,
    folder: Path | None = None,
    *,
    checked: bool = False,
    engine: Engine | None = None,
    runs_per_job: int = 1,
) -> bool:
    """Train the runs that are not finished. False if not all are now; all that was done is kept.

    `folder` is that of the sweep (default: where the runs are). `checked` says that `require_same` was called before.
    `jobs` is for the local engine, which is the default.
    """
    if not checked:
        require_same(runs)
    folder = runs[0].folder.parent if folder is None else folder
    engine = make_engine("local", jobs=jobs) if engine is None else engine
    waiting = [run for run in runs if not run.finished]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already", flush=True)
    if not waiting:
        return True
    alone = isinstance(engine, LocalEngine) and (engine.jobs or engine.at_once(len(waiting))) == 1
    threads = agreed_threads(engine, folder, torch.get_num_threads() if alone else engine.threads(len(waiting)))
    engine.check()
    share(folder, {"threads": threads})
    planned = {unit_of(run, folder).name: run for run in runs}
    for run in waiting:
        unit_of(run, folder).write(description(run, folder, every))
    if alone:
        with of_threads(threads):
            return _one_by_one([(run, unit_of(run, folder)) for run in waiting], every)
    drive = Drive(engine, folder, threads=threads, total=len(runs), runs_per_job=runs_per_job)
    units = [unit_of(run, folder) for run in waiting]
    for _ in drive.carry_out(units, lambda unit: planned[unit.name].finished, lambda unit: _steps(planned[unit.name])):
        pass
    return all(run.finished for run in runs)


def unit_of(run: PlannedRun, folder: Path) -> Unit:
    return Unit(folder, Path(os.path.relpath(run.folder, folder)).as_posix())


def description(run: PlannedRun, folder: Path, every: Every) -> dict[str, Any]:
    """All that a worker needs."""
    return {
        "kind": RUN,
        "method": run.method,
        "changes": run.changes,
        "folder": os.path.relpath(run.folder, unit_of(run, folder).job.parent),
        "every": every if isinstance(every, int) else every(run),
        "config": to_dict(run.config),
        "command": sys.argv,
    }


def _one_by_one(waiting: Sequence[tuple[PlannedRun, Unit]], every: Every) -> bool:
    """In this process."""
    for number, (run, unit) in enumerate(waiting, start=1):
        print(f"[{number}/{len(waiting)}] {run.name}", flush=True)
        wait_until_free(run.folder)
        with unit.at_work() as ending:
            if not run_one(run, every if isinstance(every, int) else every(run)):
                ending.state = "interrupted"
                return False
    return True


def _steps(run: PlannedRun) -> str:
    # Only lines of the trainer itself have a loss; those of hooks and held-out losses come in between.
    line = last_line(run.folder, "loss")
    return "starting" if line is None else f"{line['step']}/{run.config.steps} loss {line['loss']:.3f}"


# Engines by name

ENGINES = {
    "local": "processes of this machine",
    "submitit": "submitit's local executor",
    "slurm": "SLURM, through submitit",
    "ray": "a Ray cluster",
}


def make_engine(
    name: str = "local",
    *,
    jobs: int | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    partition: str | None = None,
    time: str | None = None,
    address: str | None = None,
    options: Mapping[str, Any] | None = None,
    detach: bool = False,
) -> Engine:
    """An engine by name. What it does not know is refused.

    jobs: runs at a time (default: one per core or GPU here; as many as the cluster gives elsewhere).
    cpus, gpus: of each run. Runs have as many threads as cores.
    partition, time: of SLURM; time as "4:00:00", "2-00:00:00" or minutes.
    address: of a Ray cluster, such as "10.0.0.1:6379" or "auto".
    options: more options of the engine itself: for SLURM those of sbatch ({"account": "lab"}), for Ray resources.
    detach: submit and do not wait (slurm).
    """
    if name not in ENGINES:
        raise InvalidConfigError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    given = {"--partition": partition, "--time": time, "--address": address, "--engine-options": options or None}
    known = {"slurm": ("--partition", "--time", "--engine-options"), "ray": ("--address", "--engine-options")}
    foreign = [flag for flag, value in given.items() if value is not None and flag not in known.get(name, ())]
    if foreign:
        of = next((engine for engine, flags in known.items() if foreign[0] in flags), "")
        raise InvalidConfigError(f"{foreign[0]} says nothing to the engine {name}: leave it out, or give --engine {of}")
    if detach and name != "slurm":
        raise InvalidConfigError(f"--detach needs an engine that outlives this command: slurm, not {name}")
    share: dict[str, Any] = {"jobs": jobs, "cpus": cpus, "gpus": gpus}
    if name == "local":
        return LocalEngine(**share)
    if name == "submitit":
        return SubmititEngine(**share)
    if name == "ray":
        return RayEngine(**share, address=address, options=options)
    return SlurmEngine(**share, partition=partition, time=time, options=options, detach=detach)


# Threads: with another number of them, sums are added in another order and round otherwise


def agreed_threads(engine: Engine, folder: Path, usual: int) -> int:
    """The threads of each run: those that are asked for, or those that the sweep began with."""
    before = shared(folder).get("threads")
    if engine.cpus is None and isinstance(before, int) and before > 0:
        engine.cpus = before
        return before
    threads = engine.cpus or usual
    if before not in (None, threads):
        print(
            f"this sweep began with {before} thread(s) for each run and goes on with {threads}: results agree up to "
            f"rounding, and not in every bit",
            flush=True,
        )
    return threads


@contextmanager
def of_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Units on an engine

Done = Callable[[Unit], bool]


class Drive:
    """Hands units to an engine and follows them until all have ended."""

    def __init__(self, engine: Engine, folder: Path, *, threads: int, total: int, runs_per_job: int = 1) -> None:
        self.engine, self.folder, self.threads, self.total = engine, folder, threads, total
        self.runs_per_job = max(1, runs_per_job)
        self.followed: dict[str, list[Unit]] = {}
        """Units of the jobs that the engine has, by job."""
        self.held: list[Unit] = []
        """Units that a process of an earlier command works on."""
        self.logs: dict[str, Path] = {}
        self.failures: list[str] = []
        self.live = is_terminal(sys.stdout)
        self.started = self.printed = time.monotonic()

    def carry_out(self, waiting: Sequence[Unit], done: Done, describe: Callable[[Unit], str]) -> Iterator[Unit]:
        """The units that ended well, as they do. Ends early after a signal, or when jobs are only to be submitted."""
        left = self.total - len(waiting)
        self.engine.check()
        self.engine.open(self.folder)
        with Interrupt() as interrupt:
            try:
                self._submit(self._sort(waiting))
                if self.engine.detach:
                    return
                while (self.followed or self.held) and interrupt.requested is None:
                    for unit in self._ended(done):
                        left += 1
                        yield unit
                    self._report(left, describe)
                    if self.engine.name == "local" and self.failures:
                        break
                    time.sleep(POLL_SECONDS)
            finally:
                if not self.engine.detach:
                    self.engine.stop()
                    self._wait_for_last_words()
                self.engine.close()
        self._report(left, describe, final=True)
        failures = [failure for failure in self.failures if failure]
        if failures:
            more = f"\n... and {len(failures) - 3} more" if len(failures) > 3 else ""
            raise RunFailedError("\n".join(failures[:3]) + more)

    def _sort(self, waiting: Sequence[Unit]) -> list[Unit]:
        """Those that are to be submitted; the others are followed where they are."""
        earlier: dict[str, list[Unit]] = {}
        free: list[Unit] = []
        foreign: dict[str, list[str]] = {}
        for unit in waiting:
            engine, job = unit.submission
            if job and engine == self.engine.name:
                earlier.setdefault(job, []).append(unit)
                continue
            if job:
                foreign.setdefault(engine, []).append(job)
            (self.held if unit.state.alive else free).append(unit)
        adopted = self.engine.adopt({units[0].name: job for job, units in earlier.items()})
        for units in earlier.values():
            if units[0].name in adopted:
                self.followed[units[0].name] = units
                self.logs[units[0].name] = units[0].log
            else:
                for unit in units:
                    (self.held if unit.state.alive else free).append(unit)
        for engine, jobs in foreign.items():
            print(
                f"{len(jobs)} of these runs were submitted to {engine} before (jobs {', '.join(sorted(set(jobs))[:5])}"
                f"): those that still wait there should be cancelled",
                flush=True,
            )
        if self.followed or self.held:
            print(f"{len(adopted) + len(self.held)} are at work already, and are waited for", flush=True)
        order = {unit.name: number for number, unit in enumerate(waiting)}
        return sorted(free, key=lambda unit: order[unit.name])

    def _submit(self, units: Sequence[Unit]) -> None:
        if not units:
            return
        groups = [list(units[i : i + self.runs_per_job]) for i in range(0, len(units), self.runs_per_job)]
        jobs = [self._job(group) for group in groups]
        for job, group in zip(jobs, groups, strict=True):
            self.followed[job.name], self.logs[job.name] = group, job.log
            for unit in group:
                unit.taken_back()
        for name, job in self.engine.submit(jobs).items():
            for unit in self.followed[name]:
                unit.submitted(self.engine.name, job)

    def _job(self, units: Sequence[Unit]) -> Job:
        threads = str(self.threads)
        environment = {name: value for name, value in os.environ.items() if name.startswith("SCALELONG_")}
        environment |= dict.fromkeys(THREADS, threads)
        environment |= {ENGINE_VARIABLE: self.engine.name, COMMAND_VARIABLE: this_command() or ""}
        return Job(
            units[0].name,
            tuple(Path(os.path.abspath(unit.job)) for unit in units),
            Path(os.path.abspath(units[0].log)),
            environment,
            processes=max(1, self.engine.gpus or 1),
        )

    def _ended(self, done: Done) -> list[Unit]:
        """Units that ended well since the last look; of others it is noted why."""
        over = self.engine.poll()
        well: list[Unit] = []
        for name, units in list(self.followed.items()):
            finished = [unit for unit in units if done(unit)]
            well += finished
            self.followed[name] = [unit for unit in units if unit not in finished]
            if name in over:
                for unit in self.followed.pop(name):
                    self._note(unit, over[name], self.logs[name])
        for unit in [unit for unit in self.held if not unit.state.alive]:
            self.held.remove(unit)
            if done(unit):
                well.append(unit)
            else:
                self._submit([unit])
        return well

    def _wait_for_last_words(self) -> None:
        """An engine may forget a job while its worker still saves."""
        until = time.monotonic() + LAST_WORDS_SECONDS
        units = [unit for units in self.followed.values() for unit in units]
        for unit in units:
            unit.taken_back()
        while any(unit.state.alive for unit in units) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _note(self, unit: Unit, code: int | None, log: Path) -> None:
        """A unit that was interrupted is no failure, but it ends a local sweep: whoever did it meant all of them."""
        unit.taken_back()
        state = unit.state
        if code == INTERRUPTED or state.state == "interrupted":
            self.failures.append("")
            return
        how = "was killed or lost" if code is None or code < 0 else f"ended with code {code}"
        tail = _tail(log)
        self.failures.append(f"{unit.name} {how}, see {log}{':' if tail else ''}\n{tail}".rstrip())

    def _report(self, done: int, describe: Callable[[Unit], str], final: bool = False) -> None:
        now = time.monotonic()
        if not final and not self.live and now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        units = [unit for units in self.followed.values() for unit in units if unit.state.alive] + self.held
        parts = [f"{unit.name} {describe(unit)}" for unit in units[:SHOWN]] if not final else []
        more = [f"and {len(units) - SHOWN} more"] if len(units) > SHOWN and not final else []
        line = f"{now - self.started:4.0f} s  " + "   ".join([f"{done}/{self.total} runs", *parts, *more])
        print(f"\r\x1b[K{line}" if self.live else line, end="\n" if final or not self.live else "", flush=True)


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
