"""Many runs on one machine: shared over its cores, one thread each, and kept in a folder as they finish."""

import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import CannotReadError, RunFolderError, ScaleLongError
from ..files import append_json_line, fitting, in_words, locked, parse_json, read_json, read_text, write_text
from ..randomness import global_state, restore_global_state
from ..tracing import default_generators
from .survival import RateRun, rate_text

Key = tuple[str, float, int]
"""Method, rate, seed."""
Work = Callable[[Key], RateRun]

SETTINGS, RUNS = "settings.json", "runs.jsonl"


class StepFailedError(ScaleLongError, RuntimeError):
    """The build or step function of the user raised in a run, or its process was killed."""


def carry_out(work: Work, waiting: Sequence[Key], jobs: int) -> Iterator[RateRun]:
    """Results as they come. Forked processes share the data and take functions of any kind, as a DataLoader's do."""
    jobs = min(jobs, len(waiting))
    if jobs > 1 and "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin":
        yield from _in_processes(work, waiting, jobs)
        return
    for key in waiting:
        with kept_random_state(), _one_thread():
            try:
                run = work(key)
            except ScaleLongError:
                raise
            except Exception as error:
                raise StepFailedError(f"{name_of(key)} failed: {type(error).__name__}: {error}") from error
        yield run


def _in_processes(work: Work, waiting: Sequence[Key], jobs: int) -> Iterator[RateRun]:
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_process, initargs=(work,))
    try:
        with warnings.catch_warnings():
            # Python warns that threads of the parent do not exist in a forked child; nothing here needs them.
            warnings.simplefilter("ignore", DeprecationWarning)
            futures = [pool.submit(_work_in_process, key) for key in waiting]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise StepFailedError("the process of a run was killed, perhaps for want of memory: try fewer jobs") from error
    finally:
        # What still runs is of no use any more: the caller has stopped to ask, or a run has failed.
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)


_work: Work
"""The work of a process of the pool. A fork inherits it, so that it need not be pickled."""


def _begin_process(work: Work) -> None:
    global _work
    torch.set_num_threads(1)
    _work = work


def _work_in_process(key: Key) -> RateRun:
    try:
        return _work(key)
    except Exception:
        # As text: not every exception can be pickled.
        raise StepFailedError(f"{name_of(key)} failed:\n{traceback.format_exc()}") from None


def default_jobs(device: torch.device) -> int:
    """One process per core, or one on an accelerator."""
    if device.type != "cpu":
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
    """Restores Python's, numpy's and torch's random states at the end, those of all devices."""
    before, devices = global_state(), [(generator, generator.get_state()) for generator in default_generators()]
    try:
        yield
    finally:
        restore_global_state(before)
        for generator, state in devices:
            generator.set_state(state)


# Finished runs, one JSON line each


class Store:
    """runs.jsonl and settings.json in a folder; without a folder nothing is kept."""

    def __init__(self, folder: Path | None, settings: dict[str, Any], prints: dict[str, str]) -> None:
        self.folder, self.settings, self.prints = folder, settings, prints
        self._lock = ExitStack()

    def __enter__(self) -> "Store":
        if self.folder is not None:
            with ExitStack() as stack:
                stack.enter_context(locked(self.folder, wait=False))
                self._compare(self.folder / SETTINGS)
                self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _compare(self, path: Path) -> None:
        """Runs of different settings must not be mixed. More methods, rates and seeds are welcome."""
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
                    f"(`out`), or give the settings that it has"
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
                f"a line of {path} is damaged ({error}): remove that line, or choose another folder (`out`)"
            ) from error
        return {(run.method, run.rate, run.seed): run for run in runs}

    def add(self, run: RateRun) -> None:
        if self.folder is not None:
            append_json_line(self.folder / RUNS, asdict(run))


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


def name_of(key: Key) -> str:
    """A run in words."""
    method, rate, seed = key
    return f"{method} at {rate_text(rate)}, seed {seed}"


def describe(run: RateRun) -> str:
    """A run and its outcome in words."""
    when = f"{run.outcome} after {run.steps} steps" if run.onset is None else f"collapsed from step {run.onset} on"
    what = f"survived, loss {run.last:.3g}" if run.survived else when
    return f"{name_of((run.method, run.rate, run.seed))}: {what}"
