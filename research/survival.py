"""Which deep U-ViTs survive a high learning rate, and why: survivors of paired runs at constant rates.

    python -m research.survival run start-cifar10 --data DATA    # train what is missing, one JSON line per run
    python -m research.survival trace --data DATA                # watch one collapsing run and its twin with CS
    python -m research.survival redraw                           # tables and figures from the JSON alone

DATA is a folder with CIFAR-10 (see docs/data.md); Fashion-MNIST is searched for by its name. The rules of the study
were written first: docs/evidence/survival/plan.md. Interrupt at any time: the same command goes on with the runs that
are missing.

Runs of equal structure are trained side by side (`torch.vmap` over weights): a network of width 64 is too small to keep
a core busy. Every run has its own weights, optimiser state, images, times and noise, all drawn from its seed alone, so
arms are paired by seed.
"""

import argparse
import fcntl
import json
import math
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn.attention import SDPBackend, sdpa_kernel

import scalelong as sl
from scalelong.data import load_data, to_float
from scalelong.diffusion import NoiseProcess

FOLDER = Path("docs/evidence/survival")
BATCH = 8
SIDE_BY_SIDE = 8
"""Runs per process, those of one arm. Sixteen are a little cheaper each, but nothing is kept until all have ended."""
SMOOTHING = 0.9
COLLAPSED, RISEN = 0.5, 2.0
HELD_OUT = 256
GATE_EVERY = 25
PROBE_EVERY = 5


# Settings, arms and studies


@dataclass(frozen=True)
class Setting:
    """What all arms of a study share: data, network, length."""

    data: str = "cifar10"
    depth: int = 24
    steps: int = 300
    plain: bool = False
    width: int = 64
    batch: int = BATCH


@dataclass(frozen=True)
class Arm:
    """One way to build and to train the network.

    `attach` is a scaling that stays in training. `start` is one that is folded into the weights before it.
    `inverse` divides the weights by the attached κ_i: the function of the unscaled network, the rates of the scaled.
    """

    attach: str | None = None
    start: str | None = None
    inverse: bool = False
    network: dict[str, Any] = field(default_factory=dict)
    warmup: int = 50
    more_steps: int = 0
    linear: bool = False
    betas: tuple[float, float] = (0.9, 0.99)
    decay: float = 0.03
    clip: float | None = None
    bf16: bool = False
    inner_rate: float = 1.0
    outer_rate: float = 1.0

    @property
    def structure(self) -> str:
        """Runs with the same text can be trained side by side: they differ in weights and data only."""
        shape = {name: value for name, value in self.network.items() if name != "init_std"}
        how = (self.warmup, self.more_steps, self.linear, self.betas, self.decay, self.clip, self.bf16)
        return repr((self.attach, shape, how, self.inner_rate, self.outer_rate))

    def groups(self, parameters: Mapping[str, Tensor], depth: int) -> list[dict[str, Any]]:
        """Groups for the optimiser: the inner half of the blocks, and all else, each with its share of the rate."""
        half, quarter = depth // 2, depth // 4
        inside = {"middle"} | {f"encoder.{i}" for i in range(quarter, half)}
        inside |= {f"decoder.{i}" for i in range(half - quarter)}
        inner = [p for name, p in parameters.items() if name.startswith(tuple(f"{block}." for block in inside))]
        others = [p for p in parameters.values() if all(p is not q for q in inner)]
        return [{"params": inner, "share": self.inner_rate}, {"params": others, "share": self.outer_rate}]

    def share(self, step: int, steps: int) -> float:
        """The share of the full rate in a step: a linear warm-up, then constant, or falling linearly to zero."""
        falling = (steps - step) / max(steps - self.warmup, 1) if self.linear else 1.0
        return min(1.0, (step + 1) / self.warmup, falling)


def cs(count: int, kappa: float = 0.7, first: int = 1, last: int | None = None) -> str:
    """The curve of CS on skips `first` to `last` alone, as a custom scaling of all skips."""
    inside = range(first, (last or count) + 1)
    return "custom:" + ",".join(str(kappa ** (i - 1) if i in inside else 1.0) for i in range(1, count + 1))


# Mean of log κ_i of CS(0.7) over 12 skips is 5.5 log 0.7.
EQUAL_LOG = 0.7**5.5

ARMS: dict[str, Arm] = {
    "none": Arm(),
    "CS attached": Arm(attach="cs:0.7"),
    "CS folded": Arm(start="cs:0.7"),
    "rates alone": Arm(attach="cs:0.7", inverse=True),
    "LS token, as it was": Arm(attach="ls:start=cs,gate=token"),
    "LS channel, as it was": Arm(attach="ls:start=cs,gate=channel"),
    "LS token, bounded": Arm(attach="ls:start=bounded,gate=token,pace=1"),
    "LS channel, bounded": Arm(attach="ls:start=bounded,gate=channel,pace=1"),
    "LS token, bounded, slow": Arm(attach="ls:start=bounded,gate=token,pace=0.1"),
    "LS channel, bounded, slow": Arm(attach="ls:start=bounded,gate=channel,pace=0.1"),
    "start CS(0.5)": Arm(start="cs:0.5"),
    "start CS(0.9)": Arm(start="cs:0.9"),
    "start CS(0.7), inner half": Arm(start=cs(12, first=7)),
    "start CS(0.7), outer half": Arm(start=cs(12, last=6)),
    "start uniform, same mean log": Arm(start=f"uniform:{EQUAL_LOG}"),
    "norm on queries and keys": Arm(network={"qk_norm": True}),
    "norm on both operands of merges": Arm(network={"merge_norm": True}),
    "clipping at 1": Arm(clip=1.0),
    "warm-up of 150": Arm(warmup=150),
    "branches at 0.3": Arm(network={"residual_scaling": 0.3}),
    "betas 0.9, 0.999": Arm(betas=(0.9, 0.999)),
    "unit-gain start": Arm(network={"init_std": "unit"}),
}


@dataclass(frozen=True)
class Run:
    """One training, and the key of its line in the results."""

    setting: Setting
    arm: str
    lr: float
    seed: int

    @property
    def spec(self) -> Arm:
        return ARMS[self.arm]

    @property
    def key(self) -> tuple[Any, ...]:
        return key_of({**asdict(self.setting), "arm": self.arm, "lr": self.lr, "seed": self.seed})


@dataclass(frozen=True)
class Study:
    """All runs of arms × rates × seeds in some settings; `question` is the heading of its table."""

    question: str
    settings: tuple[Setting, ...]
    rates: tuple[float, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str = "none"
    kind: type[Run] = Run


START = ("none", "CS attached", "CS folded", "rates alone")
EIGHT, FOUR, CHOICE = tuple(range(1000, 1008)), tuple(range(1000, 1004)), tuple(range(2000, 2004))
BOTH = (Setting(), Setting(data="fashion-mnist"))
LS = tuple(name for name in ARMS if name.startswith("LS"))
STARTS = ("none", "CS folded", *(name for name in ARMS if name.startswith("start")))
CHANGES = ("none", *list(ARMS)[list(ARMS).index("norm on queries and keys") :])
CONFIRMED = ("CS attached", "LS channel, bounded, slow", "LS token, as it was")

STUDIES: dict[str, Study] = {
    "start-cifar10": Study("The start: CIFAR-10, depth 24", (Setting(),), (8e-3,), START, EIGHT),
    "start-fashion": Study("The start: Fashion-MNIST, depth 24", BOTH[1:], (12e-3,), START, EIGHT),
    "start-plain": Study("The start: plain U-ViT, depth 24", (Setting(plain=True),), (6e-3,), START, FOUR),
    "start-depth40": Study("The start: CIFAR-10, depth 40", (Setting(depth=40),), (6e-3,), START, FOUR),
    "start-depth16": Study("The start: CIFAR-10, depth 16", (Setting(depth=16),), (12e-3,), START, EIGHT),
    "start-long": Study("The start: CIFAR-10, 1,000 steps", (Setting(steps=1000),), (6e-3,), START, FOUR),
    "ls-choice": Study(
        "Learnable scaling: the choice", BOTH[:1], (12e-3,), ("CS attached", *LS), CHOICE, "CS attached"
    ),
    "ls-cifar10-8e-3": Study("LS: CIFAR-10, 8e-3", BOTH[:1], (8e-3,), CONFIRMED, EIGHT, "CS attached"),
    "ls-fashion-12e-3": Study("LS: Fashion-MNIST, 12e-3", BOTH[1:], (12e-3,), CONFIRMED, EIGHT, "CS attached"),
    "ls-cifar10-12e-3": Study("LS: CIFAR-10, 12e-3", BOTH[:1], (12e-3,), CONFIRMED[:2], EIGHT, "CS attached"),
    "ls-fashion-8e-3": Study("LS: Fashion-MNIST, 8e-3", BOTH[1:], (8e-3,), CONFIRMED[:2], EIGHT, "CS attached"),
    "cause-starts": Study("The cause: starts", (Setting(),), (8e-3,), STARTS, FOUR),
    "cause-changes": Study("The cause: other changes, without scaling", (Setting(),), (8e-3,), CHANGES, FOUR),
}


def runs_of(study: Study) -> list[Run]:
    return [
        study.kind(setting, arm, lr, seed)
        for setting in study.settings
        for lr in study.rates
        for arm in study.arms
        for seed in study.seeds
    ]


# Data


def load_images(name: str, data: Path | None) -> Tensor:
    """The first 4,000 training images in [-1, 1], 16x16; of the 2,000 garments of the package the last 256 are kept
    apart for scores."""
    spec = name if data is None or name != "cifar10" else str(data)
    whole = load_data(spec, size=16 if name != "cifar10" else None)
    images = to_float(whole.fetch(range(len(whole) - HELD_OUT if name == "garments" else 4000)).images)
    # Photographs are box-filtered: each pixel is the mean of 2x2.
    return F.avg_pool2d(images, 2) if images.shape[-1] == 32 else images


def batches(
    images: Tensor, seed: int, process: NoiseProcess, batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x_t, the network's times and ε of every step of a run; a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x0 = images[torch.randint(len(images), (batch,), generator=generator)]
        t = process.times(torch.rand(batch, generator=generator))
        noise = torch.randn(x0.shape, generator=generator)
        yield process.add_noise(x0, noise, t), t, noise


# Networks


class PlainUViT(nn.Module):
    """A U-ViT of torch's stock modules, written apart from the library, with torch's start."""

    def __init__(self, channels: int, depth: int, dim: int = 64, patch: int = 4, size: int = 16) -> None:
        super().__init__()
        half, self.patch = depth // 2, patch

        def block() -> nn.Module:
            return nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True)

        self.embed = nn.Conv2d(channels, dim, patch, patch)
        self.time = nn.Sequential(nn.Linear(1, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, dim))
        self.encoder = nn.ModuleList(block() for _ in range(half))
        self.middle = block()
        self.merges = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(half))
        self.decoder = nn.ModuleList(block() for _ in range(half))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, channels * patch**2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        tokens = tokens + self.time(t[:, None] / 999).unsqueeze(1)
        skips = []
        for block in self.encoder:
            tokens = block(tokens)
            skips.append(tokens)
        tokens = self.middle(tokens)
        for merge, block in zip(self.merges, self.decoder, strict=True):
            tokens = block(merge(torch.cat([tokens, skips.pop()], dim=-1)))
        patches = self.head(self.norm(tokens)).transpose(1, 2)
        return F.fold(patches, x.shape[-2:], self.patch, stride=self.patch)


def build(run: Run, channels: int) -> nn.Module:
    """The network of a run before its first step."""
    arm, setting = run.spec, run.setting
    torch.manual_seed(run.seed)
    example: tuple[Tensor, Tensor] | None = None
    if setting.plain:
        model: nn.Module = PlainUViT(channels, setting.depth)
        example = torch.zeros(2, channels, 16, 16), torch.zeros(2)
    else:
        options = {"init_std": 0.0566, **arm.network}
        sizes: Any = {"channels": channels, "dim": setting.width, "depth": setting.depth}
        model = sl.UViT(image_size=16, patch_size=4, heads=4, **sizes, **options)
    if arm.start:
        sl.fold_(sl.scale_skips_(model, arm.start, example))
    if arm.attach:
        sl.scale_skips_(model, arm.attach, example)
    if arm.inverse:
        sl.fold_(model, inverse=True)
    return model


# Training


class Fate:
    """The smoothed loss of a run, and whether it is over."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.smoothed, self.best = warmup, math.nan, math.inf
        self.curve: list[float] = []
        self.collapsed: int | None = None
        self.best_step = 0

    def add(self, step: int, loss: float) -> bool:
        """Take the loss of a step; true once the run has collapsed."""
        smoothed = loss if step == 0 else SMOOTHING * self.smoothed + (1 - SMOOTHING) * loss
        self.smoothed = smoothed
        if step >= self.warmup and smoothed < self.best:
            self.best, self.best_step = smoothed, step
        if step % 10 == 9:
            self.curve.append(round(smoothed, 4))
        if not math.isfinite(smoothed) or (smoothed > COLLAPSED and smoothed > RISEN * self.best):
            self.collapsed = step + 1
        return self.collapsed is not None

    def record(self) -> dict[str, Any]:
        survived = self.collapsed is None and self.smoothed <= COLLAPSED
        last = round(self.smoothed, 4) if math.isfinite(self.smoothed) else None
        return {
            "survived": survived,
            "collapsed": self.collapsed,
            "best": round(self.best, 4) if math.isfinite(self.best) else None,
            "last": last,
            "curve": self.curve,
        }


class Observer:
    """Looks at runs while they are trained; this one at nothing."""

    def wants(self, run: Run, step: int) -> bool:  # noqa: ARG002
        return False

    def before(self, run: Run, step: int, state: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """The weights of a run and their gradients, before the step of the optimiser."""

    def after(self, run: Run, state: dict[str, Tensor]) -> None:
        """The weights after it."""

    def end(self, run: Run, state: dict[str, Tensor]) -> dict[str, Any]:  # noqa: ARG002
        """What goes into the line of a run, besides its fate; with the weights at its end."""
        return {}


def train(
    runs: Sequence[Run],
    images: Tensor,
    done: Callable[[Run, dict[str, Any]], None],
    observer: Observer | None = None,
) -> None:
    """Train runs of one structure side by side. `done` hears of each when it ends."""
    arm, setting, process = runs[0].spec, runs[0].setting, NoiseProcess()
    observer, steps = observer or Observer(), setting.steps + arm.more_steps
    models = [build(run, images.shape[1]) for run in runs]
    shell = models[0]
    parameters, buffers = stack_module_state(models)
    gated = sl.is_scaled(shell) and any(True for _ in sl.scaling_of(shell).parameters())
    settings: Any = {"betas": arm.betas, "weight_decay": arm.decay, "fused": True}
    optimizer = torch.optim.AdamW(arm.groups(parameters, setting.depth), lr=runs[0].lr, **settings)
    streams = [batches(images, run.seed, process, setting.batch) for run in runs]
    fates, gate_history = [Fate(arm.warmup) for _ in runs], [{} for _ in runs]
    alive = list(range(len(runs)))

    def losses(weights: dict[str, Tensor], state: dict[str, Tensor], x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=arm.bf16):
            predicted = functional_call(shell, (weights, state), (x, t))
        return (predicted.float() - noise).square().mean()

    def state_of(row: int) -> dict[str, Tensor]:
        return {name: value[row].detach() for values in (parameters, buffers) for name, value in values.items()}

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = runs[0].lr * group["share"] * arm.share(step, steps)
        x, t, noise = (torch.stack(parts) for parts in zip(*(next(streams[i]) for i in alive), strict=True))
        if gated and step % GATE_EVERY == 0:
            for row, i in enumerate(alive):
                gate_history[i][step] = measure_gates(shell, parameters, buffers, row, x, t)
        # torch has no batching rule for its fused attention.
        with sdpa_kernel(SDPBackend.MATH):
            loss = torch.vmap(losses)(parameters, buffers, x, t, noise)
            optimizer.zero_grad()
            loss.sum().backward()
        if arm.clip is not None:
            clip_(parameters, arm.clip)
        watched = [row for row, i in enumerate(alive) if observer.wants(runs[i], step)]
        for row in watched:
            gradients = {name: p.grad[row] for name, p in parameters.items() if p.grad is not None}
            observer.before(runs[alive[row]], step, state_of(row), gradients)
        optimizer.step()
        for row in watched:
            observer.after(runs[alive[row]], state_of(row))
        if gated and step + 1 == steps:
            for row, i in enumerate(alive):
                gate_history[i][step + 1] = measure_gates(shell, parameters, buffers, row, x, t)
        ended = [row for row, value in enumerate(loss.tolist()) if fates[alive[row]].add(step, value)]
        for row in ended:
            i = alive[row]
            done(runs[i], finish(fates[i], gate_history[i]) | observer.end(runs[i], state_of(row)))
        if ended:
            rows = [row for row in range(len(alive)) if row not in ended]
            alive = [alive[row] for row in rows]
            if not alive:
                return
            keep_(optimizer, parameters, buffers, rows)
    for row, i in enumerate(alive):
        done(runs[i], finish(fates[i], gate_history[i]) | observer.end(runs[i], state_of(row)))


def finish(fate: Fate, gates: dict[int, Any]) -> dict[str, Any]:
    return {**fate.record(), **({"gates": gates} if gates else {})}


@torch.no_grad()
def measure_gates(
    shell: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor], row: int, x: Tensor, t: Tensor
) -> list[list[float]]:
    """Mean, least and greatest κ_i of each skip, outermost first, on the batch of one run."""
    state = {name: value[row] for values in (parameters, buffers) for name, value in values.items()}
    functional_call(shell, state, (x[row], t[row]))
    found = sl.coefficients(shell, reduce=False)
    return [[round(float(value), 5) for value in (k.mean(), k.min(), k.max())] for k in found]


@torch.no_grad()
def clip_(parameters: dict[str, Tensor], limit: float) -> None:
    """Clip the gradient of each run to a norm of at most `limit`."""
    found = [p.grad for p in parameters.values() if p.grad is not None]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in found]).sum(0).sqrt()
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in found:
        gradient *= factors.view(-1, *[1] * (gradient.dim() - 1))


@torch.no_grad()
def keep_(
    optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor], buffers: dict[str, Tensor], rows: list[int]
) -> None:
    """Keep these runs and forget the others: weights, gradients and the state of the optimiser."""
    kept: dict[Tensor, Tensor] = {}
    for name, old in parameters.items():
        # A new leaf: autograd remembers the shape of the old one.
        parameters[name] = kept[old] = old[rows].clone().requires_grad_()
        state = optimizer.state.pop(old)
        optimizer.state[kept[old]] = {k: v[rows].clone() if v.shape == old.shape else v for k, v in state.items()}
    for group in optimizer.param_groups:
        group["params"] = [kept[old] for old in group["params"]]
    for name in buffers:
        buffers[name] = buffers[name][rows]


# Results: one JSON line per run


def read(path: Path) -> list[dict[str, Any]]:
    """The finished runs. A line that was cut off by a crash is not one of them."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def read_all(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of all studies: what one has trained, another need not."""
    return [record for path in sorted(folder.glob("*.jsonl")) for record in read(path)]


def append(path: Path, run: Run, result: dict[str, Any]) -> None:
    line = {**asdict(run.setting), "arm": run.arm, "lr": run.lr, "seed": run.seed, **result}
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        if whole < size:
            file.truncate(whole)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """Lines from before there were widths and batches have those of all."""
    place = tuple(record[name] for name in ("data", "depth", "steps", "plain"))
    sizes = record.get("width", Setting.width), record.get("batch", Setting.batch)
    return *place, *sizes, record["arm"], record["lr"], record["seed"]


def run_study(name: str, folder: Path, data: Path | None, jobs: int) -> None:
    study = STUDIES[name]
    carry_out(study, name, folder, data, jobs)
    print(table(study, read_all(folder)), flush=True)


def carry_out(
    study: Study, name: str, folder: Path, data: Path | None, jobs: int, observer: Observer | None = None
) -> None:
    """Train the runs of a study that are missing in the folder."""
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    finished = {key_of(record) for record in read_all(folder)}
    groups: dict[Any, list[Run]] = defaultdict(list)
    for run in runs_of(study):
        if run.key not in finished:
            groups[run.setting, run.lr, run.spec.structure].append(run)
    chunks = [
        chunk
        for group in groups.values()
        for waiting in [iter(group)]
        for chunk in iter(lambda w=waiting: list(islice(w, SIDE_BY_SIDE)), [])
    ]
    print(f"{name}: {sum(map(len, chunks))} of {len(runs_of(study))} runs are missing", flush=True)
    if jobs == 1:
        for chunk in chunks:
            run_chunk(chunk, path, data, observer)
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(run_chunk, chunks, *([value] * len(chunks) for value in (path, data, observer))))


def run_chunk(chunk: list[Run], path: Path, data: Path | None, observer: Observer | None = None) -> None:
    torch.set_num_threads(1)

    def done(run: Run, result: dict[str, Any]) -> None:
        append(path, run, result)
        fate = "survived" if result["survived"] else f"collapsed at {result['collapsed']}"
        print(f"{run.arm}, {run.lr:g}, seed {run.seed}: {fate}, best {result['best']}", flush=True)

    train(chunk, load_images(chunk[0].setting.data, data), done, observer)


# Statistics and tables


def wilson(count: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, spread = count / of, z * z / of
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / of + spread / (4 * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def mcnemar(pairs: Sequence[tuple[bool, bool]]) -> tuple[int, int, float]:
    """How often the first survives alone, how often the second does, and the exact two-sided p."""
    first, second = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1)) / 2**n
    return first, second, min(1.0, 2 * tail)


def table(study: Study, records: Sequence[dict[str, Any]]) -> str:
    """Survivors with Wilson's interval, and McNemar's test against the baseline with equal seeds."""
    cells: dict[Any, dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        if record["seed"] in study.seeds:
            cells[key_of(record)[:-1]][record["seed"]] = record
    lines = [
        "| setting | arm | rate | survivors | 95 % | seed alone: arm, baseline | p | best smoothed losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting in study.settings:
        for lr in study.rates:
            for arm in study.arms:
                key = Run(setting, arm, lr, 0).key[:-1]
                against = Run(setting, study.baseline, lr, 0).key[:-1]
                found, base = cells.get(key, {}), cells.get(against, {})
                if not found:
                    continue
                count = sum(record["survived"] for record in found.values())
                low, high = wilson(count, len(found))
                both = sorted(set(found) & set(base)) if arm != study.baseline else []
                test = "| | "
                if both:
                    a, b, p = mcnemar([(found[s]["survived"], base[s]["survived"]) for s in both])
                    test = f"| {a}, {b} | {p:.3g}"
                best = " ".join(
                    f"{record['best']:.3f}" + ("" if record["survived"] else "†")
                    for _, record in sorted(found.items())
                    if record["best"] is not None
                )
                lines.append(
                    f"| {describe(setting)} | {arm} | {lr:g} | {count} of {len(found)} | {low:.2f} to {high:.2f} "
                    f"{test} | {best} |"
                )
    return "\n".join(lines)


def describe(setting: Setting) -> str:
    kind = "plain U-ViT" if setting.plain else "U-ViT"
    sizes = "".join(
        f", {name} {getattr(setting, name)}"
        for name in ("width", "batch")
        if getattr(setting, name) != getattr(Setting, name)
    )
    return f"{setting.data}, {kind}, depth {setting.depth}, {setting.steps} steps{sizes}"


def survivors(study: Study, arm: str, records: Sequence[dict[str, Any]]) -> dict[Any, bool]:
    """Who survived, by setting, rate and seed."""
    keys = {run.key: (run.setting, run.lr, run.seed) for run in runs_of(study) if run.arm == arm}
    return {keys[key_of(record)]: record["survived"] for record in records if key_of(record) in keys}


def start_verdicts(records: Sequence[dict[str, Any]]) -> str:
    """The rule of the plan, setting by setting and over all of them."""
    lines, pooled = [], {arm: {} for arm in START}
    for name, study in STUDIES.items():
        found = {arm: survivors(study, arm, records) for arm in START}
        if not name.startswith("start-") or any(len(by_seed) < len(study.seeds) for by_seed in found.values()):
            continue
        none, attached, folded, rates = (sum(found[arm].values()) for arm in START)
        if attached - none < (3 if len(study.seeds) == 8 else 2):
            verdict = "silent"
        else:
            verdict = "agrees" if folded >= attached - 2 and rates <= none + 2 else "contradicts"
        lines.append(
            f"| {study.question} | {none} | {attached} | {folded} | {rates} | {len(study.seeds)} | {verdict} |"
        )
        for arm in START:
            pooled[arm] |= found[arm]
    sums = " | ".join(str(sum(pooled[arm].values())) for arm in START)
    lines.append(f"| **all** | {sums} | {len(pooled['none'])} | |")
    tests = []
    for first, second in (("CS folded", "none"), ("CS folded", "CS attached"), ("rates alone", "none")):
        a, b, p = mcnemar([(pooled[first][key], pooled[second][key]) for key in pooled[first]])
        tests.append(
            f"- {first} against {second}: {a} seeds survive with the first alone, {b} with the second; p = {p:.2g}"
        )
    head = f"| setting | {' | '.join(START)} | of | verdict |\n|---|---|---|---|---|---|---|"
    return "\n".join([head, *lines, "", "Paired, over all settings:", "", *tests])


def ls_verdicts(records: Sequence[dict[str, Any]]) -> str:
    """The mended LS against CS and against LS as it was, paired over all cells in which both were run."""
    studies = [study for name, study in STUDIES.items() if name.startswith("ls-") and name != "ls-choice"]
    alive: dict[str, dict[Any, bool]] = {arm: {} for arm in CONFIRMED}
    for study in studies:
        for arm in study.arms:
            alive[arm] |= survivors(study, arm, records)
    reference, mended, former = CONFIRMED
    lines = []
    for other in (reference, former):
        both = sorted(set(alive[mended]) & set(alive[other]), key=repr)
        a, b, p = mcnemar([(alive[mended][key], alive[other][key]) for key in both])
        counts = [sum(alive[arm][key] for key in both) for arm in (mended, other)]
        lines.append(
            f"- {mended}: {counts[0]} of {len(both)}; {other}: {counts[1]}. {a} seeds survive with the first alone, "
            f"{b} with the second; p = {p:.2g}"
        )
    return "\n".join(lines)


def moved_gates(record: dict[str, Any], kappa: float = 0.7) -> tuple[float, float, float]:
    """κ_i over the curve before the loss left: mean of the outer half, of the inner half, and mean distance from 1."""
    left = 10 * (1 + min(range(len(record["curve"])), key=record["curve"].__getitem__))
    last = record["gates"][max((step for step in record["gates"] if int(step) <= left), key=int)]
    ratios = [found[0] / kappa**i for i, found in enumerate(last)]
    half = len(ratios) // 2
    outer, inner = sum(ratios[:half]) / half, sum(ratios[half:]) / (len(ratios) - half)
    return outer, inner, sum(abs(ratio - 1) for ratio in ratios) / len(ratios)


def gate_table(study: Study, records: Sequence[dict[str, Any]]) -> str:
    """How far the gates of LS have moved from the curve when the loss was at its best."""
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if "gates" in record:
            groups[record["data"], record["lr"], record["arm"]].append(record)
    lines = [
        "| data | rate | arm | κ/curve, outer half | inner half | inner half above 2 | mean distance from 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (data, lr, arm), found in groups.items():
        if arm not in study.arms:
            continue
        outer, inner, distance = zip(*map(moved_gates, found), strict=True)
        undone = sum(value > 2 for value in inner)
        lines.append(
            f"| {data} | {lr:g} | {arm} | {spread(outer)} | {spread(inner)} | {undone} of {len(found)} | "
            f"{spread(distance)} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def spread(values: Sequence[float]) -> str:
    """Median, least and greatest."""
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.2f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"


# One pair of runs, watched


def trace(folder: Path, data: Path | None, seed: int, lr: float) -> None:
    """Train none and CS from one seed in a plain loop, and look into both every few steps."""
    torch.set_num_threads(1)
    images = load_images("cifar10", data)
    found = {arm: watch(Run(Setting(), arm, lr, seed), images) for arm in START[:2]}
    path = folder / "trace.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps({"seed": seed, "lr": lr, "arms": found}), encoding="utf-8")
    temporary.replace(path)
    print(departures(found["none"]))


def watch(run: Run, images: Tensor) -> dict[str, Any]:
    model: Any = build(run, images.shape[1])
    arm, process = run.spec, NoiseProcess()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=arm.betas, weight_decay=arm.decay, fused=True)
    stream, fate = batches(images, run.seed, process, run.setting.batch), Fate(arm.warmup)
    # The same noisy images for both runs, which neither is trained on.
    probe, times, _ = next(batches(images, 7, process))
    series: dict[str, list[float]] = defaultdict(list)
    for step in range(run.setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.lr * arm.share(step, run.setting.steps)
        x, t, noise = next(stream)
        loss = (model(x, t) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step % PROBE_EVERY == 0:
            for name, value in look(model, probe, times).items():
                series[name].append(round(value, 5))
        optimizer.step()
        if fate.add(step, float(loss.detach())):
            break
    return {**fate.record(), "best_step": fate.best_step, "every": PROBE_EVERY, "series": series}


@torch.no_grad()
def look(model: Any, x: Tensor, t: Tensor) -> dict[str, float]:
    """Sizes of features, logits, merges and gradients, block by block."""
    blocks = {f"encoder {i + 1}": block for i, block in enumerate(model.encoder)}
    blocks["middle"] = model.middle
    blocks |= {f"decoder {i + 1}": block for i, block in enumerate(model.decoder)}
    found: dict[str, float] = {}

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:  # noqa: ARG001
            found[f"RMS, {name}"] = float(output.square().mean().sqrt())

        return hook

    def before(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any) -> None:
            features, norm = inputs
            q, k, _ = module.qkv(norm(features)).unflatten(-1, (3, module.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            found[f"logit, {name}"] = float((q @ k.mT).abs().max() / math.sqrt(q.shape[-1]))

        return hook

    handles = [block.register_forward_hook(after(name)) for name, block in blocks.items()]
    handles += [block.attention.register_forward_pre_hook(before(name)) for name, block in blocks.items()]
    model(x, t)
    for handle in handles:
        handle.remove()
    kappas = sl.coefficients(model)
    for name, block in blocks.items():
        gradients = [p.grad.square().sum() for p in block.parameters() if p.grad is not None]
        found[f"gradient, {name}"] = float(torch.stack(gradients).sum().sqrt())
        if getattr(block, "merge", None) is not None:
            # Decoder block 1 reads the innermost skip.
            kappa = kappas[len(kappas) - int(name.split()[1])]
            main, skip = block.merge.weight.chunk(2, dim=1)
            found[f"merge from main, {name}"] = float(torch.linalg.matrix_norm(main, 2))
            found[f"merge from skip, {name}"] = kappa * float(torch.linalg.matrix_norm(skip, 2))
    return found


def departures(run: dict[str, Any]) -> list[tuple[int, str]]:
    """When each quantity first is more than twice its median over steps 100 to the best step, first ones first."""
    every, found = run["every"], []
    for name, values in run["series"].items():
        calm = sorted(values[100 // every : max(run["best_step"] // every, 100 // every + 1)])
        usual = calm[len(calm) // 2]
        later = [n for n in range(100 // every, len(values)) if values[n] > 2 * usual]
        if later:
            found.append((later[0] * every, name))
    return sorted(found)


# Figures and pages


def redraw(folder: Path) -> None:
    """results.md and the figures, from the JSON files of the folder alone."""
    parts = [
        "# Survival: all results\n\nWritten by `python -m research.survival redraw` from the JSON lines beside it. "
        "Meaning: [README](README.md); rules: [plan](plan.md). Intervals are Wilson's; p is the exact two-sided "
        "McNemar test against the baseline of the study with equal seeds. † marks runs that did not survive.\n"
    ]
    everything = read_all(folder)
    parts.append(f"## The start: verdicts\n\n{start_verdicts(everything)}\n")
    if set(CONFIRMED) <= {record["arm"] for record in everything}:
        parts.append(f"## Learnable scaling: verdicts\n\n{ls_verdicts(everything)}\n")
    for name, study in STUDIES.items():
        keys = {run.key for run in runs_of(study)}
        records = [record for record in everything if key_of(record) in keys]
        if not (folder / f"{name}.jsonl").exists():
            continue
        draw_survivors(study, records, folder / f"{name}.png")
        parts.append(
            f"## {study.question}\n\n`python -m research.survival run {name} --data DATA`, baseline: {study.baseline}, "
            f"seeds {study.seeds[0]} to {study.seeds[-1]}\n\n{table(study, records)}\n\n"
            f"![{study.question}]({name}.png)\n"
        )
        if gates := gate_table(study, records):
            draw_gates(study, records, folder / f"{name}-gates.png")
            parts.append(
                "Gates when the smoothed loss of the run was at its best: median of the seeds (least to greatest).\n\n"
                f"{gates}\n\n![Gates]({name}-gates.png)\n"
            )
    if (folder / "trace.json").exists():
        found = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
        draw_trace(found, folder / "trace.png")
        # Gradients of single batches of 8 images vary by more than twice all the time: they say nothing.
        left = [entry for entry in departures(found["arms"]["none"]) if not entry[1].startswith("gradient")]
        first = "\n".join(f"| {step} | {name} |" for step, name in left[:24])
        parts.append(
            f"## One pair, watched\n\n`python -m research.survival trace --data DATA --seed {found['seed']}`; none "
            f"collapsed at step {found['arms']['none']['collapsed']}, CS at "
            f"{found['arms']['CS attached']['collapsed']}. "
            f"What left first in none, gradients apart:\n\n| step | quantity |\n|---|---|\n{first}\n\n"
            "![One pair](trace.png)\n"
        )
    (folder / "results.md").write_text("\n".join(parts), encoding="utf-8")


def pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw_survivors(study: Study, records: Sequence[dict[str, Any]], path: Path) -> None:
    cells: dict[Any, list[bool]] = defaultdict(list)
    for record in records:
        cells[key_of(record)[:-1]].append(record["survived"])
    labels, shares = [], []
    for setting in study.settings:
        for lr in study.rates:
            for arm in study.arms:
                if found := cells.get(Run(setting, arm, lr, 0).key[:-1]):
                    place = f"{setting.data}, " if len(study.settings) > 1 else ""
                    labels.append(f"{arm} ({place}{lr:g})")
                    shares.append((sum(found), len(found)))
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 1 + 0.32 * len(labels)), layout="constrained", dpi=110)
    for row, (count, of) in enumerate(shares):
        low, high = wilson(count, of)
        axes.plot([low, high], [row, row], color="0.6", linewidth=2)
        axes.plot(count / of, row, "o", color="#0072b2")
        axes.annotate(f"{count} of {of}", (1.04, row), va="center", annotation_clip=False)
    axes.set(yticks=range(len(labels)), yticklabels=labels, xlim=(-0.03, 1.03), xlabel="share of runs that survive")
    axes.invert_yaxis()
    axes.set_title(study.question, fontsize=10)
    figure.savefig(path)
    plt.close(figure)


def draw_gates(study: Study, records: Sequence[dict[str, Any]], path: Path) -> None:
    """κ_i over the curve of CS for one seed of each learnable arm; shaded: least to greatest at the last look."""
    plt = pyplot()
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        if "gates" in record and record["arm"] in study.arms:
            found.setdefault(record["arm"], record)
    figure, grid = plt.subplots(
        1, len(found), figsize=(1 + 2.4 * len(found), 3), sharey=True, squeeze=False, layout="constrained", dpi=110
    )
    for axes, (arm, record) in zip(grid[0], found.items(), strict=True):
        last = list(record["gates"].values())[-1]
        curve, skips = [0.7**i for i in range(len(last))], range(1, len(last) + 1)
        for step, values in record["gates"].items():
            if int(step) % 50 == 0:
                shade = plt.get_cmap("viridis")(int(step) / record["steps"])
                means = [value[0] / kappa for value, kappa in zip(values, curve, strict=True)]
                axes.semilogy(skips, means, color=shade, label=step)
        low, high = ([max(v[k], 1e-6) / kappa for v, kappa in zip(last, curve, strict=True)] for k in (1, 2))
        axes.fill_between(skips, low, high, color="0.85", zorder=0)
        fate = f"collapsed at {record['collapsed']}" if record["collapsed"] else "survived"
        axes.set_title(f"{arm}\nseed {record['seed']}, {record['lr']:g}: {fate}", fontsize=7)
        axes.set(xlabel="skip i", ylim=(0.02, 60))
    grid[0][0].set_ylabel("κ_i / κ^(i-1)")
    grid[0][0].legend(title="mean at step", fontsize=6, title_fontsize=6)
    figure.savefig(path)
    plt.close(figure)


def draw_trace(found: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    kinds = ("RMS", "logit", "merge from main", "merge from skip", "gradient")
    figure, grid = plt.subplots(
        len(kinds), 2, figsize=(9, 11), sharex=True, sharey="row", layout="constrained", dpi=110
    )
    for column, (arm, run) in enumerate(found["arms"].items()):
        for row, kind in enumerate(kinds):
            chosen = [name for name in run["series"] if name.startswith(kind + ",")]
            for number, name in enumerate(chosen):
                steps = range(0, run["every"] * len(run["series"][name]), run["every"])
                shade = plt.get_cmap("plasma")(number / len(chosen))
                grid[row][column].semilogy(steps, run["series"][name], color=shade, linewidth=0.9)
            grid[row][0].set_ylabel(kind)
        grid[0][column].set_title(f"{arm}, seed {found['seed']}, {found['lr']:g}", fontsize=9)
        grid[-1][column].set_xlabel("step (dark: first block, light: last)")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.survival", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train_command = commands.add_parser("run", help="train what is missing and print the tables")
    train_command.add_argument("studies", nargs="*", help=f"by default all: {', '.join(STUDIES)}")
    train_command.add_argument("--jobs", type=int, default=1, help="processes of one core each")
    trace_command = commands.add_parser("trace", help="watch one pair of runs")
    trace_command.add_argument("--seed", type=int, default=1000)
    trace_command.add_argument("--lr", type=float, default=8e-3)
    redraw_command = commands.add_parser("redraw", help="tables and figures from the JSON alone")
    for command in (train_command, trace_command):
        command.add_argument("--data", type=Path, help="a folder with CIFAR-10")
    for command in (train_command, trace_command, redraw_command):
        command.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.command == "run":
        if unknown := sorted(set(options.studies) - set(STUDIES)):
            parser.error(f"no study {', '.join(unknown)}; known: {', '.join(STUDIES)}")
        for name in options.studies or STUDIES:
            run_study(name, options.folder, options.data, options.jobs)
    elif options.command == "trace":
        trace(options.folder, options.data, options.seed, options.lr)
    else:
        redraw(options.folder)


if __name__ == "__main__":
    main()
