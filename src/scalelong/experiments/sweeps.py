"""Sweeps: many runs, trained by an engine, and how far they are.

    run_all(plan_runs(config, ["none", "cs:0.7"], range(6), out), engine=make_engine("slurm"))

Finished runs are not repeated, so the same call continues a sweep, on this engine or on another one.
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import from_dict, to_dict
from ..console import text_table
from ..errors import RunFailedError, RunFolderError
from ..files import make_folder, read_json, write_text
from ..runs import this_command
from ..training import Interrupt
from .engines import INTERRUPTED, Engine, Job, LocalEngine
from .plan import PlannedRun, require_same, run_one
from .records import last_line

logger = logging.getLogger(__name__)

JOBS, LOGS, SWEEP = "jobs", "logs", "sweep.json"
POLL_SECONDS, LINE_SECONDS = 0.5, 15.0
"""Seconds between looks at the jobs, and between lines of progress."""
GRACE_SECONDS = 60.0
"""Runs that are to stop may take so long to save."""


def run_all(
    runs: Sequence[PlannedRun], jobs: int | None = None, folder: Path | None = None, engine: Engine | None = None
) -> bool:
    """Train the runs that are not finished. False if not all are now; all that was done is kept.

    `folder` is that of the sweep (default: where the runs are). `jobs` is for the local engine, which is the default.
    """
    require_same(runs)
    folder = folder or runs[0].folder.parent
    engine = engine or LocalEngine(jobs=jobs)
    waiting = {_name(run, folder): run for run in runs if not run.finished}
    if len(waiting) < len(runs):
        logger.info("%d of %d runs are finished already", len(runs) - len(waiting), len(runs))
    if not waiting:
        return True
    engine.check()
    here, processes = torch.get_num_threads(), engine.gpus or 1
    one_by_one = engine.name == "local" and (engine.jobs or engine.at_once(len(waiting))) == 1 and processes == 1
    threads = agreed_threads(engine, folder, here if one_by_one else engine.threads(len(waiting)))
    made = [
        make_job(
            folder,
            name,
            # Paths are relative to the job file, so that the folder of a sweep may be moved.
            {
                "kind": "run",
                "method": run.method,
                "changes": run.changes,
                "folder": os.path.relpath(name, Path(JOBS, name).parent),
                "config": to_dict(run.config),
            },
            threads,
            processes,
        )
        for name, run in waiting.items()
    ]
    if not one_by_one:
        run_jobs(made, engine, lambda job: waiting[job.name].finished)
        return all(run.finished for run in runs)
    torch.set_num_threads(threads)
    try:
        return all(map(run_one, waiting.values()))
    finally:
        torch.set_num_threads(here)


def agreed_threads(engine: Engine, folder: Path, usual: int) -> int:
    """The threads of each run: those that are asked for, or those that the sweep began with. With a different number
    of threads sums are added in a different order and round differently."""
    path = make_folder(folder / JOBS) / SWEEP
    before = read_json(path).get("threads") if path.exists() else None
    engine.cpus = engine.cpus or before
    threads = engine.cpus or usual
    if before not in (None, threads):
        logger.warning(
            "this sweep began with %s thread(s) for each run and continues with %s: results agree up to rounding, "
            "and not in every bit",
            before,
            threads,
        )
    write_text(path, json.dumps({"threads": threads}))
    return threads


# Jobs


def make_job(folder: Path, name: str, described: Mapping[str, Any], threads: int = 1, processes: int = 1) -> Job:
    """Write all that a worker needs into a file."""
    root = Path(os.path.abspath(folder))
    file = root / JOBS / f"{name}.json"
    make_folder(file.parent)
    write_text(file, json.dumps({**described, "command": this_command() or ""}, ensure_ascii=False, indent=1))
    environment = {variable: value for variable, value in os.environ.items() if variable.startswith("SCALELONG_")}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return Job(name, file, root / LOGS / f"{name}.txt", environment, processes)


def planned_run(file: Path) -> PlannedRun:
    """The run of a job file."""
    job = read_json(file)
    config, folder = from_dict(job["config"]), Path(os.path.normpath(file.parent / job["folder"]))
    return PlannedRun(job["method"], config.seed, folder, config, job["changes"])


def _name(run: PlannedRun, folder: Path) -> str:
    return Path(os.path.relpath(run.folder, folder)).as_posix()


def run_jobs(jobs: Sequence[Job], engine: Engine, finished: Callable[[Job], bool]) -> None:
    """Give the jobs to an engine and wait for them. Returns early after a signal, which lets each save."""
    queue, active, failures = list(jobs), {}, list[str]()
    printed, interrupted = time.monotonic(), False
    with Interrupt() as interrupt:
        try:
            while (queue or active) and not interrupted and interrupt.requested is None:
                while queue and len(active) < engine.at_once(len(queue) + len(active)):
                    job = queue.pop(0)
                    active[job] = engine.start(job)
                for job in list(active):
                    code = engine.poll(active[job])
                    if code is None:
                        continue
                    del active[job]
                    interrupted |= code == INTERRUPTED  # a signal to one run is meant for the sweep
                    if code != INTERRUPTED and not finished(job):
                        failures.append(_failure(job, code))
                if failures and engine.name == "local":
                    break
                if time.monotonic() - printed > LINE_SECONDS:
                    printed, left = time.monotonic(), len(queue) + len(active)
                    logger.info("%d of %d runs left; `compare --status` shows how far they are", left, len(jobs))
                time.sleep(POLL_SECONDS)
        finally:
            _stop(engine, list(active.values()))
    if failures:
        more = f"\n... and {len(failures) - 3} more" if len(failures) > 3 else ""
        raise RunFailedError("\n".join(failures[:3]) + more)


def _stop(engine: Engine, started: Sequence[Any]) -> None:
    """End jobs, each of which saves first."""
    for each in started:
        engine.terminate(each)
    until = time.monotonic() + GRACE_SECONDS
    while sum(engine.poll(each) is None for each in started) and time.monotonic() < until:
        time.sleep(0.2)


def _failure(job: Job, code: int) -> str:
    how = "was killed or lost" if code < 0 else f"ended with code {code}"
    text = job.log.read_text(encoding="utf-8", errors="replace") if job.log.exists() else ""
    return "\n".join([f"{job.name} {how}, see {job.log}", *text.splitlines()[-5:]])


# How far a sweep is


def status_text(folder: str | os.PathLike[str]) -> str:
    """A row per run, read from the folders of the runs (finished, running, stopped or waiting), and a line that
    counts."""
    root = Path(folder)
    files = [path for path in sorted((root / JOBS).glob("**/*.json")) if read_json(path).get("kind") == "run"]
    rows = [_status_row(planned_run(path), root) for path in files]
    if not rows:
        raise RunFolderError(f"{root} holds no sweep: looked for {JOBS}/NAME.json; give the folder of a comparison")
    counted = ", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in rows).items())
    return f"{text_table(rows, left=('run', 'status', 'where'))}\n\n{len(rows)} runs: {counted}"


def _status_row(run: PlannedRun, root: Path) -> dict[str, str]:
    line = last_line(run.folder, "loss") or {}
    holder = run.folder / ".lock-holder"
    # A killed process leaves the name of its holder; the lock itself ends with the process.
    status = "finished" if run.finished else "running" if run.at_work else "stopped" if line else "waiting"
    where = holder.read_text(encoding="utf-8").partition("\n")[0] if status == "running" and holder.exists() else ""
    pace = line.get("seconds_per_step")
    seconds = (run.config.steps - line["step"]) * pace if status == "running" and pace else None
    return {
        "run": _name(run, root),
        "status": status,
        "steps": f"{line.get('step', 0):,}/{run.config.steps:,}",
        "loss": f"{line['loss']:.4g}" if line else "-",
        "minutes left": "-" if seconds is None else f"{seconds / 60:.0f}",
        "where": where,
    }
