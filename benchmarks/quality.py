"""Time to quality: steps and seconds until the final held-out loss of others' training, ours against their loop.

All contenders of a seed train in turns in one process, on the same images, times and noise. Of a U-ViT the other side
is the authors' network, optimiser and rate (warm-up, then constant); with `--official` the network comes from their
checkout, without it is ours with their start. Of a UNet it is the network, optimiser and schedule of diffusers' script.
Both are trained in float32, at the best of four rates on a seed that is used for nothing else. Then parts of ours are
added one after the other, down to what this library does by default, and for UNets beyond that. Losses are of averaged
weights (a tenth of the steps so far, on every side alike) on images that nobody trains on, with fixed noise. Looking at
them is not timed.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scalelong as sl
from scalelong.config import NEW_RUN, NEW_UVIT
from scalelong.console import counted
from scalelong.data import load_data, to_float
from scalelong.models import fuse_, gain_of_bfloat16, output_tensor, unet
from scalelong.noise import NoiseProcess, even_fractions, mean_square
from scalelong.randomness import generator
from scalelong.training.sizing import NARROW

from .harness import Settings, Spread, seconds_text

RATES = {"uvit": (5e-4, 1e-3, 2e-3, 4e-3), "unet": (1e-4, 3e-4, 1e-3, 3e-3)}
"""Given to the other side; the best counts."""
TUNING_SEED = 1000
"""On it the rate of the other side is chosen. Seeds that are compared count from 0."""
AUTHORS = {"init_std": 0.02, "final_start": "authors", "residual_scaling": "none"}
AVERAGE = 6.94
"""The exponent of the average whose length is a tenth of the steps so far (Karras et al., 2024)."""


@dataclass(frozen=True)
class Task:
    """What all contenders have in common."""

    model: str = "uvit"
    """"uvit", or "unet" for the preset unet/small."""
    data: str = "cifar10"
    image: int = 16
    patch: int = 2
    dim: int = 128
    depth: int = 12
    batch: int = 32
    steps: int = 1500
    look_every: int = 25
    held_out: int = 512

    @property
    def sizes(self) -> dict[str, Any]:
        return {"image_size": self.image, "patch_size": self.patch, "dim": self.dim, "depth": self.depth}

    def __str__(self) -> str:
        network = "UNet of unet/small" if self.model == "unet" else f"U-ViT of width {self.dim} and depth {self.depth}"
        return f"{network} on {self.data} of {self.image}x{self.image}, {self.steps} steps of {self.batch} images"


TINY: dict[str, Any] = {"data": "digits", "image": 8, "dim": 32, "depth": 2, "batch": 4, "steps": 6, "look_every": 2}
TINY["held_out"] = 16


@dataclass
class Contender:
    """One way to train, at one rate."""

    name: str
    rate: float
    theirs: bool = False
    network: dict[str, Any] = field(default_factory=dict)
    """Arguments of our network."""
    muon: bool = False
    fused: bool = False
    low: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.03
    warmup: int = 50
    cosine: bool = False
    """After the warm-up the rate falls to 0, as diffusers' script has it; else it stays."""
    clip: float = math.inf
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Steps, seconds of training, held-out loss."""


def contenders(task: Task, low: bool) -> list[Contender]:
    """Parts are added from top to bottom; the last one is what `scalelong train` does by default."""
    rates = RATES[task.model]
    if task.model == "unet":
        script: dict[str, Any] = {"betas": (0.95, 0.999), "weight_decay": 1e-6, "cosine": True, "clip": 1.0}
        warmup = min(500, task.steps // 3)
        found = [Contender(f"diffusers' script, rate {r:g}", r, True, **script, warmup=warmup) for r in rates]
        found.append(Contender("our settings: our defaults", 1e-3, **(parts := {"warmup": 100, "clip": 1.0})))
        found.append(Contender("+ Muon", 8e-3, muon=True, **parts))
        return [*found, Contender("+ bfloat16", 8e-3, muon=True, **parts, low=True)] if low else found
    found = [Contender(f"authors, rate {rate:g}", rate, True, betas=(0.99, 0.999)) for rate in rates]
    rate, parts = NEW_RUN["lr"], {"network": NEW_UVIT, "warmup": NEW_RUN["warmup"]}
    found.append(Contender("our network (start, branches × 0.3)", rate, **parts))
    found.append(Contender("+ Muon", rate, **(parts := {**parts, "muon": True})))
    if low:
        found.append(Contender("+ bfloat16", rate, **(parts := {**parts, "low": True})))
    # `train` takes Muon for networks below this width, where it was measured.
    last = "+ fused blocks: our defaults" if task.dim < NARROW else "+ fused blocks"
    return [*found, Contender(last, rate, **parts, fused=True)]


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
    options: dict[str, Any] = {"lr": contender.rate, "weight_decay": contender.weight_decay}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), betas=contender.betas, **options)
    if contender.muon:
        groups = sl.muon_groups(model, **options)
        optimizer = sl.Muon(groups, betas=contender.betas, **NEW_RUN["optimizer_options"])

    def share_of_rate(step: int) -> float:
        warm = min(1.0, (step + 1) / contender.warmup)
        done = max(0.0, (step - contender.warmup) / max(1, task.steps - contender.warmup))
        return warm * (1 + math.cos(math.pi * done)) / 2 if contender.cosine else warm

    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)
    process, seconds = NoiseProcess(), 0.0
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for step in range(1, task.steps + 1):
        draws = generator(seed, "quality", step)
        x0 = images[torch.randint(len(images), (task.batch,), generator=draws)]
        t, noise = process.times(torch.rand(task.batch, generator=draws)), torch.randn(x0.shape, generator=draws)
        x = process.add_noise(x0, noise, t)
        began = clock()
        with torch.autocast("cpu", torch.bfloat16) if contender.low else nullcontext():
            output = output_tensor(model(x, t))
        (output.float() - noise).square().mean().backward()
        if math.isfinite(contender.clip):
            nn.utils.clip_grad_norm_(model.parameters(), contender.clip)
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
    return float(torch.cat([mean_square(output_tensor(model(x, t)) - wanted) for x, t, wanted in parts]).mean())


def quality(task: Task, seeds: int, settings: Settings) -> dict[str, Any]:
    """The table: for each contender the final loss, and steps and seconds until the other side's final loss."""
    steps = settings.steps or task.steps
    task = replace(task, **TINY) if settings.quick else replace(task, steps=steps, look_every=min(25, -(-steps // 20)))
    seeds = settings.rounds or (2 if settings.quick else seeds)
    torch.set_num_threads(settings.threads)
    low = gain_of_bfloat16() > 1
    images, held_out = load(task)

    def raced(found: list[Contender], seed: int) -> list[Contender]:
        """All of them trained, a step of each in turn."""
        waiting = [trained(task, each, seed, images, held_out, maker(task, settings)) for each in found]
        while waiting:
            waiting = [each for each in waiting if next(each, False) is None]
        return found

    tuned = raced([each for each in contenders(task, low) if each.theirs], TUNING_SEED)
    best = min(tuned, key=lambda each: finite(each.curve[-1][2])).name
    runs = []
    for seed in range(seeds):
        runs.append(raced([each for each in contenders(task, low) if not each.theirs or each.name == best], seed))
        print(
            f"seed {seed}: " + ", ".join(f"{each.name} {each.curve[-1][2]:.4f}" for each in runs[-1]), file=sys.stderr
        )
    rows = compared(runs)
    side = "the authors' checkout" if settings.official else "sl.UViT with the authors' start (no --official was given)"
    side = side if task.model == "uvit" else "UNet2DModel, trained as diffusers' script does"
    notes = [
        f"The other side is {side}, in float32 with torch's AdamW, at the best of its rates, chosen on another seed: "
    ]
    notes[0] += ", ".join(f"{each.rate:g} ended at {each.curve[-1][2]:.4f}" for each in tuned) + "."
    clock = "processor time" if settings.threads == 1 else "time on the clock"
    notes += [f"{counted(seeds, 'seed')}, median and quartiles; {clock}."]
    title = f"Time to quality, {task}"
    columns = ["", "final loss", "steps to the other side's loss", "seconds to it", "times as fast"]
    curves = {each.name: [run[i].curve for run in runs] for i, each in enumerate(runs[0])}
    return {"title": title, "columns": columns, "rows": rows, "notes": notes, "seconds": curves}


def maker(task: Task, settings: Settings) -> Callable[..., nn.Module]:
    heads = max(1, task.dim // 32)

    def make(contender: Contender, channels: int) -> nn.Module:
        if task.model == "unet":
            return unet("small", sample_size=task.image, in_channels=channels, out_channels=channels)
        if contender.theirs and settings.official is not None:
            from .theirs import checkout, network_class

            sizes = {"img_size": task.image, "patch_size": task.patch, "in_chans": channels, "embed_dim": task.dim}
            return network_class(checkout(settings.official))(**sizes, depth=task.depth, num_heads=heads)
        return sl.UViT(
            **task.sizes, channels=channels, heads=heads, **(AUTHORS if contender.theirs else contender.network)
        )

    return make


def finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def compared(runs: Sequence[Sequence[Contender]]) -> list[list[str]]:
    """A row for the other side, the first contender, and for each of ours."""
    rows = []
    for i, each in enumerate(runs[0]):
        reached, ratios = [], []
        for run in runs:
            end = run[0].curve[-1]
            first = next((point for point in run[i].curve if point[2] <= end[2]), None)
            if first is not None:
                reached.append(first)
                ratios.append(end[1] / first[1])
        row = [each.name, Spread.of([run[i].curve[-1][2] for run in runs]).text(lambda value: f"{value:.4f}")]
        if len(reached) < len(runs):
            row += [f"reached by {len(reached)} of {len(runs)} seeds", "–", "–"]
        else:
            row += [Spread.of([float(point[0]) for point in reached]).text(lambda value: f"{value:.0f}")]
            row += [Spread.of([point[1] for point in reached]).text(seconds_text)]
            row += [Spread.of(ratios).text(lambda value: f"{value:.2f}")]
        rows.append(row)
    return rows
