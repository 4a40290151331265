"""How large a run is (image size, network, batch and steps for a budget of time), and what it will do and need.

`choose` goes through the sizes of one table from small to large, times a few steps of each, and takes the largest that
gets the steps it needs. What the user gave is never changed, and a run that has begun is never sized again: its
config.yaml has the numbers.

    plan = size_run(config, given={"data", "scaling"})
    print(plan)                   # what was chosen, why, and the flags that say otherwise
    train(plan.config)
"""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..config import NEW_RUN, TrainConfig, new_uvit_options, seconds_of, with_values
from ..console import counted, duration
from ..data import Annotations, ImageData, MemoryData, load_data, require_both_sides
from ..errors import InvalidConfigError, MixedSizesError
from ..noise import NoiseProcess
from ..randomness import global_state, restore_global_state
from ..runs import (
    DataShape,
    RunData,
    RunFolder,
    make_accelerator,
    on_main,
    shape_of,
)
from .loop import Trainer
from .recording import TrainingProgress

logger = logging.getLogger(__name__)

CPU_BUDGET, GPU_BUDGET = "1h", "1d"
USABLE = 0.95
"""Share of the budget for steps, samples and held-out losses; the rest is for reading images and writing files."""
MOST_EPOCHS = 2000
"""Beyond, a network learns the images by heart. It is larger data that a longer run needs then."""
HELD_OUT_SHARE, MOST_HELD_OUT, LEAST_TO_HOLD_OUT = 0.1, 1000, 20
MOST_HELD_OUT_SHARE = 0.25
"""A recipe that would hold out more of a folder than this was made for other data."""
SAMPLES = 36
"""Images in a grid: enough to see whether they differ, and few enough to be made every few minutes."""
FORWARD = 1 / 3
"""Cost of a forward, as a share of a training step on the same images."""
SLOW_STEP = 3.0
"""Seconds. A step that takes longer is timed on a part of its batch."""
SIDES = 4
"""The sides of images are multiples of this: "unet/small" halves them twice, and patches are of 2x2 or 4x4."""
FEW_IMAGES = 20
BUSY = 1.5
"""Processes that want to run, per core, from which on a machine is busy."""
NARROW = 256
"""Width of U-ViTs from which on AdamW trains them."""


@dataclass(frozen=True)
class Size:
    """A size at which training is worth its time: images of `side` pixels, a network, and the steps it needs."""

    side: int
    model: str
    options: dict[str, Any]
    batch_size: int
    lr: float
    least: int
    """Steps before its samples show something."""


def _uvit(dim: int, depth: int, heads: int) -> dict[str, Any]:
    return {"dim": dim, "depth": depth, "heads": heads}


# Small batches: on a CPU, more steps beat larger ones. A small UNet shows far more in the minutes that a CPU has
# (`git show 47c1161:research/budget.py`); beyond come U-ViTs, the last one U-ViT-S with its authors' rate.
UNETS = (
    Size(16, "unet/small", {}, 32, 1e-3, 1000),
    Size(32, "unet/small", {}, 32, 1e-3, 3000),
    Size(32, "unet/small", {"block_out_channels": [64, 128, 192]}, 32, 1e-3, 10_000),
)
SMALL_UVITS = (
    Size(16, "uvit", _uvit(96, 4, 4), 32, 2e-3, 1000),
    Size(16, "uvit", _uvit(128, 4, 4), 32, 2e-3, 5000),
    Size(32, "uvit", _uvit(128, 4, 4), 32, 2e-3, 8000),
    Size(32, "uvit", _uvit(192, 6, 4), 32, 1e-3, 10_000),
)
LARGE_UVITS = (
    Size(32, "uvit", _uvit(256, 8, 4), 64, 1e-3, 20_000),
    Size(64, "uvit", _uvit(384, 10, 6), 64, 5e-4, 40_000),
    Size(64, "uvit", _uvit(512, 12, 8), 128, 2e-4, 100_000),
)
LARGEST_SIDE = max(size.side for size in LARGE_UVITS)


@dataclass(frozen=True)
class Pictures:
    """The data, as far as known before anything is chosen."""

    count: int
    channels: int
    height: int
    width: int
    classes: tuple[str, ...] | None = None
    sizes: str = ""
    """In words, where the images differ."""

    def shape(self, config: TrainConfig) -> DataShape:
        side = config.images.size
        height, width = (side, side) if side else (self.height, self.width)
        return DataShape(config.images.channels or self.channels, height, width, self.classes)


@dataclass(frozen=True)
class Plan:
    """The choice, and why. Print it."""

    config: TrainConfig
    budget: float
    seconds_per_step: float
    images: int
    """Images that are trained on."""
    why: str

    @property
    def seconds(self) -> float:
        """Time of the whole run, samples and held-out losses included."""
        return self.config.steps * self.seconds_per_step * (1 + _looks(self.config))

    @property
    def epochs(self) -> float:
        return self.config.steps * self.config.batch_size / max(1, self.images)

    def __str__(self) -> str:
        config, size, held = self.config, self.config.images.size, self.config.images.held_out
        another = "--model-options dim=... depth=..." if config.model == "uvit" else "--model uvit takes a U-ViT"
        epochs = f"{self.epochs:,.0f}" if self.epochs >= 10 else f"{self.epochs:.2g}"
        every = config.checkpoints.save_every
        often = f"every {every} steps, about every {duration(self.seconds / config.steps * every)}"
        rows = {
            "images": f"{size}x{size} pixels (--size)" if size else "",
            "network": f"{config.network} ({another})",
            "batch": f"{counted(config.batch_size, 'image')} (--batch-size)",
            "steps": f"{config.steps:,} = {epochs} epochs of {counted(self.images, 'image')} (--steps)",
            "held out": f"{held} images, for the held-out loss (--held-out)" if held else "",
            "samples": f"and checkpoints {often if every < config.steps else 'at the end'}",
            "time": f"about {duration(self.seconds)}: {_seconds(self.seconds_per_step)} per step, measured now",
            "why": self.why,
        }
        lines = [f"  {name:<9} {value}" for name, value in rows.items() if value]
        return "\n".join([f"sized to this machine, for {duration(self.budget)} (--budget 2h gives it more):", *lines])


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 0.1 else f"{value * 1000:.2g} ms"


# The choice


def choose(
    config: TrainConfig,
    given: Collection[str],
    pictures: Pictures,
    seconds_of_step: Callable[[TrainConfig], float],
    budget: float,
) -> Plan:
    """The largest size that gets the steps it needs. The next one is timed only if the one before was enough."""
    best, why = None, "this is the largest size that was tried"
    for filled, needed in possible_runs(config, given, pictures):
        images = pictures.count - filled.images.held_out
        if best is not None and needed * filled.batch_size > MOST_EPOCHS * images:
            why = _by_heart(images)
            break
        seconds = seconds_of_step(filled)
        steps = _steps(intervals(filled, given, seconds, budget), seconds, budget)
        least = config.steps if "steps" in given else needed  # of given steps, whether they can be done
        if best is not None and steps < least:
            side = f", on {filled.images.size}x{filled.images.size} pixels"
            next_size = f"{filled.network}, batch {filled.batch_size}{side}"
            why = f"the next size, {next_size}, takes {_seconds(seconds)} per step: {steps:,} steps, and it needs "
            why += f"{least:,}"
            break
        best = lengthened(filled, given, seconds, budget, images, least)
        if steps < least:
            enough = least * seconds * (1 + _looks(best.config)) / USABLE
            why = "this is the smallest size, and its samples will be rough: images like these need about "
            why += f"{least:,} steps, so give a longer --budget, of {_budget_text(enough)}"
            break
    assert best is not None, "there is always a smallest size"
    return replace(best, why=best.why or why)


def possible_runs(config: TrainConfig, given: Collection[str], pictures: Pictures) -> Iterator[tuple[TrainConfig, int]]:
    """From small to large, each with everything that was not given filled in, and the steps that it needs."""
    sizes: Sequence[Size] = (*UNETS, *LARGE_UVITS)
    if config.model != "uvit":
        sizes = [Size(side, config.model, {}, 32, 0.0, 1000) for side in (16, 32, 64)]
    elif "model" in given or config.model_options or config.diffusion.condition == "text":
        # Who names options of a U-ViT wants one; texts need one as well.
        sizes = (*SMALL_UVITS, *LARGE_UVITS)
    found: list[TrainConfig] = []
    for size in sizes:
        side = min(size.side, pictures.height, pictures.width) // SIDES * SIDES
        values: dict[str, Any] = {
            "images.size": config.images.size or max(SIDES, side),
            "images.held_out": held_out(pictures.count),
            "batch_size": min(size.batch_size, pictures.count),
            "logging.samples": SAMPLES,
        }
        options = size.options
        if config.model == "uvit":
            # A network that predicts v shows something much earlier than one that predicts ε.
            values |= {"diffusion.prediction": "v"} if NoiseProcess(config.diffusion.schedule).is_diffusion else {}
            values |= {"optimizer.lr": size.lr, "optimizer.warmup": 100}
            values |= {"optimizer.betas": (0.9, 0.99), "optimizer.clip": 1.0}
        if size.model == "uvit":
            options = new_uvit_options() | options
            # Muon was measured on narrow networks alone (docs/evidence/faster).
            if {**options, **config.model_options}["dim"] < NARROW:
                values |= {f"optimizer.{name}": value for name, value in NEW_RUN.items()}
        filled = replace(_fill(config, given, values), model=size.model)
        filled = replace(filled, model_options={**options, **config.model_options})
        if filled not in found:
            found.append(filled)
            yield filled, size.least


def lengthened(
    config: TrainConfig, given: Collection[str], seconds: float, budget: float, images: int, least: int = 1
) -> Plan:
    """The steps and intervals of a configuration whose sizes are settled."""
    if "steps" in given:
        filled = intervals(config, given, seconds, config.steps * seconds)
        return Plan(filled, budget, seconds, images, "what you gave")
    filled = intervals(config, given, seconds, budget)
    steps, most = _steps(filled, seconds, budget), max(least, MOST_EPOCHS * images // config.batch_size)
    why = _by_heart(images) if steps > most else ""
    return Plan(replace(filled, steps=min(steps, most)), budget, seconds, images, why)


def _by_heart(images: int) -> str:
    return f"more than {MOST_EPOCHS} epochs, or a larger network, would learn {images} images by heart"


def _budget_text(seconds: float) -> str:
    """As --budget takes it: 45m, 3h."""
    return f"{math.ceil(seconds / 60)}m" if seconds < 7200 else f"{math.ceil(seconds / 3600)}h"


def steps_needed(config: TrainConfig) -> int | None:
    """Steps before the samples of such a run show something; None for sizes that were never tried."""
    for size in (*UNETS, *SMALL_UVITS, *LARGE_UVITS):
        alike = size.model == config.model and size.side == config.images.size
        if alike and {**config.model_options, **size.options} == config.model_options:
            return size.least
    return None


def intervals(config: TrainConfig, given: Collection[str], seconds: float, budget: float) -> TrainConfig:
    """Progress every few seconds; samples and checkpoints every few minutes, yet not so often that they take over."""
    grid = config.logging.samples * config.logging.sampler_steps * FORWARD / config.batch_size  # in steps
    often = min(budget / 10, 300.0) / seconds
    values = {"logging.log_every": min(100.0, 5.0 / seconds), "checkpoints.save_every": max(often, 10 * grid)}
    return _fill(config, given, {path: _round(value) for path, value in values.items()})


def held_out(count: int) -> int:
    """Every tenth image, at most a thousand; none of a handful."""
    return min(MOST_HELD_OUT, int(count * HELD_OUT_SHARE)) if count >= LEAST_TO_HOLD_OUT else 0


def _fill(config: TrainConfig, given: Collection[str], values: dict[str, Any]) -> TrainConfig:
    """The configuration with these values, by dotted name, apart from those that the user gave."""
    return with_values(config, {path: value for path, value in values.items() if path.split(".")[-1] not in given})


def _steps(config: TrainConfig, seconds: float, budget: float) -> int:
    """Steps that fit, rounded to two digits, for people."""
    fits = max(1, int(budget * USABLE / (seconds * (1 + _looks(config)))))
    unit = 10 ** max(0, len(str(fits)) - 2)
    return fits // unit * unit


def _looks(config: TrainConfig) -> float:
    """Cost of samples and held-out losses, as a share of the steps' time."""
    forwards = config.images.held_out / config.held_out_every
    if config.samples_every:
        forwards += config.logging.samples * config.logging.sampler_steps / config.samples_every
    return forwards * FORWARD / config.batch_size


def _round(value: float) -> int:
    """Down to 1, 2 or 5 times a power of ten."""
    if value < 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return int(next(digit for digit in (5, 2, 1) if digit * power <= value) * power)


# The data and the timing


def size_run(config: TrainConfig, given: Collection[str], progress: Any = None) -> Plan:
    """Look at the data, time a few sizes and choose. Of several processes the first one does it."""
    accelerator = make_accelerator(config, ".")
    config = _with_budget(config, accelerator)

    def work() -> Plan:
        pictures = glance(config, progress)
        if config.images.held_out:
            require_both_sides(config.images.held_out, pictures.count, config.data)
        found = counted(pictures.count, "image")
        sizes = pictures.sizes or f"{pictures.width}x{pictures.height}"
        logger.info(f"{config.data}: {found} of {sizes}; timing a few networks ...")
        if accelerator.device.type == "cpu" and (hint := busy_hint()):
            logger.info(hint)
        if pictures.count < FEW_IMAGES:
            logger.info(f"{found}: a network learns so few by heart; a few hundred are needed for something new")
        budget = seconds_of(str(config.budget))
        return choose(
            config, given, pictures, lambda each: step_seconds(each, pictures.shape(each), accelerator), budget
        )

    return on_main(accelerator, work)


def lengthen_run(config: TrainConfig, given: Collection[str], data: ImageData) -> Plan:
    """The steps of a configuration with sizes of its own, for its budget."""
    accelerator = make_accelerator(config, ".")
    budget = seconds_of(str(_with_budget(config, accelerator).budget))

    def work() -> Plan:
        return lengthened(config, given, step_seconds(config, shape_of(data), accelerator), budget, len(data))

    return on_main(accelerator, work)


def busy_hint() -> str:
    """On a CPU that others use as well: threads that wait for each other made steps 50 times as slow as one alone."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if torch.get_num_threads() < 2 or load < BUSY * cores:
        return ""
    return (
        f"this machine is busy (load {load:.0f} on {counted(cores, 'core')}), and threads wait for each other: with "
        f"OMP_NUM_THREADS=1 in front of the command, steps may take far less time"
    )


def _with_budget(config: TrainConfig, accelerator: Any) -> TrainConfig:
    return replace(config, budget=config.budget or (CPU_BUDGET if accelerator.device.type == "cpu" else GPU_BUDGET))


def fit_held_out(config: TrainConfig, hint: str = "") -> TrainConfig:
    """A recipe's number of held-out images is for its own data. Of a smaller folder, every tenth is held out."""
    wanted = config.images.held_out
    if not wanted or config.images.autoencoder is not None:
        return config
    count = glance(config).count
    if wanted <= count * MOST_HELD_OUT_SHARE:
        return config
    kept = f"{held_out(count)} are held out, not {wanted} as for the recipe's own data{hint}"
    logger.info(f"of the {count} images of {config.data}, {kept}")
    return with_values(config, {"images.held_out": held_out(count)})


def glance(config: TrainConfig, progress: Callable[[int, int], None] | None = None) -> Pictures:
    """Number, size and channels of the images. Those of different sizes are measured by the smallest."""
    if config.images.autoencoder is not None:
        raise InvalidConfigError("what trains on latents is not sized to the machine: leave out `budget`, give `steps`")
    reading = {**config.images.reading(), "memory_limit": 0}  # headers are enough: training decodes the images, once
    try:
        data = load_data(config.data, **reading, progress=progress)
        sizes = ""
    except MixedSizesError as error:
        side, sizes = min(error.smallest, LARGEST_SIDE), error.found
        data = load_data(config.data, **{**reading, "size": side}, progress=progress)
    return Pictures(len(data), data.channels, data.height, data.width, data.classes, sizes)


def step_seconds(config: TrainConfig, shape: DataShape, accelerator: Any, patience: float = 1.5) -> float:
    """Seconds of a training step: the median of a few, after one to warm up. The images are grey."""
    whole, few = config.batch_size, 4 * torch.get_num_threads() * config.hardware.accumulation
    if accelerator.device.type == "cpu" and accelerator.num_processes == 1 and few < whole:
        # A step on a CPU takes as long as it has images: a slow one is timed on a part of its batch.
        share = step_seconds(replace(config, batch_size=few), shape, accelerator, patience=0.0) * whole / few
        if share > SLOW_STEP:
            return share
    quiet = replace(config.logging, monitor_every=0, trackers=())
    config = replace(config, steps=100, logging=quiet, start_from=None)
    labels = torch.zeros(config.batch_size, dtype=torch.long) if shape.classes else None
    captions = ["grey"] * config.batch_size if config.diffusion.condition == "text" else None
    images = torch.full((config.batch_size, *shape.image), 128, dtype=torch.uint8)
    grey = MemoryData("grey", images, Annotations(labels, shape.classes, captions))
    with TemporaryDirectory() as nowhere, ExitStack() as stack:
        stack.callback(restore_global_state, global_state())
        progress = TrainingProgress(1, enabled=False)
        trainer = Trainer(config, RunFolder(nowhere), accelerator, RunData(config, grey, grey), progress)
        stack.callback(trainer.close)
        trainer.begin_at(0)
        taken: list[float] = []
        while len(taken) < 4 or (sum(taken) < patience and len(taken) < 20):
            batches = [next(trainer.source) for _ in trainer.parts]
            began = time.perf_counter()
            float(trainer.step(batches).grad_norm)  # waits for the device
            taken.append(time.perf_counter() - began)
        return median(taken[1:])
