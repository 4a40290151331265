"""How far a sweep is, read from its folder alone: on a login node, while its runs are at work elsewhere.

    print(read_progress("runs/sweep"))

Nothing here needs torch or an engine.
"""

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..console import duration, text_table
from ..errors import CannotReadError, NoRunsError, RunFolderError
from ..files import parse_json, read_json, read_text
from .records import CONFIG, DIVERGED, last_line, read_run
from .units import JOBS, RUN, State, Unit, units_of

STATUSES = ("finished", "running", "queued", "failed", "lost", "interrupted", "waiting")
"""queued: an engine has it; lost: its process was killed; waiting: nobody has begun."""
RUNS = "runs.jsonl"
"""Where a range keeps its finished runs."""
MOST_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class UnitProgress:
    """One run."""

    name: str
    status: str
    step: int
    steps: int
    loss: float | None = None
    pace: float | None = None
    """Seconds of a step."""
    seconds: float | None = None
    """Until it is finished, if it is at work."""
    where: str = ""
    """Host and engine."""
    message: str = ""

    def row(self) -> dict[str, str]:
        return {
            "run": self.name,
            "status": self.status,
            "steps": f"{self.step:,}/{self.steps:,}",
            "loss": "-" if self.loss is None else f"{self.loss:.4g}",
            "s/step": "-" if self.pace is None else f"{self.pace:.3g}",
            "left": "-" if self.seconds is None else duration(self.seconds),
            "where": self.where,
        }


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """All runs of a folder. Print it."""

    folder: Path
    runs: list[UnitProgress]
    command: str = ""
    """What goes on with the sweep."""

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(run.status for run in self.runs)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def finished(self) -> bool:
        return all(run.status == "finished" for run in self.runs)

    @property
    def seconds(self) -> float | None:
        """Until all are finished, if as many stay at work as now; None while nothing can be said."""
        running = [run for run in self.runs if run.status == "running"]
        paces = [run.pace for run in self.runs if run.pace is not None]
        if not running or not paces:
            return None
        usual = median(paces)
        left = [(run.steps - run.step) * (run.pace or usual) for run in self.runs if run.status != "finished"]
        return max(sum(left) / len(running), max((run.seconds or 0.0 for run in running), default=0.0))

    def to_dict(self) -> dict[str, Any]:
        runs = [asdict(run) for run in self.runs]
        return {"folder": str(self.folder), "counts": self.counts, "seconds": self.seconds, "runs": runs}

    def lines(self, every: bool = False) -> Iterator[str]:
        """The table: of many runs those that are neither finished nor waiting, unless `every` one is wanted."""
        shown = self.runs
        if len(shown) > MOST_ROWS and not every:
            shown = [run for run in shown if run.status not in ("finished", "waiting", "queued")]
        if shown:
            yield text_table([run.row() for run in shown], left=("run", "status", "where"))
            yield ""
        for run in self.runs:
            if run.message and run.status in ("failed", "lost"):
                yield f"{run.name}: {run.message}"
        done, steps = sum(run.step for run in self.runs), sum(run.steps for run in self.runs)
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        until = "" if self.seconds is None else f"; about {duration(self.seconds)} left at this pace"
        yield f"{len(self.runs)} runs: {counts}; {done:,} of {steps:,} steps{until}"
        if not self.finished and not any(run.status in ("running", "queued") for run in self.runs) and self.command:
            yield f"nothing is at work; to go on: {self.command}"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def read_progress(folder: str | os.PathLike[str]) -> SweepProgress:
    """Of a sweep, of several below a folder, or of any run folders."""
    folder = Path(folder)
    if not folder.is_dir():
        raise NoRunsError(f"{folder} is no folder: give the one that --out named, or that the command printed")
    roots = [folder] if (folder / JOBS).is_dir() else sorted(path.parent for path in folder.glob(f"*/{JOBS}"))
    found: list[UnitProgress] = []
    command = ""
    for root in roots:
        finished = finished_rates(root)
        for unit in units_of(root):
            job = unit.read()
            command = command or _command(job)
            name = unit.name if root == folder else f"{root.name}/{unit.name}"
            found.append(_of_run(unit, job, name) if job["kind"] == RUN else _of_rate(unit, job, name, finished))
    if not found:
        found = [_of_folder(path.parent, folder) for path in sorted(folder.glob(f"**/{CONFIG}"))]
    if not found:
        found = [_of_result(run) for run in finished_rates(folder).values()]
    if not found:
        raise NoRunsError(f"{folder} holds no sweep and no runs: looked for {JOBS}/, {CONFIG} and {RUNS}")
    return SweepProgress(folder=folder, runs=found, command=command)


def _command(job: dict[str, Any]) -> str:
    given = [str(word) for word in job.get("command", [])]
    return shlex.join(["scalelong", *given[1:]]) if given else ""


def _of_run(unit: Unit, job: dict[str, Any], name: str) -> UnitProgress:
    folder = unit.run_folder
    assert folder is not None
    steps = int(job["config"]["steps"])
    return _measured(folder, name, steps, unit.state, bool(unit.submission[1]))


def _measured(folder: Path, name: str, steps: int, state: State, submitted: bool) -> UnitProgress:
    line = last_line(folder, "loss") or {}
    saved = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    step = max([int(line.get("step", 0)), *(int(number) for number in saved if number.isdigit())])
    diverged = (folder / DIVERGED).exists()
    ended = diverged or (any(number.isdigit() for number in saved) and step >= steps and not state.alive)
    status = "finished" if ended else _status(state, submitted)
    pace = line.get("seconds_per_step")
    return UnitProgress(
        name=name,
        status=status,
        step=steps if diverged else step,
        steps=steps,
        loss=line.get("loss"),
        pace=pace,
        seconds=(steps - step) * pace if status == "running" and pace is not None else None,
        where=_where(state),
        message=_message(state),
    )


def _status(state: State, submitted: bool) -> str:
    if state.alive:
        return "running"
    if state.silent:
        return "lost"
    if submitted and state.state not in ("failed",):
        return "queued"
    return state.state if state.state in ("failed", "interrupted") else "waiting"


def _where(state: State) -> str:
    return f"{state.host}, {state.engine}" if state.host else ""


def _message(state: State) -> str:
    if state.silent:
        age = duration(max(0.0, time.time() - state.beat))
        return f"process {state.process} on {state.host} is gone; last heard of {age} ago"
    return " ".join(state.message.split())[:400]


# Ranges


def finished_rates(folder: Path) -> dict[tuple[str, float, int], dict[str, Any]]:
    path = folder / RUNS
    try:
        lines = read_text(path).splitlines() if path.exists() else []
    except CannotReadError:
        lines = []
    found = {}
    for line in lines:
        try:
            run = parse_json(line)
            found[run["method"], float(run["rate"]), int(run["seed"])] = run
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a kill
    return found


def _of_rate(unit: Unit, job: dict[str, Any], name: str, finished: dict[Any, dict[str, Any]]) -> UnitProgress:
    run = finished.get((job["method"], float(job["rate"]), int(job["seed"])))
    if run is None and unit.result.exists():
        try:
            run = dict(read_json(unit.result))
        except (OSError, ValueError, TypeError) as error:
            raise RunFolderError(
                f"{unit.result} is damaged ({error}): remove it, and give the command again"
            ) from error
    state, steps = unit.state, int(job["range"]["steps"])
    if run is not None:
        return _of_result({**run, "all": steps}, name, _where(state))
    status = _status(state, bool(unit.submission[1]))
    return UnitProgress(name=name, status=status, step=0, steps=steps, where=_where(state), message=_message(state))


def _of_result(run: dict[str, Any], name: str = "", where: str = "") -> UnitProgress:
    """One that collapsed ended early, and is finished nevertheless."""
    done = int(run["steps"])
    steps = int(run.get("all", done))
    pace = float(run.get("seconds", 0.0)) / max(1, done)
    named = name or f"{run['method']} at {run['rate']:g}, seed {run['seed']}"
    return UnitProgress(
        name=named, status="finished", step=steps, steps=steps, loss=run.get("last"), pace=pace or None, where=where
    )


# Run folders without a sweep


def _of_folder(folder: Path, root: Path) -> UnitProgress:
    record = read_run(folder)
    steps = int(record.config.get("steps", 0))
    name = folder.name if folder == root else str(folder.relative_to(root))
    holder = folder / ".lock-holder"
    held = holder.read_text(encoding="utf-8") if holder.exists() else ""
    words = held.split()
    process = int(words[1]) if len(words) == 4 and words[1].isdigit() else 0
    state = State(
        state="running" if process else "",
        engine="train",
        host=words[3] if process else "",
        process=process,
        beat=_beat(folder),
    )
    return _measured(folder, name, steps, state, submitted=False)


def _beat(folder: Path) -> float:
    try:
        return (folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        return 0.0


def to_json(found: SweepProgress) -> str:
    return json.dumps(found.to_dict(), indent=1)
