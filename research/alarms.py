"""False alarms: long healthy runs of tiny networks, and what the rule of collapse says of each of them.

    python -m research.alarms record FOLDER    # losses of every step, by noise level, of all runs
    python -m research.alarms judge FOLDER     # alarms in healthy runs, and how soon collapses are found

Small batches, small networks and few levels learned are where noise is largest against what there is to lose: there a
rule of collapse errs first. A run that was recorded is not trained again.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, stack_module_state
from torch.nn.attention import SDPBackend, sdpa_kernel

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.noise import LEVELS, NoiseProcess, Prediction, mean_square, noise_levels, noisy_and_target
from scalelong.randomness import generator
from scalelong.stability import Collapse, CollapseDetector

from .training import OPTIMIZERS, adamw

STEPS = 4000
WINDOW = 400
"""Steps over which the truth is read off a curve."""
WITHIN = 30
"""A collapse is to be found within so many steps."""
OBJECTIVES: dict[str, Prediction] = {"vp": "epsilon", "vp v": "v", "flow": "flow", "edm": "edm"}


@dataclass(frozen=True)
class Group:
    """Runs that differ in data and objective, trained side by side (`torch.vmap`)."""

    batch: int
    scaling: str
    lr: float
    dim: int = 8
    depth: int = 2
    seed: int = 0
    optimizer: str = "adamw"

    @property
    def runs(self) -> list[tuple[str, str]]:
        every: list[tuple[str, str]] = list(product(("digits", "garments"), OBJECTIVES))
        return every if self.optimizer == "adamw" else every[:: len(every) // 2]

    def name(self, run: tuple[str, str]) -> str:
        kind = f"{self.optimizer}, {self.scaling.replace(':', ' ')}, dim {self.dim}, depth {self.depth}, {self.lr:g}"
        return f"{', '.join(run)}, batch {self.batch}, {kind}, seed {self.seed}"


def groups() -> Iterator[Group]:
    for batch in (1, 2, 4, 8):
        yield Group(batch, "ls", 1e-3)
        yield Group(batch, "cs", 2e-3, dim=16, depth=4, seed=1)
    yield Group(2, "ls", 2e-4, seed=2)
    yield Group(1, "none", 4e-3, seed=3)
    for batch in (1, 2, 8):
        yield Group(batch, "none", 2e-3, dim=16, depth=4, seed=4, optimizer="muon")


def images(data: str) -> Tensor:
    """1,500 images of 8 by 8 pixels."""
    found = to_float(load_data(data).fetch(range(1500)).images)
    return F.avg_pool2d(found, found.shape[-1] // 8)


def build(group: Group, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = sl.UViT(image_size=8, patch_size=4, channels=1, dim=group.dim, depth=group.depth, heads=1)
    return sl.scale_skips_(model, group.scaling)


def record(group: Group, data: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Of each run: images, losses and zero losses of each step by noise level, (steps, LEVELS) each."""
    if group.optimizer != "adamw":
        return [record_alone(group, run, data) for run in group.runs]
    models = [build(group, group.seed + 100 * place) for place in range(len(group.runs))]
    parameters, buffers = stack_module_state(models)
    optimizer = adamw(parameters.values())
    optimizer.param_groups[0]["lr"] = group.lr

    def answer(values: Any, fixed: Any, x: Tensor, t: Tensor) -> Tensor:
        return functional_call(models[0], (values, fixed), (x, t))

    sums: list[list[Tensor]] = [[] for _ in models]
    for step in range(STEPS):
        asked = [question(group, run, data, step) for run in group.runs]
        x, t, wanted = (torch.stack([each[i] for each in asked]) for i in range(3))
        with sdpa_kernel(SDPBackend.MATH):
            answers = torch.vmap(answer)(parameters, buffers, x, t)
        losses = (wanted - answers).square().mean((2, 3, 4))
        losses.mean(1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for place, each in enumerate(asked):
            sums[place].append(by_level(each, losses[place].detach()))
    return [dict(zip(("counts", "losses", "zeros"), torch.stack(each, 1).numpy(), strict=True)) for each in sums]


def record_alone(group: Group, run: tuple[str, str], data: dict[str, Tensor]) -> dict[str, Any]:
    model = build(group, group.seed)
    optimizers, sums = OPTIMIZERS[group.optimizer](model), []
    for step in range(STEPS):
        asked = question(group, run, data, step)
        losses = mean_square(asked.wanted - model(asked.x, asked.t))
        losses.mean().backward()
        for optimizer in optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = group.lr
            optimizer.step()
            optimizer.zero_grad()
        sums.append(by_level(asked, losses.detach()))
    return dict(zip(("counts", "losses", "zeros"), torch.stack(sums, 1).numpy(), strict=True))


class Question(NamedTuple):
    x: Tensor
    t: Tensor
    wanted: Tensor
    levels: Tensor


def question(group: Group, run: tuple[str, str], data: dict[str, Tensor], step: int) -> Question:
    kind, _, _ = run[1].partition(" ")
    process, draws, x0 = NoiseProcess(kind), generator(group.seed, *run, step), data[run[0]]  # pyright: ignore
    x0 = x0[torch.randint(len(x0), (group.batch,), generator=draws)]
    t = process.times(torch.rand(group.batch, generator=draws))
    noise = torch.randn(x0.shape, generator=draws)
    x, wanted = noisy_and_target(process, OBJECTIVES[run[1]], x0, noise, t)
    return Question(x, t, wanted, noise_levels(process, t))


def by_level(asked: Question, losses: Tensor) -> Tensor:
    values = (torch.ones_like(losses), losses, mean_square(asked.wanted))
    return torch.stack([torch.zeros(LEVELS).index_add_(0, asked.levels, each) for each in values])


def alarms(found: Any, *, by_level: bool) -> list[Collapse]:
    """The collapses that the rule sees, from losses by noise level or from the mean of each step."""
    counts, losses, zeros = (found[name] for name in ("counts", "losses", "zeros"))
    detector = CollapseDetector(levels=LEVELS) if by_level else CollapseDetector(zero_loss=zeros.sum() / counts.sum())
    events = []
    for step, (c, s, z) in enumerate(zip(counts, losses, zeros, strict=True), start=1):
        levels = detector.add_levels(step, list(c), list(s), list(z)) if by_level else None
        event = levels if by_level else detector.add(step, float(s.sum() / c.sum()))
        events += [event] if isinstance(event, Collapse) else []
    return events


def onset(found: Any) -> int | None:
    """The step from which on a run is lost, by the whole curve: it had learned a fifth, and the next WINDOW / 2 and
    5 WINDOW / 2 steps have lost more than half of that. None for a healthy run."""
    loss, zero = (np.cumsum([0, *found[name].sum(1)]) for name in ("losses", "zeros"))
    steps, window = len(loss) - 1, WINDOW

    def learned(start: int, length: int) -> float:
        stop = min(steps, start + length)
        return 1 - (loss[stop] - loss[start]) / (zero[stop] - zero[start])

    best = 0.0
    for step in range(window, steps - 30):
        best = max(best, learned(step - window, window))
        if best >= 0.2 and learned(step, window // 2) < best / 2 and learned(step, 5 * window // 2) < best / 2:
            return step
    return None


def judge(folder: Path) -> None:
    healthy, false, late, delays = 0, 0, 0, []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            found = {name: file[name] for name in file.files}
        lost = onset(found)
        for by_level in (True, False):
            steps = [event.step for event in alarms(found, by_level=by_level)]
            if lost is None:
                healthy += 1
                false += bool(steps)
            else:
                delays += [steps[0] - lost] if steps else []
                late += not steps or steps[0] - lost > WITHIN
            if steps or lost is not None:
                print(f"{path.stem}: {'healthy' if lost is None else f'lost from step {lost} on'}, alarms at {steps}")
    print(f"{healthy // 2} healthy runs, judged by level and by mean: {false} false alarms")
    print(f"collapses, judged both ways: found after {sorted(delays)} steps; {late} late or missed")


def main() -> None:
    command, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    if command == "record":
        data = {name: images(name) for name in ("digits", "garments")}
        for group in groups():
            paths = [folder / f"{group.name(run)}.npz" for run in group.runs]
            if all(path.exists() for path in paths):
                continue
            for path, found in zip(paths, record(group, data), strict=True):
                np.savez_compressed(path, **found)
            print(group, flush=True)
    judge(folder)


if __name__ == "__main__":
    main()
