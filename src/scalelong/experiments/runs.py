"""How the modules end that are run with `python -m`."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ..diffusion.inputs import NoisyInputs
from ..errors import InvalidConfigError, NonFiniteError, RunFailedError, ScaleLongError
from ..files import write_text
from ..runs.checkpoint import saved_steps
from ..runs.config import TrainConfig, from_dict, to_dict
from ..runs.folder import read_metrics
from ..runs.load import Run
from ..runs.model import RunData, build_model, load_run_data
from ..scaling import as_scaling
from ..stability import Alarm, StabilityMonitor
from ..stability.diagnosis import Diagnosis, diagnose
from ..training import TrainState, train
from ..training.loop import Interrupt


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
        raise InvalidConfigError(f"a variant looks like 'fast: scaling=cs:0.7 lr=2e-3', got {text!r} in {variant!r}")
    path = _path(name)
    if path == "scaling":
        return path, value
    try:
        return path, json.loads(value)
    except json.JSONDecodeError:
        return path, value


def _path(name: str) -> str:
    """Fields have names of their own in all groups, so that the group may be left out."""
    base = TrainConfig()
    known = {field.name: field.name for field in fields(base)}
    for group in [field.name for field in fields(base) if is_dataclass(getattr(base, field.name))]:
        known |= {field.name: f"{group}.{field.name}" for field in fields(getattr(base, group))}
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

DIAGNOSIS = "diagnosis.json"
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
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / DIAGNOSIS, diagnosis.to_json())
    return folder / DIAGNOSIS


def _diagnose(model: nn.Module, data: RunData) -> Diagnosis:
    batch = data.probe(BATCH).arguments(model)
    return diagnose(model, batch, images=data.clean(IMAGES), schedule=data.config.diffusion.schedule)


# What a comparison records besides the trainer's own metrics: the readings of a stability monitor.

PROBE = 16
"""Images in the probe batch."""


class Recording:
    """A hook for `train`. What it returns goes into metrics.jsonl, so that resuming a run keeps it in order."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.monitor: StabilityMonitor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def __call__(self, state: TrainState) -> dict[str, float] | None:
        if self.monitor is None:
            # Made after the first step of this process: the state that is given here is complete and on its device.
            batch = state.data.probe(PROBE, state.accelerator.device).arguments(state.bare)
            self.monitor = StabilityMonitor(state.bare, every=self.every, probe_batch=batch, on_alarm=_say)
            self.monitor.steps = state.step - 1
        reading = self.monitor.step(step=state.step)
        if reading is None:
            return None
        return {name: value for name, value in reading.items() if not name.startswith(("block_rms", "skip_rms"))}


def _say(alarm: Alarm) -> None:
    print(f"alarm at {alarm}", flush=True)


# The runs of a comparison: one per method and seed, each in a run folder of its own.
#
# Runs of one seed differ in what the method says alone, mostly the scaling: they share initial weights, order of data,
# noise and times, because the trainer draws all of them as functions of (seed, step).

DIVERGED = "diverged.json"


@dataclass(frozen=True)
class PlannedRun:
    method: str
    seed: int
    folder: Path
    config: TrainConfig

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

    def divergence(self) -> dict[str, object] | None:
        path = self.folder / DIVERGED
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


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
            raise InvalidConfigError(f"{kind} {', '.join(twice)} is given twice")
    configs = {variant.name: variant.apply(config) for variant in variants}
    return [
        PlannedRun(name, seed, out / f"{prefix}{slug(name)}-seed{seed}", replace(changed, seed=seed))
        for seed in seeds
        for name, changed in configs.items()
    ]


def carry_out(run: PlannedRun, every: int) -> bool:
    """Train, or continue to train, with a reading `every` so many steps. False if it was interrupted.

    A run that diverges is a result, not a failure.
    """
    try:
        with Recording(every) as recording:
            return train(run.config, run.folder, hooks=[recording]).finished
    except NonFiniteError as error:
        write_text(run.folder / DIVERGED, json.dumps({"message": str(error)}))
        return True


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "x"


# Many runs on one machine: as many at a time as there are cores, each with its share of the threads.

POLL_SECONDS = 0.5
LINE_SECONDS = 15.0
"""Seconds between lines of progress where the output is not a terminal."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(runs: int) -> int:
    """Small networks do not use several cores well, so each core gets a run; an accelerator is not shared."""
    return 1 if torch.cuda.is_available() else max(1, min(cores(), runs))


def run_all(runs: Sequence[PlannedRun], every: int, jobs: int | None = None, logs: Path | None = None) -> bool:
    """Carry out the runs that are not finished. False if they were interrupted; all that was done is kept."""
    waiting = [run for run in runs if not run.finished]
    jobs = default_jobs(len(waiting)) if jobs is None else jobs
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already", flush=True)
    if jobs > 1:
        return Pool(runs, every, jobs, logs or runs[0].folder.parent / "logs").work(waiting)
    for number, run in enumerate(waiting, start=1):
        print(f"[{number}/{len(waiting)}] {run.name}", flush=True)
        if not carry_out(run, every):
            return False
    return True


class Pool:
    def __init__(self, runs: Sequence[PlannedRun], every: int, jobs: int, logs: Path) -> None:
        self.runs, self.every, self.jobs, self.logs = runs, every, jobs, logs
        self.active: dict[subprocess.Popen[str], PlannedRun] = {}
        self.live = sys.stdout.isatty()
        self.started = self.printed = time.monotonic()

    def work(self, waiting: list[PlannedRun]) -> bool:
        queue, told = list(waiting), False
        self.logs.mkdir(parents=True, exist_ok=True)
        with Interrupt() as interrupt:
            try:
                while self.active or (queue and not told):
                    while queue and not told and len(self.active) < self.jobs:
                        self._start(queue.pop(0))
                    if interrupt.requested and not told:
                        told = True
                        self._tell_to_stop()
                    told |= self._collect()
                    self._report()
                    time.sleep(POLL_SECONDS)
            finally:
                self._tell_to_stop()
                for process in self.active:
                    process.wait()
        self._report(final=True)
        return not told

    def _start(self, run: PlannedRun) -> None:
        threads = str(max(1, cores() // self.jobs))
        # The process keeps the log open after it is closed here.
        with open(self.log(run), "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "scalelong.experiments.runs"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
        self.active[process] = run
        given: dict[str, Any] = {"folder": str(run.folder), "every": self.every, "config": to_dict(run.config)}
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(given))

    def log(self, run: PlannedRun) -> Path:
        return self.logs / f"{run.name}.txt"

    def _collect(self) -> bool:
        """Take note of processes that ended; True if one was interrupted."""
        interrupted = False
        for process in [process for process in self.active if process.poll() is not None]:
            run = self.active.pop(process)
            if process.returncode == INTERRUPTED:
                interrupted = True
            elif process.returncode != 0:
                tail = "\n".join(self.log(run).read_text(encoding="utf-8").splitlines()[-5:])
                raise RunFailedError(f"{run.name} ended with code {process.returncode}, see {self.log(run)}:\n{tail}")
        return interrupted

    def _tell_to_stop(self) -> None:
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


def _state(run: PlannedRun) -> str:
    # Only lines of the trainer itself have a loss; those of hooks and held-out losses come in between.
    lines = [line for line in read_metrics(run.folder) if "loss" in line]
    if not lines:
        return f"{run.name} starting"
    return f"{run.name} {lines[-1]['step']}/{run.config.steps} loss {lines[-1]['loss']:.3f}"


# One run in a process of its own: `python -m scalelong.experiments.runs`, described on the standard input.

INTERRUPTED = 130


def main() -> int:
    given = json.load(sys.stdin)
    config = from_dict(given["config"])
    run = PlannedRun(config.scaling, config.seed, Path(given["folder"]), config)
    return exit_code(lambda: 0 if carry_out(run, given["every"]) else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
