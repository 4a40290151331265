"""Sweeps: many runs, trained by an engine, and how far they are.

    run_all(plan_runs(config, ["none", "cs:0.7"], range(6), out), every=10, engine=make_engine("ray", address="auto"))

| engine | what it is |
|---|---|
| local | processes of this machine: one per core, or one per GPU with that GPU assigned |
| submitit | submitit's local executor: what `slurm` does, without a cluster, to try it |
| slurm | SLURM through submitit: one array of jobs, which go on after preemption and time limits |
| ray | tasks of a Ray cluster, by its address |

Finished runs are not repeated, so the same call continues a sweep, on this engine or on another one.
"""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import from_dict, to_dict
from ..console import text_table
from ..errors import InvalidConfigError, NoRunsError, RunFailedError
from ..files import make_folder, read_json, write_text
from ..runs import COMMAND_VARIABLE, this_command
from ..training import Interrupt
from .engines import INTERRUPTED, Engine, Job, LocalEngine
from .plan import PlannedRun, require_same, run_one, wait_until_free
from .ray_engine import RayEngine
from .records import last_line
from .submitit_engine import SubmititEngine

logger = logging.getLogger(__name__)

JOBS, LOGS, SWEEP = "jobs", "logs", "sweep.json"
POLL_SECONDS = 0.5
LINE_SECONDS = 15.0
"""Seconds between lines of progress."""
Every = int | Callable[[PlannedRun], int]
"""Steps between two readings of features and coefficients: one number for all, or by run."""

ENGINES = ("local", "submitit", "slurm", "ray")


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
    """An engine by name.

    jobs: runs at a time (default: one per core or GPU here; as many as the cluster gives elsewhere).
    cpus, gpus: of each run. Runs have as many threads as cores.
    partition, time: of SLURM; time as "4:00:00", "2-00:00:00" or minutes.
    address: of a Ray cluster, such as "10.0.0.1:6379" or "auto".
    options: more options of the engine itself: for SLURM those of sbatch ({"account": "lab"}), for Ray resources.
    detach: submit and do not wait (slurm).
    """
    if name not in ENGINES:
        raise InvalidConfigError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    known = {"slurm": ("partition", "time", "engine_options", "detach"), "ray": ("address", "engine_options")}
    given = {"partition": partition, "time": time, "address": address, "engine_options": options, "detach": detach}
    foreign = [option for option, value in given.items() if value and option not in known.get(name, ())]
    if foreign:
        owner = next(engine for engine, own in known.items() if foreign[0] in own)
        raise InvalidConfigError(f"`{foreign[0]}` is an option of the engine {owner}, not of {name}: leave it out")
    share: dict[str, Any] = {"jobs": jobs, "cpus": cpus, "gpus": gpus}
    if name == "local":
        return LocalEngine(**share)
    if name == "ray":
        return RayEngine(**share, address=address, options=options)
    return SubmititEngine(name, **share, partition=partition, time=time, options=options, detach=detach)


# The runs of a comparison


def run_all(
    runs: Sequence[PlannedRun],
    every: Every,
    jobs: int | None = None,
    folder: Path | None = None,
    *,
    checked: bool = False,
    engine: Engine | None = None,
) -> bool:
    """Train the runs that are not finished. False if not all are now; all that was done is kept.

    `folder` is that of the sweep (default: where the runs are). `checked` says that `require_same` was called before.
    `jobs` is for the local engine, which is the default.
    """
    if not checked:
        require_same(runs)
    folder = runs[0].folder.parent if folder is None else folder
    engine = LocalEngine(jobs=jobs) if engine is None else engine
    waiting = {_name(run, folder): run for run in runs if not run.finished}
    if len(waiting) < len(runs):
        logger.info("%d of %d runs are finished already", len(runs) - len(waiting), len(runs))
    if not waiting:
        return True
    engine.check()
    alone = isinstance(engine, LocalEngine) and (engine.jobs or engine.at_once(len(waiting))) == 1
    threads = agreed_threads(engine, folder, torch.get_num_threads() if alone else engine.threads(len(waiting)))
    described = {name: description(run, name, every) for name, run in waiting.items()}
    for name, values in described.items():
        write_job(folder, name, values)
    if not alone:
        made = [job_of(folder, name, threads, engine.gpus or 1) for name in waiting]
        run_jobs(made, folder, engine, lambda job: waiting[job.name].finished)
        return all(run.finished for run in runs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return all(train_planned(run, described[name]["every"]) for name, run in waiting.items())
    finally:
        torch.set_num_threads(before)


def _name(run: PlannedRun, folder: Path) -> str:
    return Path(os.path.relpath(run.folder, folder)).as_posix()


def description(run: PlannedRun, name: str, every: Every) -> dict[str, Any]:
    """All that a worker needs. Paths are relative to the job file, so that the folder of a sweep may be moved."""
    return {
        "kind": "run",
        "method": run.method,
        "changes": run.changes,
        "folder": os.path.relpath(name, Path(JOBS, name).parent),
        "every": every if isinstance(every, int) else every(run),
        "config": to_dict(run.config),
        "command": sys.argv,
    }


def planned_run(file: Path, described: Mapping[str, Any]) -> PlannedRun:
    """The run of a job file."""
    config = from_dict(described["config"])
    folder = Path(os.path.normpath(file.parent / described["folder"]))
    return PlannedRun(described["method"], config.seed, folder, config, described["changes"])


# Jobs


def write_job(folder: Path, name: str, described: Mapping[str, Any]) -> None:
    path = folder / JOBS / f"{name}.json"
    make_folder(path.parent)
    write_text(path, json.dumps(described, ensure_ascii=False, indent=1))


def job_of(folder: Path, name: str, threads: int, processes: int = 1) -> Job:
    environment = {variable: value for variable, value in os.environ.items() if variable.startswith("SCALELONG_")}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    environment |= {COMMAND_VARIABLE: this_command() or ""}
    root = Path(os.path.abspath(folder))
    return Job(name, root / JOBS / f"{name}.json", root / LOGS / f"{name}.txt", environment, processes)


def train_planned(run: PlannedRun, every: int) -> bool:
    """Train one run in this process, when no other process does. False if it was interrupted."""
    logger.info("%s", run.name)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        wait_until_free(run.folder)
    return run.finished or run_one(run, every)


def run_jobs(jobs: Sequence[Job], folder: Path, engine: Engine, finished: Callable[[Job], bool]) -> None:
    """Give the jobs to an engine and wait for them. Returns early after a signal, or if jobs are only submitted."""
    left = {job.name: job for job in jobs}
    failures: list[str] = []
    interrupted = False
    printed = time.monotonic()
    with Interrupt() as interrupt:
        engine.submit(jobs, folder)
        if engine.detach:
            return
        try:
            while left and not interrupted and interrupt.requested is None:
                for name, code in engine.ended().items():
                    job = left.pop(name)
                    if code == INTERRUPTED:
                        interrupted = True  # a signal to one run is meant for the sweep
                    elif not finished(job):
                        failures.append(_failure(job, code))
                if failures and isinstance(engine, LocalEngine):
                    break
                if time.monotonic() - printed > LINE_SECONDS:
                    printed = time.monotonic()
                    logger.info("%d of %d runs left; `compare --status` shows how far they are", len(left), len(jobs))
                time.sleep(POLL_SECONDS)
        finally:
            engine.stop()
    if failures:
        more = f"\n... and {len(failures) - 3} more" if len(failures) > 3 else ""
        raise RunFailedError("\n".join(failures[:3]) + more)


def _failure(job: Job, code: int | None) -> str:
    how = "was killed or lost" if code is None or code < 0 else f"ended with code {code}"
    text = job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""
    return "\n".join([f"{job.name} {how}, see {job.log}", *text.splitlines()[-5:]])


def agreed_threads(engine: Engine, folder: Path, usual: int) -> int:
    """The threads of each run: those that are asked for, or those that the sweep began with. With a different number
    of threads sums are added in a different order and round differently."""
    path = folder / JOBS / SWEEP
    before = read_json(path).get("threads") if path.exists() else None
    threads = engine.cpus or before or usual
    if before not in (None, threads):
        logger.warning(
            "this sweep began with %s thread(s) for each run and goes on with %s: results agree up to rounding, and "
            "not in every bit",
            before,
            threads,
        )
    engine.cpus = threads if before else engine.cpus
    make_folder(path.parent)
    write_text(path, json.dumps({"threads": threads}))
    return threads


# How far a sweep is


def status_rows(folder: str | os.PathLike[str]) -> list[dict[str, str]]:
    """A row per run, read from the folders of the runs: finished, running, stopped or waiting."""
    root = Path(folder)
    files = [path for path in sorted((root / JOBS).glob("**/*.json")) if path.name not in (SWEEP, "submitit.json")]
    described = [(path, read_json(path)) for path in files]
    runs = [planned_run(path, job) for path, job in described if job.get("kind") == "run"]
    if not runs:
        raise NoRunsError(f"{root} holds no sweep: looked for {JOBS}/NAME.json; give the folder of a comparison")
    return [_status_row(run, root) for run in runs]


def _status_row(run: PlannedRun, root: Path) -> dict[str, str]:
    line = last_line(run.folder, "loss") or {}
    holder = run.folder / ".lock-holder"
    # A killed process leaves the name of its holder; the lock itself ends with the process.
    status = "finished" if run.finished else "running" if run.at_work else "stopped" if line else "waiting"
    pace = line.get("seconds_per_step")
    seconds = (run.config.steps - line["step"]) * pace if status == "running" and pace else None
    return {
        "run": _name(run, root),
        "status": status,
        "steps": f"{line.get('step', 0):,}/{run.config.steps:,}",
        "loss": f"{line['loss']:.4g}" if line else "-",
        "minutes left": "-" if seconds is None else f"{seconds / 60:.0f}",
        "where": holder.read_text(encoding="utf-8") if status == "running" and holder.exists() else "",
    }


def status_text(folder: str | os.PathLike[str]) -> str:
    """The table of `status_rows`, and a line that counts."""
    rows = status_rows(folder)
    counts = Counter(row["status"] for row in rows)
    counted = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{text_table(rows, left=('run', 'status', 'where'))}\n\n{len(rows)} runs: {counted}"
