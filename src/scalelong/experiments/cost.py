"""What a sweep will cost, before it starts: steps, and hours of cores or GPUs.

    print(cost_of(runs, make_engine("slurm", gpus=1), step_time=0.12))
    48 runs, 24,000,000 steps to go; 0.12 s per step (given): 800 GPU hours

The seconds of a step are given, or come from runs of the same network in this sweep, or are measured on this machine. A
step is a training step: held-out losses, samples and scores come on top.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..console import duration
from ..errors import InvalidConfigError
from ..runs.config import TrainConfig, flatten, to_dict
from ..runs.model import load_run_data
from ..runs.processes import make_accelerator
from ..training.sizing import step_seconds
from .engines import Engine
from .records import last_line
from .runs import PlannedRun
from .sweeps import of_threads

StepTime = float | Literal["measure"] | None
"""Seconds, or "measure"; None measures where the runs are on this machine, and otherwise does without."""

SAME_SPEED = ("seed", "scaling", "steps", "logging.", "checkpoints.", "guard.", "optimizer.lr", "optimizer.warmup")
"""Fields that the time of a step does not depend on, or hardly."""
PATIENCE = 0.3
_NOWHERE = Path(".no-run")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the runs that are not finished. Print it."""

    runs: int
    steps: int
    seconds: float | None
    """Of all steps, one after the other; None where the time of a step is not known."""
    source: str
    """Where the time of a step comes from."""
    cores: int
    """Of each run."""
    gpus: int
    at_once: int | None
    """Runs at a time; None if the engine decides."""

    @property
    def hours(self) -> float | None:
        """Of GPUs where runs have some, otherwise of cores."""
        return None if self.seconds is None else self.seconds / 3600 * (self.gpus or self.cores)

    def __str__(self) -> str:
        told = f"{self.runs} runs, {self.steps:,} steps to go"
        if self.seconds is None or self.hours is None:
            return (
                f"{told}; to know the hours before, give --step-time SECONDS, or --step-time measure to time a step on "
                f"this machine"
            )
        hours = f"{self.hours:.2g}" if self.hours < 10 else f"{self.hours:,.0f}"
        until = "" if self.at_once is None else f", about {duration(self.seconds / self.at_once)} with {self.at_once} "
        until += "at a time" if until else ""
        pace = self.seconds / max(1, self.steps)
        kind = "GPU" if self.gpus else "core"
        return f"{told}; {pace:.3g} s per step ({self.source}): {hours} {kind} hours{until}"


def cost_of(runs: Sequence[PlannedRun], engine: Engine, step_time: StepTime = None) -> Cost:
    """Runs with the same network, batch and precision take equally long for a step: one of each is timed."""
    waiting = [run for run in runs if not run.finished]
    steps = {run.folder: max(0, run.config.steps - steps_done(run)) for run in waiting}
    threads = engine.threads(max(1, len(waiting)))
    paces: dict[str, float | None] = {}
    sources: set[str] = set()
    for run in waiting:
        group = _speed_group(run.config)
        if group not in paces:
            like = [other for other in runs if _speed_group(other.config) == group]
            paces[group], source = _pace(like, engine, step_time, threads)
            sources.add(source)
    seconds = [(paces[_speed_group(run.config)], steps[run.folder]) for run in waiting]
    known = [pace * count for pace, count in seconds if pace is not None]
    return Cost(
        runs=len(waiting),
        steps=sum(steps.values()),
        seconds=sum(known) if len(known) == len(seconds) else None,
        source=", ".join(sorted(sources)),
        cores=threads,
        gpus=_gpus(engine),
        at_once=engine.at_once(max(1, len(waiting))),
    )


def range_cost(config: TrainConfig, runs: int, steps: int, engine: Engine, step_time: StepTime = None) -> Cost:
    """Of the runs of a range, which have one thread each. Those that collapse end early."""
    like = [PlannedRun("none", config.seed, _NOWHERE, config)]
    pace, source = _pace(like, engine, step_time, threads=1)
    return Cost(
        runs=runs,
        steps=runs * steps,
        seconds=None if pace is None else pace * runs * steps,
        source=source,
        cores=1,
        gpus=_gpus(engine),
        at_once=engine.at_once(max(1, runs)),
    )


def parse_step_time(text: str | None) -> StepTime:
    """The value of --step-time."""
    if text is None or text == "measure":
        return text  # type: ignore[return-value]
    try:
        seconds = float(text)
        if not 0 < seconds < 1e6:
            raise ValueError
    except ValueError as error:
        raise InvalidConfigError(f"--step-time must be seconds above 0, or measure; got {text!r}") from error
    return seconds


def steps_done(run: PlannedRun) -> int:
    line = last_line(run.folder, "loss")
    return 0 if line is None else int(line["step"])


def _speed_group(config: TrainConfig) -> str:
    values = {name: value for name, value in flatten(to_dict(config)).items() if not name.startswith(SAME_SPEED)}
    return json.dumps(values, sort_keys=True, default=str)


def _pace(runs: Sequence[PlannedRun], engine: Engine, step_time: StepTime, threads: int) -> tuple[float | None, str]:
    if isinstance(step_time, float | int):
        return float(step_time), "given"
    if step_time is None:
        lines = [line for run in runs if (line := last_line(run.folder, "seconds")) and line["step"] > 0]
        if lines:
            paces = sorted(line["seconds"] / line["step"] for line in lines)
            return paces[len(paces) // 2], "from runs of this sweep"
        if not engine.here:
            return None, ""
    config = runs[0].config
    with of_threads(threads):
        shape = load_run_data(config).shape
        return step_seconds(config, shape, make_accelerator(config, "."), patience=PATIENCE), "measured here, now"


def _gpus(engine: Engine) -> int:
    if engine.gpus is not None:
        return engine.gpus
    return 1 if getattr(engine, "devices", ()) else 0
