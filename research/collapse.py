"""Collapses that are finite: recorded losses to test the detector on, and what each mode of `--on-collapse` saves.

    python -m research.collapse record --data DATA     # losses of runs that collapse and runs that do not, by level
    python -m research.collapse judge                  # what the detector says of each of them, beside the truth
    python -m research.collapse show --data DATA       # runs that collapse, under stop, rollback and ignore
    python -m research.collapse redraw                 # results.md from the JSON alone

DATA is a folder with CIFAR-10 (see docs/data.md); garments and digits are in the package. The rules were written
first: docs/evidence/collapse/plan.md. Recorded runs of one group are trained side by side (`torch.vmap`).
"""

import argparse
import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, stack_module_state
from torch.nn.attention import SDPBackend, sdpa_kernel

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.errors import CollapseError, NonFiniteError
from scalelong.files import append_json_line, digest, read_json_lines
from scalelong.noise import LEVELS, NoiseProcess, mean_square, noise_levels, target
from scalelong.runs import (
    CheckpointConfig,
    GuardConfig,
    ImagesConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainConfig,
    read_metrics,
)
from scalelong.stability.collapse import Collapse, CollapseDetector
from scalelong.training import train

FOLDER = Path("docs/evidence/collapse")
RECORDS = "losses.npz"


# Recording


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    name: str
    data: str
    depth: int
    lr: float
    batch: int
    seeds: int
    steps: int = 300
    scaling: str = "none"
    prediction: Any = "epsilon"
    dim: int = 64

    @property
    def run_seeds(self) -> range:
        return range(7000, 7000 + self.seeds)


GROUPS = (
    Group("cifar10, depth 24, 8e-3", "cifar10", 24, 8e-3, 8, 8),
    Group("digits, batch 1", "digits", 6, 2e-3, 1, 4, steps=800),
    Group("digits, v, batch 32", "digits", 6, 2e-3, 32, 4, prediction="v"),
    Group("digits, x0, batch 8", "digits", 6, 2e-3, 8, 4, prediction="x0"),
    Group("garments, depth 24, 12e-3", "garments", 24, 12e-3, 8, 6),
    Group("garments, depth 8, batch 4", "garments", 8, 2e-3, 4, 4, steps=600),
    Group("cifar10, depth 24, 8e-3, CS", "cifar10", 24, 8e-3, 8, 4, scaling="cs:0.7"),
    Group("cifar10, depth 8, 12e-3, batch 2", "cifar10", 8, 12e-3, 2, 4),
    Group("digits, depth 24, 16e-3, batch 2", "digits", 24, 16e-3, 2, 3),
)


def load_images(name: str, data: Path | None) -> Tensor:
    """The first 2,000 training images in [-1, 1]. Photographs are box-filtered to 16x16."""
    whole = load_data(str(data) if name == "cifar10" and data is not None else name)
    images = to_float(whole.fetch(range(min(2000, len(whole)))).images)
    return F.avg_pool2d(images, 2) if images.shape[-1] == 32 else images


def batches(images: Tensor, seed: int, size: int, process: NoiseProcess) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x_0, times and ε of every step of a run; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x0 = images[torch.randint(len(images), (size,), generator=generator)]
        t = process.times(torch.rand(size, generator=generator))
        yield x0, t, torch.randn(x0.shape, generator=generator)


def network(group: Group, images: Tensor, seed: int) -> sl.UViT:
    torch.manual_seed(seed)
    size = images.shape[-1]
    return sl.UViT(
        image_size=size,
        patch_size=size // 4,
        channels=images.shape[1],
        dim=group.dim,
        depth=group.depth,
        heads=4,
        init_std=0.0566,
        scaling=group.scaling,
    )


def train_group(group: Group, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every run, step and level: number of images, their mean loss, and that of the zero predictor."""
    process, seeds = NoiseProcess(), group.run_seeds
    models = [network(group, images, seed) for seed in seeds]
    shell = models[0]
    parameters, buffers = stack_module_state(models)
    optimizer = torch.optim.AdamW(parameters.values(), lr=group.lr, betas=(0.9, 0.99), weight_decay=0.03, fused=True)
    streams = [batches(images, seed, group.batch, process) for seed in seeds]
    counts = torch.zeros(len(seeds), group.steps, LEVELS)
    sums, zeros = torch.zeros_like(counts), torch.zeros_like(counts)

    def losses(weights: dict[str, Tensor], state: dict[str, Tensor], x: Tensor, t: Tensor, wanted: Tensor) -> Tensor:
        return mean_square(functional_call(shell, (weights, state), (x, t)) - wanted)

    for step in range(group.steps):
        for entry in optimizer.param_groups:
            entry["lr"] = group.lr * min(1.0, (step + 1) / 50)
        drawn = [next(stream) for stream in streams]
        x = torch.stack([process.add_noise(x0, noise, t) for x0, t, noise in drawn])
        wanted = torch.stack([target(process, group.prediction, x0, noise, t) for x0, t, noise in drawn])
        t = torch.stack([entry[1] for entry in drawn])
        with sdpa_kernel(SDPBackend.MATH):  # torch has no batching rule for its fused attention
            loss = torch.vmap(losses)(parameters, buffers, x, t, wanted)
            optimizer.zero_grad()
            loss.mean(dim=1).sum().backward()
        optimizer.step()
        levels = noise_levels(process, t)
        for into, values in (
            (counts, torch.ones_like(loss)),
            (sums, loss.detach()),
            (zeros, wanted.square().flatten(2).mean(2)),
        ):
            into[:, step].scatter_add_(1, levels, values)
    return counts, sums / counts.clamp_min(1), zeros / counts.clamp_min(1)


# Losses as one byte each: logarithmic from LEAST to MOST, so that the files stay small

LEAST, MOST = 1e-3, 1e3


def packed(values: Tensor) -> Any:
    logs = (values.double().clamp(LEAST, MOST) / LEAST).log() / np.log(MOST / LEAST)
    return torch.where(values.isfinite(), (1 + 254 * logs).round(), 255).to(torch.uint8).numpy()


def unpacked(codes: Any) -> Any:
    return LEAST * (MOST / LEAST) ** ((codes.astype(np.float64) - 1) / 254)


@dataclass(frozen=True)
class Record:
    """The losses of one run: arrays of (steps, LEVELS)."""

    group: Group
    seed: int
    counts: Any
    losses: Any
    zeros: Any

    @property
    def name(self) -> str:
        return f"{self.group.name}, seed {self.seed}"

    @property
    def mean_losses(self) -> Any:
        return (self.counts * self.losses).sum(1) / self.counts.sum(1)

    @property
    def mean_zeros(self) -> Any:
        return (self.counts * self.zeros).sum(1) / self.counts.sum(1)


def record(folder: Path, data: Path | None) -> None:
    """Train the groups that are missing, one file each, then join them."""
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    paths = [parts / f"{digest(json.dumps(asdict(group)).encode())[:12]}.npz" for group in GROUPS]
    for group, path in zip(GROUPS, paths, strict=True):
        if path.exists():
            continue
        began = time.process_time()
        counts, losses, zeros = train_group(group, load_images(group.data, data))
        np.savez_compressed(
            path,
            group=json.dumps(asdict(group)),
            counts=counts.to(torch.uint8).numpy(),
            losses=packed(losses),
            zeros=packed(zeros),
        )
        seconds = time.process_time() - began
        last = (counts * losses)[:, -50:].sum((1, 2)) / counts[:, -50:].sum((1, 2))
        ends = " ".join(f"{value:.2f}" for value in last)
        print(f"{group.name}: {group.seeds} runs, {seconds:.0f} s of processor time, last losses {ends}", flush=True)
    joined: dict[str, Any] = {}
    for number, path in enumerate(paths):
        with np.load(path) as part:
            joined |= {f"{number}-{name}": part[name] for name in part.files}
    np.savez_compressed(folder / RECORDS, **joined)
    print(f"{folder / RECORDS}: {(folder / RECORDS).stat().st_size / 1000:.0f} KB")


def read_records(path: Path = FOLDER / RECORDS) -> list[Record]:
    found = []
    with np.load(path) as file:
        for key in [name for name in file.files if name.endswith("-group")]:
            number = key.partition("-")[0]
            group = Group(**json.loads(str(file[key])))
            counts, losses, zeros = (file[f"{number}-{name}"] for name in ("counts", "losses", "zeros"))
            for row, seed in enumerate(group.run_seeds):
                values = counts[row].astype(float), unpacked(losses[row]), unpacked(zeros[row])
                found.append(Record(group, seed, *values))
    return found


# The truth about a recorded run, and what the detector says

LEARNED, LATE, WITHIN = 0.2, 30, 30


def truth(run: Record) -> int | None:
    """The step at which the run collapses, by the whole curve; 0 if it leaves too late to tell; None if healthy."""
    loss, zero = np.cumsum([0, *run.mean_losses]), np.cumsum([0, *run.mean_zeros])
    steps = len(loss) - 1

    def learned(start: int, length: int) -> float:
        stop = min(steps, start + length)
        return 1 - (loss[stop] - loss[start]) / (zero[stop] - zero[start])

    best = 0.0
    for step in range(20, steps - 9):
        best = max(best, learned(step - 20, 20))
        if best >= LEARNED and learned(step, 10) < best / 2 and learned(step, 50) < best / 2:
            return step if steps - step >= LATE else 0
    return None


def alarms(run: Record, *, by_level: bool = True) -> list[Collapse]:
    """The collapses that the detector finds: from losses by noise level, or from the mean loss of each step alone."""
    detector = CollapseDetector(levels=LEVELS) if by_level else CollapseDetector(zero_loss=float(run.mean_zeros.mean()))
    found = []
    for step, (counts, losses, zeros) in enumerate(zip(run.counts, run.losses, run.zeros, strict=True), start=1):
        if by_level:
            event = detector.add_levels(step, list(counts), list(counts * losses), list(counts * zeros))
        else:
            event = detector.add(step, float((counts * losses).sum() / counts.sum()))
        found += [event] if isinstance(event, Collapse) else []
    return found


def judged(run: Record, *, by_level: bool = True) -> tuple[str, int | None, int | None]:
    """(verdict, step of the collapse, step of the first alarm)."""
    collapsed, found = truth(run), alarms(run, by_level=by_level)
    first = found[0].step if found else None
    if collapsed == 0:
        return "not counted", collapsed, first
    if collapsed is None:
        return ("false alarm" if found else "healthy, quiet"), collapsed, first
    if first is None or first > collapsed + WITHIN:
        return "missed", collapsed, first
    return ("early alarm" if first < collapsed - WITHIN else "found"), collapsed, first


def judge(folder: Path) -> str:
    """A table of all groups, by level and by mean loss."""
    runs = read_records(folder / RECORDS)
    lines = ["| group | runs | collapsed | by level: found, false | steps to the alarm | by mean loss: found, false |"]
    lines += ["|---|---|---|---|---|---|"]
    for group in [*dict.fromkeys(run.group for run in runs), None]:
        mine = [run for run in runs if group is None or run.group == group]
        levels, means = ([judged(run, by_level=how) for run in mine] for how in (True, False))
        late = sorted(first - began for verdict, began, first in levels if verdict == "found" and began and first)
        cells = [f"{sum(v == 'found' for v, *_ in each)}, {_false(each)}" for each in (levels, means)]
        collapsed = sum(bool(began) for _, began, _ in levels)
        spread = f"{late[0]} to {late[-1]}" if late else "-"
        name = "**all**" if group is None else group.name
        lines.append(f"| {name} | {len(mine)} | {collapsed} | {cells[0]} | {spread} | {cells[1]} |")
    late = [run.name for run in runs if truth(run) == 0]
    return "\n".join([*lines, "", f"Left in the last {LATE} steps and not counted: {', '.join(late) or 'none'}."])


def _false(verdicts: list[tuple[str, int | None, int | None]]) -> int:
    return sum(verdict in ("false alarm", "early alarm") for verdict, *_ in verdicts)


# What each mode saves

RUNS = "runs.jsonl"
WANTED, MOST_SEEDS = {12e-3: 6, 8e-3: 4}, 8
"""Runs that collapse, of each data set, by rate; the seeds that are tried."""
MODES = ("stop", "rollback", "ignore")


def show_config(data: str, lr: float, seed: int, mode: Any) -> TrainConfig:
    return TrainConfig(
        data=data,
        model_options={"patch_size": 4, "dim": 64, "depth": 24, "heads": 4, "init_std": 0.0566},
        steps=300,
        batch_size=8,
        seed=seed,
        images=ImagesConfig(held_out=256),
        optimizer=OptimizerConfig(lr=lr, betas=(0.9, 0.99), weight_decay=0.03, warmup=50),
        checkpoints=CheckpointConfig(save_every=20),
        logging=LoggingConfig(log_every=10, trackers=(), samples_every=0, held_out_every=300),
        guard=GuardConfig(on_collapse=mode),
    )


def prepared(name: str, work: Path, data: Path | None) -> str:
    """2,256 images: 2,000 to train on, the others held out. Photographs are box-filtered to 16x16."""
    if name != "cifar10":
        return name
    path = work / "cifar10.npz"
    if not path.exists():
        whole = load_data(str(data) if data is not None else name)
        images = F.avg_pool2d(whole.fetch(range(2256)).images.float(), 2).round().to(torch.uint8)
        np.savez(path, images=images.permute(0, 2, 3, 1).numpy())
    return str(path)


def outcome(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Train, or continue, and say what became of it."""
    began, stopped = time.process_time(), None
    try:
        train(config, folder, quiet=True)
    except (CollapseError, NonFiniteError) as error:
        stopped = str(error)
    lines = read_metrics(folder)
    losses = [line["loss"] for line in lines if "loss" in line and "learning_rate" in line]
    path = folder / "rollbacks.json"
    rollbacks = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    last = max(line["step"] for line in lines)
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    return {
        "finished": stopped is None,
        "held_out": round(held_out[-1], 4) if held_out and stopped is None else None,
        "best": round(min(losses), 4),
        "last": round(losses[-1], 4),
        "steps": last + sum(entry["bad_step"] - entry["to_step"] for entry in rollbacks),
        "rollbacks": [{name: entry[name] for name in ("bad_step", "to_step")} for entry in rollbacks],
        "stopped": stopped,
        "seconds": round(time.process_time() - began, 1),
    }


def show(folder: Path, work: Path, data: Path | None) -> None:
    """Cell by cell: seeds until enough have collapsed, each under all modes. What is finished is not done again."""
    work.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUNS
    done = {(e["data"], e["lr"], e["seed"], e["mode"]): e for e in (read_json_lines(path) if path.exists() else [])}

    def run(name: str, lr: float, seed: int, mode: str) -> dict[str, Any]:
        key = name, lr, seed, mode
        if key not in done:
            place = work / f"{name}-{lr:g}-{seed}"
            if mode != "stop":  # goes on from the checkpoints of the run that stopped, as a user would
                shutil.copytree(f"{place}-stop", f"{place}-{mode}", symlinks=True, dirs_exist_ok=True)
            config = show_config(prepared(name, work, data), lr, seed, mode)
            found = outcome(config, place.with_name(f"{place.name}-{mode}"))
            done[key] = {"data": name, "lr": lr, "seed": seed, "mode": mode, **found}
            append_json_line(path, done[key])
            print(*key, found["held_out"], found["steps"], f"{found['seconds']:.0f} s", flush=True)
        return done[key]

    def collapsed(name: str, lr: float) -> int:
        mine = [entry for entry in done.values() if (entry["data"], entry["lr"]) == (name, lr)]
        return sum(entry["mode"] == "stop" and not entry["finished"] for entry in mine)

    for lr, wanted in WANTED.items():
        for number in range(MOST_SEEDS):
            for name in ("garments", "cifar10"):
                known = (name, lr, number, "stop") in done
                if (known or collapsed(name, lr) < wanted) and not run(name, lr, number, "stop")["finished"]:
                    for mode in MODES[1:]:
                        run(name, lr, number, mode)


def modes_table(folder: Path) -> str:
    """A row per run that collapses, and the counts."""
    path = folder / RUNS
    entries = read_json_lines(path) if path.exists() else []
    by_key = {(e["data"], e["lr"], e["seed"], e["mode"]): e for e in entries}
    stopped = [e for e in entries if e["mode"] == "stop" and not e["finished"]]
    lines = [
        "| data | rate | seed | stopped at | mode | ends well | held-out loss | steps | rollbacks |",
        "|---" * 9 + "|",
    ]
    counts: dict[str, list[bool]] = {}
    for stop in stopped:
        found_at = re.match(r"step (\d+):", stop["stopped"])
        for mode in MODES:
            entry = by_key.get((stop["data"], stop["lr"], stop["seed"], mode))
            if entry is None:
                continue
            well = entry["finished"] and entry["held_out"] is not None and entry["held_out"] < 0.5
            counts.setdefault(mode, []).append(well)
            back = ", ".join(f"{r['bad_step']} → {r['to_step']}" for r in entry["rollbacks"]) or "-"
            lines.append(
                f"| {stop['data']} | {stop['lr']:g} | {stop['seed']} | {found_at[1] if found_at else '-'} | {mode} | "
                f"{'yes' if well else 'no'} | {entry['held_out'] or '-'} | {entry['steps']} | {back} |"
            )
    calm = sum(e["finished"] for e in entries if e["mode"] == "stop")
    said = "; ".join(f"{mode} {sum(found)} of {len(found)}" for mode, found in counts.items())
    return "\n".join([*lines, "", f"End well: {said or 'none yet'}. Seeds that did not collapse: {calm}."])


def redraw(folder: Path) -> None:
    text = (
        "# Collapses: all results\n\nWritten by `python -m research.collapse redraw` from the files beside it. "
        "Meaning: [README](README.md); rules: [plan](plan.md).\n\n## The detector on recorded runs\n\n"
        f"{judge(folder)}\n\n"
        f"## What each mode saves\n\n{modes_table(folder)}\n"
    )
    (folder / "results.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.collapse", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "record": "train and record losses",
        "judge": "what the detector says of the recorded losses",
        "show": "train runs that collapse, under each mode",
        "redraw": "results.md from the JSON alone",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--folder", type=Path, default=FOLDER)
        if name in ("record", "show"):
            command.add_argument("--data", type=Path, help="a folder with CIFAR-10")
        if name == "show":
            command.add_argument("--work", type=Path, default=Path("runs/collapse"), help="where the runs are kept")
    options = parser.parse_args()
    if options.command == "record":
        record(options.folder, options.data)
    elif options.command == "show":
        show(options.folder, options.work, options.data)
    elif options.command == "judge":
        print(judge(options.folder))
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
