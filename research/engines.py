"""A sweep of 12 small runs that is killed on one engine and continued on another, against one that nobody disturbed.

    python -m research.engines out/ --legs local:submitit submitit:slurm slurm:ray ray:local --address 127.0.0.1:6379

Each leg starts the same `scalelong compare` on its first engine, waits until some runs are finished and another one is
in the middle, kills everything with SIGKILL (the command, its workers, and what waits in SLURM's queue), and gives the
same command with the second engine. On SLURM and submitit one job is preempted on the way as well (--preempt). What is
compared: the weights of every run, byte by byte; all that was recorded, and comparison.json, but for times.

docs/sweeps.md says how to start a SLURM of one node and a Ray cluster of two.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scalelong.console import show_table
from scalelong.errors import InvalidConfigError, NoRunsError, RunFailedError
from scalelong.experiments.progress import UnitProgress, read_progress
from scalelong.experiments.units import units_of

METHODS, SEEDS = ("none", "cs:0.7", "ls"), 4
STEPS, SAVE_EVERY = 60, 10
CONFIG = f"""\
steps: {STEPS}
batch_size: 8
model_options: {{patch_size: 4, dim: 16, depth: 4, heads: 2}}
images: {{held_out: 32}}
logging: {{log_every: 5, held_out_every: 20, samples_every: 0}}
checkpoints: {{save_every: {SAVE_EVERY}, keep_last: 1}}
"""
TIMES = ("seconds", "seconds_per_step", "images_per_second")
"""What differs between two runs on the same machine."""
KILL_AT = 3
"""Finished runs at which a leg is killed, as soon as another run is in the middle."""
PATIENCE = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.engines", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the sweeps; the undisturbed one is kept and used again")
    parser.add_argument("--legs", nargs="+", default=["local:submitit", "submitit:local"], metavar="FIRST:THEN")
    parser.add_argument("--address", help="of the Ray cluster")
    parser.add_argument("--partition", help="of SLURM")
    parser.add_argument("--preempt", action="store_true", help="on SLURM and submitit, preempt a job on the way")
    options = parser.parse_args()
    reference = options.out / "undisturbed"
    print("undisturbed, local", flush=True)
    finish(command(reference, "local", options), reference)
    rows = [leg(text, reference, options) for text in options.legs]
    print()
    show_table(rows, left=True)
    return 0 if all(row["weights"] == row["records"] == "12 of 12" for row in rows) else 1


def command(out: Path, engine: str, options: argparse.Namespace) -> list[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    config = out.parent / "small.yaml"
    config.write_text(CONFIG)
    own = {
        "ray": ["--address", options.address] if options.address else [],
        "slurm": ["--partition", options.partition] if options.partition else [],
    }.get(engine, [])
    # Two runs at a time, three runs in one process: to start one costs more than to train so small a network.
    jobs = ["--jobs", "2", "--cpus-per-run", "1", "--runs-per-job", "3", "--engine", engine, *own]
    return [
        *(sys.executable, "-m", "scalelong", "compare", "--recipe", "digits-tiny", "--config", str(config)),
        *("--methods", ",".join(METHODS), "--seeds", str(SEEDS), "--scores", "0", "--every", "20"),
        *("--out", str(out), "--step-time", "0.02", *jobs),
    ]


def leg(text: str, reference: Path, options: argparse.Namespace) -> dict[str, str]:
    first, _, then = text.partition(":")
    if not then:
        raise InvalidConfigError(f"--legs are written FIRST:THEN, got {text!r}")
    out = options.out / f"{first}-{then}"
    shutil.rmtree(out, ignore_errors=True)
    print(f"\n{first}, killed, then {then}", flush=True)
    at_kill = kill_in_the_middle(command(out, first, options), out, first)
    preempted = finish(command(out, then, options), out, then if options.preempt else "")
    weights, records, table = compare(reference, out)
    return {
        "killed on": first,
        "finished then": f"{at_kill['finished']} of 12",
        "in the middle": ", ".join(at_kill["middle"]),
        "continued on": then,
        "preempted": preempted or "-",
        "weights": f"{weights} of 12",
        "records": f"{records} of 12",
        "comparison.json": "equal" if table else "differs",
    }


def kill_in_the_middle(words: list[str], out: Path, engine: str) -> dict[str, Any]:
    process = subprocess.Popen(words, start_new_session=True)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RunFailedError(f"the sweep ended with code {process.returncode} before it could be killed")
        runs = runs_of(out)
        middle = [run for run in runs if run.status == "running" and SAVE_EVERY < run.step < run.steps]
        finished = sum(run.status == "finished" for run in runs)
        if finished >= KILL_AT and middle:
            break
        time.sleep(0.02)
    else:
        raise RunFailedError("no run was caught in the middle")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    jobs = sorted({unit.submission[1] for unit in units_of(out)} - {""})
    if engine == "slurm":
        subprocess.run(["scancel", *jobs], check=True)
    for unit in units_of(out):
        state = unit.state
        if state.alive:
            os.kill(state.process, signal.SIGKILL)
    print(f"killed with {finished} finished, {', '.join(f'{run.name} at {run.step}' for run in middle)}", flush=True)
    return {"finished": finished, "middle": [f"{run.name} at {run.step}" for run in middle]}


def finish(words: list[str], out: Path, preempt_on: str = "") -> str:
    """Carry the sweep to its end. With `preempt_on`, a job of that engine is preempted once. Its run, if one was."""
    process = subprocess.Popen(words)
    preempted = ""
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        if preempt_on in ("slurm", "submitit") and not preempted:
            preempted = preempt(out, preempt_on)
        time.sleep(0.05 if preempt_on else 0.5)
    if process.wait() != 0:
        raise RunFailedError(f"`{' '.join(words[2:])}` ended with code {process.returncode}")
    return preempted


def preempt(out: Path, engine: str) -> str:
    """Send the signal by which submitit learns of a preemption, to the job of a run that is in the middle."""
    for run in runs_of(out):
        if run.status != "running" or not SAVE_EVERY < run.step < run.steps or engine not in run.where:
            continue
        unit = next(unit for unit in units_of(out) if unit.name == run.name)
        if engine == "slurm":
            subprocess.run(["scancel", "--signal=USR2", unit.submission[1]], check=False)
        else:
            parent = Path(f"/proc/{unit.state.process}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGUSR2)
        return f"{run.name} at {run.step}"
    return ""


def runs_of(out: Path) -> list[UnitProgress]:
    try:
        return read_progress(out).runs
    except NoRunsError:  # the command has not begun
        return []


# What is compared


def compare(reference: Path, out: Path) -> tuple[int, int, bool]:
    """Runs with equal weights, runs with equal records, and whether the tables are equal."""
    runs = sorted(path.parent.name for path in reference.glob("*/config.yaml"))
    weights = sum(digest(reference / run) == digest(out / run) for run in runs)
    records = sum(recorded(reference / run) == recorded(out / run) for run in runs)
    table = [untimed(json.loads((folder / "comparison.json").read_text())) for folder in (reference, out)]
    return weights, records, table[0] == table[1]


def digest(run: Path) -> str:
    """Of the weights, raw and averaged, of the last checkpoint."""
    found = hashlib.sha256()
    for name in ("model.safetensors", "ema.safetensors"):
        found.update((run / "checkpoints" / f"step-{STEPS:08d}" / name).read_bytes())
    return found.hexdigest()


def recorded(run: Path) -> list[Any]:
    return [untimed(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(value: Any) -> Any:
    if isinstance(value, list):
        return [untimed(each) for each in value]
    if isinstance(value, dict):
        return {name: untimed(each) for name, each in value.items() if name not in TIMES}
    return value


if __name__ == "__main__":
    sys.exit(main())
