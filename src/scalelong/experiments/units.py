"""The units of a sweep on disk: what each is, who works on it, and how it ended.

A unit is one run of a comparison, or one rate of a range. Its files stand in the folder of the sweep:

    jobs/none-seed0.json        what to do: enough for `python -m scalelong.experiments.worker` on any machine
    jobs/none-seed0.submitted   which engine was asked to do it, and the engine's name of the job
    jobs/none-seed0.state       who does it: host, process, engine, and how it ended; written by the worker alone
    logs/none-seed0.txt         what it printed

While a process works on a unit, it touches the state every few seconds. So whoever can read the folder knows what goes
on, on whichever machine and engine. Nothing here needs torch.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import CannotReadError, RunFolderError
from ..files import make_folder, read_json, write_text

JOBS, LOGS = "jobs", "logs"
SWEEP = "sweep.json"
"""What all units of a folder share, such as the number of threads: with another one, sums round otherwise."""
RUN, RATE = "run", "rate"
"""Kinds of units."""
BEAT_SECONDS = 5.0
STALE_SECONDS = 90.0
"""Without a beat for so long, a process on another machine counts as dead: network file systems show files late."""


@dataclass(frozen=True)
class Unit:
    """A unit by its name, such as "none-seed0" or "rate-0.004/none-seed0", in the folder of its sweep."""

    folder: Path
    name: str

    @property
    def job(self) -> Path:
        return self.folder / JOBS / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.folder / LOGS / f"{self.name}.txt"

    @property
    def result(self) -> Path:
        """Of a rate of a range; a run has a folder instead."""
        return self.folder / JOBS / f"{self.name}.result"

    @property
    def _state(self) -> Path:
        return self.folder / JOBS / f"{self.name}.state"

    def write(self, job: dict[str, Any]) -> None:
        make_folder(self.job.parent)
        write_text(self.job, json.dumps(job, ensure_ascii=False, indent=1))

    def read(self) -> dict[str, Any]:
        try:
            found = read_json(self.job)
        except CannotReadError as error:
            raise RunFolderError(f"{error}; the command of the sweep writes it anew") from error
        if not isinstance(found, dict) or found.get("kind") not in (RUN, RATE):
            raise RunFolderError(f"{self.job} is no job of a sweep: give the command of the sweep again, it writes it")
        return found

    @property
    def run_folder(self) -> Path | None:
        """Of a run, by its path from the job file: the folder of a sweep may be moved."""
        job = self.read()
        return Path(os.path.normpath(self.job.parent / job["folder"])) if job["kind"] == RUN else None

    @property
    def state(self) -> "State":
        return read_state(self._state)

    @property
    def submission(self) -> tuple[str, str]:
        """The engine that was last asked to do it, and its name of the job; empty if none was."""
        path = self.job.with_suffix(".submitted")
        try:
            found = read_json(path)
            return str(found["engine"]), str(found["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return "", ""

    def submitted(self, engine: str, job: str) -> None:
        write_text(self.job.with_suffix(".submitted"), json.dumps({"engine": engine, "job": job, "time": time.time()}))

    def taken_back(self) -> None:
        self.job.with_suffix(".submitted").unlink(missing_ok=True)

    def _write(self, state: "State") -> None:
        make_folder(self._state.parent)
        write_text(self._state, json.dumps(asdict(state)))

    @contextmanager
    def at_work(self, engine: str = "local") -> Iterator["Ending"]:
        """While this process works on the unit; what `Ending` is told becomes its last state."""
        host, process = socket.gethostname(), os.getpid()
        begun = State(state="running", engine=engine, host=host, process=process, since=time.time())
        over, ending = threading.Event(), Ending()

        def beat() -> None:
            while not over.wait(BEAT_SECONDS):
                with suppress(OSError):
                    os.utime(self._state)

        thread = threading.Thread(target=beat, daemon=True)
        try:
            self._write(begun)
            thread.start()
            yield ending
        except BaseException as error:
            ending.state = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
            ending.message = f"{type(error).__name__}: {error}"[:2000]
            raise
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()
            with suppress(OSError):  # a full disk must not hide how it ended
                self._write(State(**{**asdict(begun), **asdict(ending), "until": time.time()}))


@dataclass
class Ending:
    state: str = "finished"
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class State:
    """Who works on a unit, or did."""

    state: str = ""
    """running, finished, interrupted or failed; empty if nobody has begun."""
    engine: str = ""
    host: str = ""
    process: int = 0
    since: float = 0.0
    until: float = 0.0
    message: str = ""
    beat: float = 0.0
    """When it was last heard of."""

    @property
    def alive(self) -> bool:
        """Whether somebody works on it now. On this machine the process is looked for; elsewhere its beat counts."""
        if self.state != "running":
            return False
        if self.host == socket.gethostname():
            return _exists(self.process)
        return time.time() - self.beat < STALE_SECONDS

    @property
    def silent(self) -> bool:
        """It was at work and is no more, and nobody wrote down why: it was killed."""
        return self.state == "running" and not self.alive


def read_state(path: Path) -> State:
    try:
        beat = path.stat().st_mtime
        found = read_json(path)
    except (OSError, ValueError):  # not there, or being replaced
        return State()
    known = {field.name for field in fields(State)}
    values = {name: value for name, value in found.items() if name in known} if isinstance(found, dict) else {}
    return State(**{**values, "beat": beat})


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    with suppress(OSError):  # one that has ended and that nobody has asked for yet is still listed
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def units_of(folder: Path) -> list[Unit]:
    """All units of a sweep, in the order of their names."""
    root = folder / JOBS
    found = sorted(path for path in root.glob("**/*.json") if path.name != SWEEP)
    return [Unit(folder, str(path.relative_to(root).with_suffix(""))) for path in found]


def unit_at(job: Path) -> Unit:
    """The unit of a job file."""
    job = Path(os.path.abspath(job))
    for root in job.parents:
        if root.name == JOBS:
            return Unit(root.parent, str(job.relative_to(root).with_suffix("")))
    raise RunFolderError(f"{job} is no job of a sweep: those stand in a folder {JOBS}/, for example {JOBS}/none.json")


def shared(folder: Path) -> dict[str, Any]:
    path = folder / JOBS / SWEEP
    found = read_json(path) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def share(folder: Path, values: dict[str, Any]) -> None:
    make_folder(folder / JOBS)
    write_text(folder / JOBS / SWEEP, json.dumps({**shared(folder), **values}, indent=1))
