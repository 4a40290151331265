"""Sweeps: many runs, trained by an engine.

    run_all(plan_runs(config, ["none", "cs:0.7"], range(6), out), engine=make_engine("slurm"))

Finished runs are not repeated, so the same call continues a sweep, on this engine or on another one.
"""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import from_dict, to_dict
from ..errors import RunFailedError
from ..files import make_folder, read_json, write_text
from ..runs import this_command
from ..training import Interrupt
from .engines import INTERRUPTED, Engine, Job, LocalEngine
from .plan import PlannedRun, require_same, run_one

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
    waiting = [run for run in runs if not run.finished]
    if len(waiting) < len(runs):
        logger.info("%d of %d runs are finished already", len(runs) - len(waiting), len(runs))
    if not waiting:
        return True
    engine.check()
    here, processes = torch.get_num_threads(), engine.gpus or 1
    one_by_one = engine.name == "local" and (engine.jobs or engine.at_once(len(waiting))) == 1 and processes == 1
    threads = agreed_threads(engine, folder, here if one_by_one else engine.threads(len(waiting)))
    if not one_by_one:
        _run_jobs({write_job(run, folder, threads, processes): run for run in waiting}, engine)
        return all(run.finished for run in runs)
    torch.set_num_threads(threads)
    try:
        return all(map(run_one, waiting))
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


def write_job(run: PlannedRun, folder: Path, threads: int = 1, processes: int = 1) -> Job:
    """Write all that a worker needs into a file."""
    root, name = Path(os.path.abspath(folder)), Path(os.path.relpath(run.folder, folder)).as_posix()
    file = root / JOBS / f"{name}.json"
    make_folder(file.parent)
    # The path is relative to the job file, so that the folder of a sweep may be moved.
    where = os.path.relpath(name, Path(JOBS, name).parent)
    about = {"method": run.method, "changes": run.changes, "folder": where, "command": this_command() or ""}
    write_text(file, json.dumps({**about, "config": to_dict(run.config)}, ensure_ascii=False, indent=1))
    environment = {variable: value for variable, value in os.environ.items() if variable.startswith("SCALELONG_")}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return Job(name, file, root / LOGS / f"{name}.txt", environment, processes)


def read_job(file: Path) -> tuple[PlannedRun, str]:
    """The run of a job file, and the command of its sweep."""
    job = read_json(file)
    config, folder = from_dict(job["config"]), Path(os.path.normpath(file.parent / job["folder"]))
    return PlannedRun(job["method"], config.seed, folder, config, job["changes"]), job["command"]


def _run_jobs(jobs: Mapping[Job, PlannedRun], engine: Engine) -> None:
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
                    if code != INTERRUPTED and not jobs[job].finished:
                        failures.append(_failure(job, code))
                if failures and engine.name == "local":
                    break
                if time.monotonic() - printed > LINE_SECONDS:
                    printed = time.monotonic()
                    logger.info("%d of %d runs left", len(queue) + len(active), len(jobs))
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
