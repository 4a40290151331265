"""Carry out a plan file: train what is missing, then write the page, the figure and the verdict by the plan's rule.

    python -m research.study research/plans/lasts.yaml --out docs/evidence/lasts --data cifar10=FOLDER --jobs 2

A plan names the question, its kind, cells (settings), arms, learning rates, seeds and the rule (`Plan`). Commit it
before the first run. The runs are lines of `runs.jsonl` in the output folder, one for each finished run. The same
command goes on after a kill and does nothing again; with `--redraw` it trains nothing.

Two kinds of question:

lasts   Constant rates. Which arms are alive after all steps? Every arm runs at every rate with every seed. An arm is
        lost in a run if the library's detector finds a collapse, or if the held-out loss at the end is above
        `rule.lost_above`.
buys    Warm-up and cosine. The rate of each arm is the one with the lowest mean held-out loss over `tuning_seeds`.
        With this rate it runs with `seeds`, which chose nothing. How many steps does it need to the loss that the
        baseline has at its end, with the same seed?

Each run is a process of its own with one thread, at low priority (`--jobs 0` stays in this process).
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from scalelong.files import append_json_line, read_json_lines

from .training import Arm, Setting, load_images, train

RUNS = "runs.jsonl"
LOST = 1.0
"""The loss that a lost run counts with where rates are chosen: that of an answer of zero."""


@dataclass(frozen=True)
class Rule:
    """What decides, written before the runs."""

    lost_above: float = 0.5
    """lasts: the held-out loss above which a run is lost that never collapsed, because it never learned."""
    lasts: float = 0.8
    """lasts: an arm lasts in a cell if at least this share of its runs is alive at the end."""
    level: float = 0.05
    """lasts: the level of McNemar's test against the baseline, over all cells, by Holm's correction."""
    aim: float = 2.5
    """buys: how many times fewer steps are wanted."""


@dataclass(frozen=True)
class Run:
    """One training."""

    cell: str
    arm: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Plan:
    title: str
    question: str
    kind: str
    cells: dict[str, Setting]
    arms: dict[str, Arm]
    baseline: str
    rates: dict[str, tuple[float, ...]]
    """Learning rates of each cell."""
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...] = ()
    rule: Rule = field(default_factory=Rule)
    notes: str = ""
    """What was left out, and why."""

    @classmethod
    def read(cls, path: Path) -> "Plan":
        import yaml

        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        shared = values.pop("setting", {})
        rates = values.pop("rates", {})
        cells, own = {}, {}
        for name, cell in values.pop("cells").items():
            cell = dict(cell or {})
            own[name] = tuple(map(float, cell.pop("rates", rates)))
            cells[name] = _made(Setting, {**shared, **cell}, f"cell {name}")
        arms = {}
        for name, arm in values.pop("arms").items():
            arm = dict(arm or {})
            if "rates" in arm:
                arm["rates"] = tuple(map(float, arm["rates"]))
            arms[name] = _made(Arm, arm, f"arm {name}")
        rule = values.pop("rule", {})
        rule.pop("confidence", None)  # earlier plans name it; it was 0.9 in all of them
        rule = _made(Rule, rule, "rule")
        seeds = {key: tuple(values.pop(key, ())) for key in ("seeds", "tuning_seeds")}
        plan = _made(cls, {**values, **seeds, "cells": cells, "arms": arms, "rates": own, "rule": rule}, "plan")
        if plan.kind not in ("lasts", "buys") or plan.baseline not in plan.arms:
            raise SystemExit(f"{path}: kind is lasts or buys, and the baseline one of the arms")
        return plan

    def rates_of(self, cell: str, arm: str) -> tuple[float, ...]:
        return self.arms[arm].rates or self.rates[cell]

    def key(self, run: Run) -> str:
        """A name for all that decides a run, so that lines of another plan are never taken for it."""
        later = ("warmup", "momentum", "model", "share", "precision")  # options that earlier plans did not have
        setting, arm = (
            {name: value for name, value in asdict(thing).items() if not (name in later and value is None)}
            for thing in (self.cells[run.cell], self.arms[run.arm])
        )
        arm.pop("rates")
        text = json.dumps([setting, arm, run.rate, run.seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def runs(self, seeds: Sequence[int]) -> Iterator[Run]:
        """All runs at all rates. Seeds come first: whatever is finished, is finished for all arms."""
        for seed in seeds:
            for cell in self.cells:
                for arm in self.arms:
                    for rate in self.rates_of(cell, arm):
                        yield Run(cell, arm, rate, seed)


def _made(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise SystemExit(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return kind(**values)


class Results:
    """The runs of a plan that are finished."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        path = folder / RUNS
        self.lines = {line["key"]: line for line in (read_json_lines(path) if path.exists() else [])}

    def of(self, run: Run) -> dict[str, Any] | None:
        return self.lines.get(self.plan.key(run))

    def alive(self, run: Run) -> bool | None:
        """None if it is not finished."""
        found = self.of(run)
        if found is None:
            return None
        return found["collapsed"] is None and (found["held_out"] or LOST) < self.plan.rule.lost_above

    def loss(self, run: Run) -> float | None:
        """The held-out loss at the end; a lost run has that of an answer of zero."""
        found = self.of(run)
        return None if found is None else min(LOST, found["held_out"] or LOST) if self.alive(run) else LOST

    def best_rate(self, cell: str, arm: str) -> float | None:
        """The rate that the tuning seeds choose; None before all of them are finished."""
        means = {}
        for rate in self.plan.rates_of(cell, arm):
            losses = [self.loss(Run(cell, arm, rate, seed)) for seed in self.plan.tuning_seeds]
            if any(loss is None for loss in losses) or not losses:
                return None
            means[rate] = fmean(loss for loss in losses if loss is not None)
        return min(means, key=lambda rate: means[rate])

    def missing(self) -> list[Run]:
        """Runs that can be started now."""
        plan = self.plan
        if plan.kind == "lasts":
            return [run for run in plan.runs(plan.seeds) if self.of(run) is None]
        wanted = [run for run in plan.runs(plan.tuning_seeds) if self.of(run) is None]
        for seed in plan.seeds:
            for cell in plan.cells:
                for arm in plan.arms:
                    rate = self.best_rate(cell, arm)
                    if rate is not None and self.of(run := Run(cell, arm, rate, seed)) is None:
                        wanted.append(run)
        return wanted


# Carrying out


def finish(plan: Plan, run: Run, places: dict[str, str], out: Path) -> None:
    """Train a run in this process and append its line."""
    import torch

    torch.set_num_threads(1)
    setting = plan.cells[run.cell]
    measured = train(setting, plan.arms[run.arm], run.rate, run.seed, *load_images(setting, places, out / "images"))
    append_json_line(out / RUNS, {"key": plan.key(run), **asdict(run), **measured})


def carry_out(path: Path, plan: Plan, places: dict[str, str], out: Path, jobs: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    began, done = time.monotonic(), 0
    running: dict[Run, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        # A copy, so that an edit of the file cannot mix two plans in one study.
        copy = Path(temporary) / path.name
        copy.write_bytes(path.read_bytes())
        try:
            while True:
                missing = [run for run in Results(plan, out).missing() if run not in running]
                if not missing and not running:
                    return
                if jobs == 0:
                    finish(plan, missing[0], places, out)
                    continue
                for run in missing[: jobs - len(running)]:
                    running[run] = _start(copy, run, places, out)
                time.sleep(0.2)
                for run in [run for run, process in running.items() if process.poll() is not None]:
                    if code := running.pop(run).returncode:
                        raise SystemExit(f"{run} ended with code {code}")
                    done += 1
                    line, minutes = Results(plan, out).of(run) or {}, (time.monotonic() - began) / 60
                    print(f"{minutes:6.1f} min, run {done}: {run}, {_summary(line)}", flush=True)
        finally:
            for process in running.values():
                process.terminate()


def _start(path: Path, run: Run, places: dict[str, str], out: Path) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "research.study", str(path), "--out", str(out), "--run", json.dumps(asdict(run))]
    for name, place in places.items():
        words += ["--data", f"{name}={place}"]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: os.nice(10))


def _summary(line: Mapping[str, Any]) -> str:
    fate = f"lost at {line.get('collapsed')}" if line.get("collapsed") else f"held-out loss {line.get('held_out')}"
    return f"{fate}, {line.get('seconds')} s"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.study", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the results (default: docs/evidence/NAME of the plan)")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=PLACE", help="where a data set is")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1; 0: in this one)")
    parser.add_argument("--redraw", action="store_true", help="page and figure of the runs that are there")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    plan = Plan.read(options.plan)
    places = dict(text.split("=", 1) for text in options.data)
    out = options.out or Path("docs/evidence") / options.plan.stem
    if options.run:
        finish(plan, Run(**json.loads(options.run)), places, out)
        return
    if not options.redraw:
        carry_out(options.plan, plan, places, out, options.jobs)
    from .page import write_page

    print(write_page(plan, Results(plan, out), options.plan, out))


if __name__ == "__main__":
    main()
