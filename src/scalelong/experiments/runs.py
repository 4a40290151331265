"""The runs of a comparison: variants, plans, the probe batch, the recording, and a pool of processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..console import is_terminal
from ..diffusion.inputs import NoisyInputs
from ..errors import (
    InvalidConfigError,
    NonFiniteError,
    RunFailedError,
    RunFolderError,
    RunLockedError,
    ScaleLongError,
)
from ..files import digest, locked, make_folder, parse_json, write_text, writing
from ..runs.checkpoint import saved_steps
from ..runs.config import TrainConfig, differences, flatten, from_dict, load_config, to_dict
from ..runs.folder import COMMAND_VARIABLE, CONFIG, fingerprints, require_same_data, this_command
from ..runs.load import Run
from ..runs.model import RunData, build_model, load_run_data
from ..scaling import as_scaling
from ..stability.diagnosis import Diagnosis, diagnose
from ..training import TrainState, train
from ..training.loop import Interrupt
from .records import DIAGNOSIS, DIVERGED, RunRecord, last_line, read_run, write_variant

# Exit codes of `python -m` modules


def exit_code(work: Callable[[], int | None]) -> int:
    """What the work returns, or 0. An error of ours is one line instead of a traceback, and 1."""
    try:
        return work() or 0
    except ScaleLongError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


# Variants of a comparison that differ in more than the scaling: "fast: scaling=cs:0.7 lr=2e-3".

OPTIONS = "model_options"


@dataclass(frozen=True)
class Variant:
    """A name, and the fields of the configuration that it changes, by dotted name: {"optimizer.lr": 0.002}."""

    name: str
    changes: dict[str, Any]

    def apply(self, config: TrainConfig) -> TrainConfig:
        values = to_dict(config)
        for path, value in self.changes.items():
            group = values
            *parents, name = path.split(".")
            for parent in parents:
                group = group[parent]
            group[name] = value
        return from_dict(values)


def as_variant(given: Variant | str) -> Variant:
    """A variant from itself, from a method of scaling, or from a text such as "fast: scaling=cs lr=2e-3"."""
    if isinstance(given, Variant):
        return given
    name, colon, changes = given.partition(": ")
    if not colon:
        as_scaling(given)
        return Variant(given, {"scaling": given})
    return Variant(name.strip(), dict(_change(part, given) for part in changes.split()))


def _change(text: str, variant: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidConfigError(
            f"a variant looks like 'fast: scaling=cs:0.7 lr=2e-3'; correct {text!r} in {variant!r}"
        )
    path = _path(name)
    if path == "scaling":
        return path, value
    try:
        return path, parse_json(value)
    except ValueError:
        return path, value


def _path(name: str) -> str:
    """Fields have names of their own in all groups, so that the group may be left out."""
    base = TrainConfig()
    known = {each.name: each.name for each in fields(base)}
    for group in [each.name for each in fields(base) if is_dataclass(getattr(base, each.name))]:
        known |= {each.name: f"{group}.{each.name}" for each in fields(getattr(base, group))}
    if name in known.values() or name.startswith(f"{OPTIONS}."):
        return name
    if name not in known:
        raise InvalidConfigError(
            f"a variant cannot change {name!r}: it is not a field of the configuration. Options of the model are "
            f"written {OPTIONS}.{name}; fields are {', '.join(known)}"
        )
    return known[name]


# A fixed batch of noisy images for looking at networks: the same for every method of one seed.


def noisy_probe(config: TrainConfig, count: int) -> NoisyInputs:
    """x_t, t and condition of the probe batch of a configuration."""
    return load_run_data(config).probe(count)


# The diagnosis of a recipe: its model as it starts, on its own data.

BATCH = 16
IMAGES = 512
"""Images from which κ is chosen."""


def diagnose_config(config: TrainConfig) -> Diagnosis:
    """Before training: the initial weights of this configuration, without scaling."""
    data = load_run_data(config)
    return _diagnose(build_model(replace(config, scaling="none"), data.shape), data)


def diagnose_run(run: Run) -> Diagnosis:
    """During or after training: the weights of a run."""
    return _diagnose(run.model, load_run_data(run.config))


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> Path:
    """The report of this folder shows it."""
    write_text(folder / DIAGNOSIS, diagnosis.to_json())
    return folder / DIAGNOSIS


def _diagnose(model: nn.Module, data: RunData) -> Diagnosis:
    batch = data.probe(BATCH).arguments(model)
    return diagnose(model, batch, images=data.clean(IMAGES), schedule=data.config.diffusion.schedule)


# The runs of a comparison: one per method and seed, each in a run folder of its own.
#
# Runs of one seed differ in what the method says alone, mostly the scaling: they share initial weights, order of data,
# noise and times, because the trainer draws all of them as functions of (seed, step).


@dataclass(frozen=True)
class PlannedRun:
    """A run before, while and after it is trained."""

    method: str
    """The name of the method or variant, which is written into the folder."""
    seed: int
    folder: Path
    config: TrainConfig
    changes: dict[str, Any] = field(default_factory=dict)
    """The fields of the configuration that the method changes."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        """All steps are done, or the numbers stopped being finite: there is nothing left to do."""
        if (self.folder / DIVERGED).exists():
            return True
        steps = saved_steps(self.folder / "checkpoints")
        return bool(steps) and steps[-1] >= self.config.steps

    @property
    def diverged(self) -> bool:
        return (self.folder / DIVERGED).exists()

    def read(self, setting: str = "") -> RunRecord:
        """What became of it."""
        return read_run(
            self.folder,
            method=self.method,
            setting=setting,
            seed=self.seed,
            config=flatten(to_dict(self.config)),
        )


def plan_runs(
    config: TrainConfig, methods: Sequence[str | Variant], seeds: Sequence[int], out: Path, prefix: str = ""
) -> list[PlannedRun]:
    """Seed by seed, so that an interrupted comparison holds complete seeds."""
    if not methods or not seeds:
        raise InvalidConfigError("a comparison needs at least one method and one seed")
    variants = [as_variant(method) for method in methods]
    for given, kind in (([variant.name for variant in variants], "method"), (seeds, "seed")):
        twice = sorted({str(entry) for entry in given if list(given).count(entry) > 1})
        if twice:
            raise InvalidConfigError(f"{kind} {', '.join(twice)} is given twice: leave one out")
    configs = {variant.name: (variant.apply(config), variant.changes) for variant in variants}
    folders = _folder_names(list(configs))
    return [
        PlannedRun(name, seed, out / f"{prefix}{folders[name]}-seed{seed}", replace(changed, seed=seed), changes)
        for seed in seeds
        for name, (changed, changes) in configs.items()
    ]


def run_one(run: PlannedRun, every: int) -> bool:
    """Train, or continue to train, with a reading every `every` steps. False if it was interrupted.

    A run that diverges is a result, not a failure.
    """

    def name_folder(_: TrainState) -> None:
        # At the first step: the trainer takes a folder only if it is empty or holds a run.
        write_variant(run.folder, run.method, run.changes)

    try:
        config = replace(run.config, logging=replace(run.config.logging, monitor_every=every))
        return train(_to_the_end(config), run.folder, hooks=[name_folder]).finished
    except NonFiniteError as error:
        write_text(run.folder / DIVERGED, json.dumps({"message": str(error)}))
        return True


def _to_the_end(config: TrainConfig) -> TrainConfig:
    """A run that collapses is a result as well: it goes on, so that all curves have the same length."""
    stops = config.guard.on_collapse == "stop"
    return replace(config, guard=replace(config.guard, on_collapse="ignore")) if stops else config


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"


def _folder_names(names: Sequence[str]) -> dict[str, str]:
    """A folder of its own for every name, also where two differ in a space, or in what a file system does not tell
    apart. Scalings keep their short names, such as cs-0.7."""
    found: dict[str, str] = {}
    for name in names:
        short = slug(name)
        taken = short.lower() in map(str.lower, found.values())
        whole = not taken and len(short) <= 200 and _is_told(name, short)
        found[name] = short if whole else f"{short[:100]}-{digest(name.encode())[:6]}"
    return found


def _is_told(name: str, short: str) -> bool:
    """Whether the short form says all that the name says."""
    if short == name:
        return True
    try:
        as_scaling(name)
    except ScaleLongError:
        return False
    return len(short) <= 100


# A finished run stands for what is asked for only if it was asked for in the same way.

SAME_RESULT = ("images.workers", "hardware.", "checkpoints.", "logging.trackers", "logging.monitor_every")
"""Fields that may differ between a finished run and the one that is asked for: its numbers stay what they are."""


def require_same(runs: Sequence[PlannedRun]) -> None:
    """RunFolderError if a finished run had other settings or other data. Those that go on are checked by `train`."""
    known: dict[str, dict[str, str]] = {}
    for run in runs:
        if run.finished:
            _require_same_settings(run)
            _require_same_data(run, known)


def _require_same_settings(run: PlannedRun) -> None:
    changed = differences(_to_the_end(load_config(run.folder / CONFIG)), _to_the_end(run.config))
    shown = [f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items() if not name.startswith(SAME_RESULT)]
    if shown:
        raise RunFolderError(
            f"{run.folder} holds a finished run with a different configuration: {'; '.join(shown)}. Give the same "
            f"values to see its results, or another folder with --out"
        )


def _require_same_data(run: PlannedRun, known: dict[str, dict[str, str]]) -> None:
    """Images may have been changed in place. Which are held out depends on the seed."""
    config = run.config
    key = json.dumps([config.data, to_dict(config.images), config.diffusion.condition, config.seed])
    if key not in known:
        known[key] = fingerprints(load_run_data(config))
    require_same_data(run.folder, config, known[key])


# Many runs on one machine: as many at a time as there are cores, each with its share of the threads.

POLL_SECONDS = 0.5
LINE_SECONDS = 15.0
"""Seconds between lines of progress where the output is not a terminal."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(runs: int) -> int:
    """Small networks do not use several cores well, so each core gets a run; an accelerator is not shared."""
    return 1 if torch.cuda.is_available() else max(1, min(cores(), runs))


def run_all(
    runs: Sequence[PlannedRun], every: int, jobs: int | None = None, logs: Path | None = None, *, checked: bool = False
) -> bool:
    """Train the runs that are not finished. False if they were interrupted; all that was done is kept.

    `checked` says that `require_same` was called before.
    """
    if not checked:
        require_same(runs)
    waiting = [run for run in runs if not run.finished]
    jobs = default_jobs(len(waiting)) if jobs is None else jobs
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already", flush=True)
    if jobs > 1:
        return Pool(runs, every, jobs, logs or runs[0].folder.parent / "logs").work(waiting)
    for number, run in enumerate(waiting, start=1):
        print(f"[{number}/{len(waiting)}] {run.name}", flush=True)
        wait_until_free(run.folder)
        if not run_one(run, every):
            return False
    return True


ORPHAN_SECONDS = 60.0
"""How long to wait for the runs of a comparison whose process was killed: they save what they have, and end."""


def wait_until_free(folder: Path) -> None:
    """Wait for another process to leave a run folder; RunLockedError, which names it, if it stays."""
    told, until = False, time.monotonic() + ORPHAN_SECONDS
    while (folder / ".lock").exists():
        try:
            with locked(folder, wait=False):
                return
        except RunLockedError as error:
            if time.monotonic() > until:
                raise
            if not told:
                print(f"{error}; waiting up to {ORPHAN_SECONDS:.0f} s", flush=True)
            told = True
            time.sleep(POLL_SECONDS)


class Pool:
    def __init__(self, runs: Sequence[PlannedRun], every: int, jobs: int, logs: Path) -> None:
        self.runs, self.every, self.jobs, self.logs = runs, every, jobs, logs
        self.active: dict[subprocess.Popen[str], PlannedRun] = {}
        self.live = is_terminal(sys.stdout)
        self.started = self.printed = time.monotonic()

    def work(self, waiting: list[PlannedRun]) -> bool:
        queue, stopping = list(waiting), False
        make_folder(self.logs)
        with Interrupt() as interrupt:
            try:
                while self.active or (queue and not stopping):
                    while queue and not stopping and len(self.active) < self.jobs:
                        self._start(queue.pop(0))
                    if interrupt.requested and not stopping:
                        stopping = True
                        self._stop()
                    stopping |= self._collect()
                    self._report()
                    time.sleep(POLL_SECONDS)
            finally:
                self._stop()
                for process in self.active:
                    process.wait()
                    _hang_up(process)
        self._report(final=True)
        return not stopping

    def _start(self, run: PlannedRun) -> None:
        wait_until_free(run.folder)
        threads = str(max(1, cores() // self.jobs))
        # The process keeps the log open after it is closed here.
        with writing(self.log(run)), open(self.log(run), "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "scalelong.experiments.runs"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": threads,
                    "MKL_NUM_THREADS": threads,
                    COMMAND_VARIABLE: this_command() or "",
                },
            )
        self.active[process] = run
        given: dict[str, Any] = {
            "method": run.method,
            "changes": run.changes,
            "folder": str(run.folder),
            "every": self.every,
            "config": to_dict(run.config),
            "command": sys.argv,
        }
        assert process.stdin is not None
        # The pipe stays open: when it closes because this process was killed, the run saves what it has and ends.
        with suppress(BrokenPipeError):  # it died at once, and its log says why
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()

    def log(self, run: PlannedRun) -> Path:
        return self.logs / f"{run.name}.txt"

    def _collect(self) -> bool:
        """Take note of processes that ended; True if one was interrupted."""
        interrupted = False
        for process in [process for process in self.active if process.poll() is not None]:
            run = self.active.pop(process)
            _hang_up(process)
            if process.returncode == INTERRUPTED:
                interrupted = True
            elif process.returncode != 0:
                tail = "\n".join(self.log(run).read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
                raise RunFailedError(f"{run.name} ended with code {process.returncode}, see {self.log(run)}:\n{tail}")
        return interrupted

    def _stop(self) -> None:
        """Each run saves what it has and ends."""
        for process in self.active:
            process.terminate()

    def _report(self, final: bool = False) -> None:
        now = time.monotonic()
        if not final and not self.live and now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        done = sum(run.finished for run in self.runs)
        parts = [f"{done}/{len(self.runs)} runs", *(_state(run) for run in self.active.values())]
        line = f"{now - self.started:4.0f} s  " + "   ".join(parts)
        print(f"\r\x1b[K{line}" if self.live else line, end="\n" if final or not self.live else "", flush=True)


def _hang_up(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


def _state(run: PlannedRun) -> str:
    # Only lines of the trainer itself have a loss; those of hooks and held-out losses come in between.
    line = last_line(run.folder, "loss")
    if line is None:
        return f"{run.name} starting"
    return f"{run.name} {line['step']}/{run.config.steps} loss {line['loss']:.3f}"


# One run in a process of its own: `python -m scalelong.experiments.runs`, described on the standard input.

INTERRUPTED = 130


def main() -> int:
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = from_dict(given["config"])
    run = PlannedRun(given["method"], config.seed, Path(given["folder"]), config, given["changes"])
    # The run folder says how to go on: by the command that started all runs, not by that of this process.
    sys.argv[:] = given["command"]
    return exit_code(lambda: 0 if run_one(run, given["every"]) else INTERRUPTED)


def _end_with_parent() -> None:
    """Stop as by SIGTERM when whoever holds the other end of the standard input is gone."""
    # The descriptor itself: a thread that waits in sys.stdin would hold its lock when Python ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
