"""Time to quality: steps and seconds until the authors' final held-out loss, ours against their loop.

All contenders of a seed train in turns in one process, on the same images, times and noise. The authors' side is their
network, optimiser and rate (warm-up, then constant) in float32, at the best of four rates. With `--official` the
network comes from their checkout; without, it is ours with their start. Then parts are added one after the other, and
last comes what this library does by default. Losses are of averaged weights (a tenth of the steps so far, on every
side alike) on images that nobody trains on, with fixed noise. Looking at them is not timed.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.config import NEW_RUN, NEW_UVIT
from scalelong.data import load_data, to_float
from scalelong.models import fuse_, gain_of_bfloat16
from scalelong.noise import NoiseProcess, even_fractions, mean_square
from scalelong.randomness import generator

from .harness import Settings, Spread, seconds_text

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
"""Given to the authors' loop; the best counts."""
AUTHORS = {"init_std": 0.02, "final_start": "authors", "residual_scaling": "none"}
AVERAGE = 6.94
"""The exponent of the average whose length is a tenth of the steps so far (Karras et al., 2024)."""


@dataclass(frozen=True)
class Task:
    """What all contenders have in common."""

    data: str = "cifar10"
    image: int = 16
    patch: int = 2
    dim: int = 128
    depth: int = 12
    batch: int = 32
    steps: int = 1500
    warmup: int = 50
    look_every: int = 25
    held_out: int = 512

    @property
    def sizes(self) -> dict[str, Any]:
        return {"image_size": self.image, "patch_size": self.patch, "dim": self.dim, "depth": self.depth}


TINY = Task(data="digits", image=8, dim=32, depth=2, batch=4, steps=6, warmup=2, look_every=2, held_out=16)


@dataclass
class Contender:
    """One way to train, at one rate."""

    name: str
    rate: float
    network: dict[str, Any] | None = None
    """Arguments of `sl.UViT`; None is the authors' network."""
    muon: bool = False
    fused: bool = False
    low: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, seconds of training, held-out loss."""


def contenders(low: bool) -> list[Contender]:
    """Parts are added from top to bottom; the last one is what new networks and runs have by default."""
    names = (f"authors, rate {rate:g}" for rate in RATES)
    found = [Contender(name, rate, betas=(0.99, 0.999)) for name, rate in zip(names, RATES, strict=True)]
    parts: dict[str, Any] = {"network": NEW_UVIT}
    rate = NEW_RUN["lr"]
    found.append(Contender("our network (start, branches × 0.3)", rate, **parts))
    found.append(Contender("+ Muon", rate, **(parts := {**parts, "muon": True})))
    if low:
        found.append(Contender("+ bfloat16", rate, **(parts := {**parts, "low": True})))
    found.append(Contender("+ fused blocks: our defaults", rate, **parts, fused=True))
    return found


def load(task: Task) -> tuple[Tensor, Tensor]:
    """Images to train on, and others to look at."""
    whole = load_data(task.data)
    images = to_float(whole.fetch(range(min(len(whole), 20_000))).images)
    images = F.avg_pool2d(images, images.shape[-1] // task.image)
    return images[: -task.held_out], images[-task.held_out :]


def trained(
    task: Task, contender: Contender, seed: int, images: Tensor, held_out: Tensor, make: Callable[..., nn.Module]
) -> Iterator[None]:
    """Train the contender, one step at each `next`, and write its curve."""
    torch.manual_seed(seed)
    model = make(contender, images.shape[1])
    model = fuse_(model) if contender.fused else model
    average = copy.deepcopy(model).requires_grad_(False)
    options: dict[str, Any] = {"lr": contender.rate, "betas": contender.betas, "weight_decay": 0.03}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **options)
    if contender.muon:
        groups = sl.muon_groups(model, lr=contender.rate, weight_decay=0.03)
        optimizer = sl.Muon(groups, betas=contender.betas, **NEW_RUN["optimizer_options"])
    warmup = task.warmup if contender.network is None else min(task.warmup, NEW_RUN["warmup"])
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    process, seconds = NoiseProcess(), 0.0
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for step in range(1, task.steps + 1):
        draws = generator(seed, "quality", step)
        x0 = images[torch.randint(len(images), (task.batch,), generator=draws)]
        t, noise = process.times(torch.rand(task.batch, generator=draws)), torch.randn(x0.shape, generator=draws)
        x = process.add_noise(x0, noise, t)
        began = clock()
        with torch.autocast("cpu", torch.bfloat16) if contender.low else nullcontext():
            output = model(x, t)
        (output.float() - noise).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        with torch.no_grad():
            share = 1 - (1 - 1 / step) ** (AVERAGE + 1)
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, share)
        seconds += clock() - began
        if step % task.look_every == 0 or step == task.steps:
            contender.curve.append((step, seconds, held_out_loss(average, held_out, process)))
        yield


@torch.no_grad()
def held_out_loss(model: nn.Module, images: Tensor, process: NoiseProcess) -> float:
    t, noise = process.times(even_fractions(len(images))), torch.randn(images.shape, generator=generator(0, "held out"))
    parts = zip(process.add_noise(images, noise, t).split(64), t.split(64), noise.split(64), strict=True)
    return float(torch.cat([mean_square(model(x, t) - wanted) for x, t, wanted in parts]).mean())


def quality(task: Task, seeds: int, settings: Settings) -> dict[str, Any]:
    """The table: for each contender the final loss, and steps and seconds until the authors' final loss."""
    task, seeds = (TINY, 2) if settings.quick else (task, settings.rounds or seeds)
    torch.set_num_threads(settings.threads)
    low = gain_of_bfloat16() > 1
    images, held_out = load(task)
    runs = []
    for seed in range(seeds):
        found = contenders(low)
        waiting = [trained(task, each, seed, images, held_out, maker(task, settings)) for each in found]
        while waiting:
            waiting = [each for each in waiting if next(each, False) is None]
        runs.append(found)
    best, rows = compared(runs)
    side = "the authors' checkout" if settings.official else "sl.UViT with the authors' start (no --official was given)"
    notes = [f"The authors' side is {side}, float32, torch's AdamW, best of {len(RATES)} rates: {best}. {seeds} seeds."]
    title = f"Time to quality, U-ViT of width {task.dim} and depth {task.depth} on {task.data}, {task.steps} steps"
    columns = ["", "final loss", "steps to the authors' loss", "seconds to it", "times as fast"]
    curves = {each.name: [run[i].curve for run in runs] for i, each in enumerate(runs[0])}
    return {"title": title, "columns": columns, "rows": rows, "notes": notes, "seconds": curves}


def maker(task: Task, settings: Settings) -> Callable[..., nn.Module]:
    heads = max(1, task.dim // 32)

    def make(contender: Contender, channels: int) -> nn.Module:
        if contender.network is None and settings.official is not None:
            from .theirs import checkout, network_class

            sizes = {"img_size": task.image, "patch_size": task.patch, "in_chans": channels, "embed_dim": task.dim}
            return network_class(checkout(settings.official))(**sizes, depth=task.depth, num_heads=heads)
        return sl.UViT(**task.sizes, channels=channels, heads=heads, **(contender.network or AUTHORS))

    return make


def compared(runs: Sequence[Sequence[Contender]]) -> tuple[str, list[list[str]]]:
    """The name of the best of the authors' rates, and a row for it and for each contender of ours."""
    final = {each.name: Spread.of([run[i].curve[-1][2] for run in runs]) for i, each in enumerate(runs[0])}
    theirs = [each.name for each in runs[0] if each.network is None]
    best = min(theirs, key=lambda name: final[name].median if math.isfinite(final[name].median) else math.inf)
    rows = []
    for i, each in enumerate(runs[0]):
        if each.network is None and each.name != best:
            continue
        reached, ratios = [], []
        for run in runs:
            end = next(other for other in run if other.name == best).curve[-1]
            first = next((point for point in run[i].curve if point[2] <= end[2]), None)
            if first is not None:
                reached.append(first)
                ratios.append(end[1] / first[1])
        row = [each.name, final[each.name].text(lambda value: f"{value:.4f}")]
        if len(reached) < len(runs):
            row += [f"reached by {len(reached)} of {len(runs)} seeds", "–", "–"]
        else:
            row += [Spread.of([float(point[0]) for point in reached]).text(lambda value: f"{value:.0f}")]
            row += [Spread.of([point[1] for point in reached]).text(seconds_text)]
            row += [Spread.of(ratios).text(lambda value: f"{value:.2f}")]
        rows.append(row)
    return best, rows
