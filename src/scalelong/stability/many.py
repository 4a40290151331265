"""Many runs on one machine: shared over its cores, one thread each, and kept as they finish."""

import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ..errors import CannotReadError, RunFolderError, ScaleLongError
from ..files import fitting, in_words, locked, parse_json, read_json, read_text, write_text, writing
from ..randomness import global_state, restore_global_state
from .survival import RateRun, rate_text

Key = tuple[str, float, int]
"""Method, rate, seed."""
Part = tuple[Key, ...]
"""Runs that one process does at a time."""
Work = Callable[[Part], list[RateRun]]

SETTINGS, RUNS = "settings.json", "runs.jsonl"


class StepFailedError(ScaleLongError, RuntimeError):
    """The build or step function of the user raised in a run, or its process was killed."""


def carry_out(work: Work, waiting: Sequence[Part], jobs: int) -> Iterator[RateRun]:
    """Results as they come. Forked processes share the data and take functions of any kind, as a DataLoader's do."""
    jobs = min(jobs, len(waiting))
    if jobs > 1 and "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin":
        yield from _forked(work, waiting, jobs)
        return
    for part in waiting:
        with kept_random_state(), _one_thread():
            runs = _try(work, part)
        yield from runs


def _try(work: Work, part: Part) -> list[RateRun]:
    try:
        return work(part)
    except ScaleLongError:
        raise
    except Exception as error:
        raise StepFailedError(f"{_names(part)} failed: {type(error).__name__}: {error}") from error


def _forked(work: Work, waiting: Sequence[Part], jobs: int) -> Iterator[RateRun]:
    context = multiprocessing.get_context("fork")
    queue, busy, workers = list(waiting), {}, []
    try:
        for _ in range(jobs):
            here, there = context.Pipe()
            worker = context.Process(target=_serve, args=(work, there), daemon=True)
            with warnings.catch_warnings():
                # Threads of the parent do not go along; nothing here needs them.
                warnings.simplefilter("ignore", DeprecationWarning)
                worker.start()
            there.close()
            workers.append(worker)
            busy[here] = queue.pop(0)
            here.send(busy[here])
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                part = busy.pop(connection)
                try:
                    answer = connection.recv()
                except EOFError as error:
                    raise StepFailedError(
                        f"the process of {_names(part)} was killed, perhaps for want of memory: try fewer jobs"
                    ) from error
                if isinstance(answer, str):
                    raise StepFailedError(f"{_names(part)} failed:\n{answer}")
                # The next ones go out before these are taken in.
                if queue:
                    busy[connection] = queue.pop(0)
                    connection.send(busy[connection])
                else:
                    connection.close()
                yield from answer
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()


def _serve(work: Work, connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            part = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            connection.send(work(part))
        except KeyboardInterrupt:
            return
        except Exception:
            connection.send(traceback.format_exc())
            return


def default_jobs() -> int:
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def kept_random_state() -> Iterator[None]:
    before = global_state()
    try:
        yield
    finally:
        restore_global_state(before)


# Finished runs, one JSON line each


class Store:
    """runs.jsonl and settings.json in a folder; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, settings: dict[str, Any], prints: dict[str, str]) -> None:
        self.folder, self.settings, self.prints = folder, settings, prints
        self._held = ExitStack()

    def __enter__(self) -> "Store":
        if self.folder is not None:
            with ExitStack() as stack:
                stack.enter_context(locked(self.folder, wait=False))
                self._compare(self.folder / SETTINGS)
                self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _compare(self, path: Path) -> None:
        """Runs of other settings must not be mixed. More methods, rates and seeds are welcome."""
        now = json.loads(json.dumps({**self.settings, "weights": self.prints}))
        if path.exists():
            try:
                before = dict(read_json(path))
            except (CannotReadError, ValueError, TypeError) as error:
                raise RunFolderError(f"{path} is damaged: {in_words(error)}; choose another folder") from error
            known = before.get("weights", {})
            # A method that is new here has nothing to be compared with.
            changed = _differences(
                {**before, "weights": {**now["weights"], **known}}, {**now, "weights": {**known, **now["weights"]}}
            )
            if changed:
                raise RunFolderError(
                    f"{path.parent} holds runs with other settings: {'; '.join(changed[:4])}. Choose another folder "
                    f"with out= (--out), or give the settings that it has"
                )
            now["weights"] = {**known, **now["weights"]}
        write_text(path, json.dumps(now, indent=1))

    def read(self) -> dict[Key, RateRun]:
        """The finished runs. A line that a crash cut off is not one of them, and is removed."""
        path = None if self.folder is None else self.folder / RUNS
        if path is None or not path.exists():
            return {}
        text = read_text(path)
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_text(path, whole)
        try:
            runs = [fitting(RateRun, parse_json(line)) for line in whole.splitlines() if line.strip()]
        except ValueError as error:
            raise RunFolderError(
                f"a line of {path} is damaged ({error}): remove that line, or choose another folder with --out"
            ) from error
        return {(run.method, run.rate, run.seed): run for run in runs}

    def add(self, run: RateRun) -> None:
        if self.folder is None:
            return
        with writing(self.folder / RUNS), open(self.folder / RUNS, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(run), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif prefix == "weights." and old != new:
            found.append(f"the network of {name} has other initial weights")
        elif old != new:
            found.append(f"{prefix}{name} was {old!r} and is {new!r}")
    return found


def _name(key: Key) -> str:
    method, rate, seed = key
    return f"{method} at {rate_text(rate)}, seed {seed}"


def _names(part: Part) -> str:
    return _name(part[0]) if len(part) == 1 else f"{_name(part[0])}, or one of {len(part) - 1} runs beside it"


def line(run: RateRun) -> str:
    what = f"survived, loss {run.last:.3g}" if run.survived else f"{run.outcome} after {run.steps} steps"
    return f"{_name((run.method, run.rate, run.seed))}: {what}"
