"""How large a run is: image size, network, batch and steps for a budget of time, on this machine.

`choose` is a pure function: candidates from small to large and the seconds of a step of each go in, and a `Plan` comes
out. The largest candidate that still gets the steps it needs wins. `step_seconds` does the timing, on a few real steps.
What the user gave is never changed, and a run that has begun is never sized again: its config.yaml has the numbers.

    plan = size_run(config, given={"data", "scaling"}, log=print)
    print(plan)                   # what was chosen, why, and the flags that say otherwise
    train(plan.config)
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..config import NEW_NARROW, NEW_RUN, TrainConfig, new_uvit_options, seconds_of, with_values
from ..console import duration
from ..data import Annotations, ImageData, MemoryData, load_data, require_both_sides
from ..errors import InvalidConfigError, MixedSizesError
from ..noise import NoiseProcess
from ..randomness import global_state, restore_global_state
from ..runs import DataShape, Log, RunData, RunFolder, make_accelerator, on_main
from .loop import Trainer
from .tracking import TrainingProgress

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
"""What a forward costs of a training step on the same images."""
SLOW_STEP = 3.0
"""Seconds. A step that takes longer is timed on a part of its batch."""


@dataclass(frozen=True)
class Rung:
    """A size at which training is worth its time: images of `side` pixels, a network, and the steps it needs."""

    side: int
    model: str
    options: dict[str, Any]
    batch_size: int
    lr: float
    least: int
    """Steps before its samples show something."""


def _uvit(dim: int, depth: int, heads: int) -> dict[str, Any]:
    # The authors' deviation of 0.02 is for widths of 512 and more.
    return {"dim": dim, "depth": depth, "heads": heads} | (NEW_NARROW if dim < 256 else {})


# Small batches: on a CPU, more steps beat larger ones. A small UNet shows far more in the minutes that a CPU has
# (`git show 47c1161:research/budget.py`); beyond come U-ViTs, the last one U-ViT-S with its authors' rate.
UNETS = (
    Rung(16, "unet/small", {}, 32, 1e-3, 1000),
    Rung(32, "unet/small", {}, 32, 1e-3, 3000),
    Rung(32, "unet/small", {"block_out_channels": [64, 128, 192]}, 32, 1e-3, 10_000),
)
SMALL_UVITS = (
    Rung(16, "uvit", _uvit(96, 4, 4), 32, 2e-3, 1000),
    Rung(16, "uvit", _uvit(128, 4, 4), 32, 2e-3, 5000),
    Rung(32, "uvit", _uvit(128, 4, 4), 32, 2e-3, 8000),
    Rung(32, "uvit", _uvit(192, 6, 4), 32, 1e-3, 10_000),
)
LARGE_UVITS = (
    Rung(32, "uvit", _uvit(256, 8, 4), 64, 1e-3, 20_000),
    Rung(64, "uvit", _uvit(384, 10, 6), 64, 5e-4, 40_000),
    Rung(64, "uvit", _uvit(512, 12, 8), 128, 2e-4, 100_000),
)
LARGEST_SIDE = max(rung.side for rung in LARGE_UVITS)
HALVED = 4
"""The sides of images of "unet/small" are multiples of this."""
FEW_IMAGES = 20
OTHER_NETWORKS = (16, 32, 64)
"""Image sizes that are tried with a network that the user chose."""


# The pure part: candidates, the choice among them, and the plan


@dataclass(frozen=True)
class Pictures:
    """What is known of the data before anything is chosen."""

    count: int
    channels: int
    height: int
    width: int
    classes: tuple[str, ...] | None = None
    sizes: str = ""  # in words, where the images differ

    @property
    def side(self) -> int:
        return min(self.height, self.width)

    def shape(self, config: TrainConfig) -> DataShape:
        side = config.images.size
        height, width = (side, side) if side else (self.height, self.width)
        return DataShape(config.images.channels or self.channels, height, width, self.classes)


@dataclass(frozen=True)
class Candidate:
    config: TrainConfig
    least: int

    def __str__(self) -> str:
        options, side = self.config.model_options, self.config.images.size
        network = self.config.model
        if network == "uvit" and {"dim", "depth"} <= set(options):
            network = f"U-ViT of width {options['dim']} and depth {options['depth']}"
        elif "block_out_channels" in options:
            network += f" of widths {', '.join(map(str, options['block_out_channels']))}"
        return f"{network}, batch {self.config.batch_size}" + (f", on {side}x{side} pixels" if side else "")


@dataclass(frozen=True)
class Timed:
    """A candidate on this machine."""

    candidate: Candidate
    seconds: float
    """Of a step."""
    steps: int
    """That fit into the budget."""

    @property
    def enough(self) -> bool:
        return self.steps >= self.candidate.least


@dataclass(frozen=True)
class Plan:
    """What was chosen, and why. Print it."""

    config: TrainConfig
    budget: float
    seconds_per_step: float
    images: int
    """That are trained on."""
    timed: tuple[Timed, ...] = ()
    """All that was tried, the last one perhaps too large."""
    enough: bool = True
    stopped_by: str = "budget"
    """What limits the steps: the budget, the data, or the user."""

    @property
    def seconds(self) -> float:
        """Of the whole run, samples and held-out losses included."""
        return self.config.steps * self.seconds_per_step * (1 + _looks(self.config))

    @property
    def epochs(self) -> float:
        return self.config.steps * self.config.batch_size / max(1, self.images)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        config, options = self.config, self.config.model_options
        yield f"sized to this machine, for {duration(self.budget)} (--budget 2h gives it more):"
        if config.images.size:
            yield f"  images    {config.images.size}x{config.images.size} pixels (--size)"
        shown = ("dim", "depth", "patch_size", "block_out_channels")
        network = ", ".join(f"{name} {options[name]}" for name in shown if name in options)
        flags = "--model-options dim=... depth=..." if config.model == "uvit" else "--model uvit takes a U-ViT"
        yield f"  network   {config.model}{': ' * bool(network)}{network} ({flags})"
        yield f"  batch     {config.batch_size} images (--batch-size)"
        epochs = f"{self.epochs:,.0f}" if self.epochs >= 10 else f"{self.epochs:.2g}"
        yield f"  steps     {config.steps:,} = {epochs} epochs of {self.images} images (--steps)"
        yield f"  held out  {config.images.held_out} images, for the held-out loss (--held-out)"
        yield f"  samples   and checkpoints every {config.checkpoints.save_every} steps, about every {self.interval()}"
        yield f"  time      about {duration(self.seconds)}: {_seconds(self.seconds_per_step)} per step, measured now"
        yield f"  why       {self.why()}"

    def interval(self) -> str:
        return duration(self.config.checkpoints.save_every * self.seconds_per_step * (1 + _looks(self.config)))

    def why(self) -> str:
        refused = [timed for timed in self.timed[1:] if not timed.enough]
        if refused:
            last = refused[-1]
            return (
                f"the next size, {last.candidate}, takes {_seconds(last.seconds)} per step: {last.steps:,} steps, and "
                f"it needs {last.candidate.least:,}"
            )
        if not self.enough:
            return "this is the smallest size, and its samples may be rough in that time: give a longer --budget"
        if self.stopped_by == "data":
            return f"more than {MOST_EPOCHS} epochs, or a larger network, would learn {self.images} images by heart"
        return "this is the largest size that was tried" if self.timed else "what you gave"


def ladder(config: TrainConfig, given: Collection[str]) -> Sequence[Rung]:
    """The sizes to try, from small to large."""
    if config.model != "uvit":
        return [Rung(side, config.model, {}, SMALL_UVITS[0].batch_size, 0.0, 1000) for side in OTHER_NETWORKS]
    # What is said of a U-ViT is said to get one; texts need one as well.
    wanted = "model" in given or config.model_options or config.diffusion.condition == "text"
    return (*(SMALL_UVITS if wanted else UNETS), *LARGE_UVITS)


def steps_needed(config: TrainConfig) -> int | None:
    """Steps before the samples of such a run show something; None for sizes that were never tried."""
    for rung in (*UNETS, *SMALL_UVITS, *LARGE_UVITS):
        alike = rung.model == config.model and rung.side == config.images.size
        if alike and {**config.model_options, **rung.options} == config.model_options:
            return rung.least
    return None


def candidates(config: TrainConfig, given: Collection[str], pictures: Pictures) -> list[Candidate]:
    """From small to large, each with everything that was not given filled in."""
    found: list[Candidate] = []
    for rung in ladder(config, given):
        side = config.images.size or _side(rung, pictures.side)
        values: dict[str, Any] = {"images.size": side, "images.held_out": held_out(pictures.count)}
        values |= {"batch_size": min(rung.batch_size, pictures.count)}
        values |= {"logging.samples": SAMPLES}
        options = rung.options
        if config.model == "uvit":
            # A network that predicts v shows something much earlier than one that predicts ε.
            values |= {"diffusion.prediction": "v"} if NoiseProcess(config.diffusion.schedule).is_diffusion else {}
            values |= {"optimizer.lr": rung.lr, "optimizer.warmup": 100}
            values |= {"optimizer.betas": (0.9, 0.99), "optimizer.clip": 1.0}
        if rung.model == "uvit":
            values |= {f"optimizer.{name}": value for name, value in NEW_RUN.items()}
            options = new_uvit_options() | options
        if rung.model == "uvit" and side % _patch(side) == 0:
            options = options | {"patch_size": _patch(side)}
        filled = replace(fill(config, given, values), model=rung.model)
        filled = replace(filled, model_options={**options, **config.model_options})
        if filled not in [each.config for each in found]:
            found.append(Candidate(filled, rung.least))
    return found


def choose(
    config: TrainConfig,
    given: Collection[str],
    pictures: Pictures,
    seconds_of_step: Callable[[TrainConfig], float],
    budget: float,
) -> Plan:
    """The largest candidate that gets the steps it needs. The next one is timed only if the one before was enough."""
    timed: list[Timed] = []
    best: Timed | None = None
    by_data = False
    for candidate in candidates(config, given, pictures):
        images = pictures.count - candidate.config.images.held_out
        by_data = best is not None and candidate.least * candidate.config.batch_size > MOST_EPOCHS * images
        if by_data:
            break
        seconds = seconds_of_step(candidate.config)
        filled = intervals(candidate.config, given, seconds, budget)
        found = Timed(candidate, seconds, _steps(filled, seconds, budget))
        if "steps" in given:  # then what counts is whether these can be done
            found = replace(found, candidate=replace(candidate, least=config.steps))
        timed.append(found)
        if best is None or found.enough:
            best = found
        if not found.enough:
            break
    assert best is not None, "there is always a smallest candidate"
    images = pictures.count - best.candidate.config.images.held_out
    plan = lengthened(best.candidate.config, given, best.seconds, budget, images, best.candidate.least)
    stopped_by = "data" if plan.stopped_by == "budget" and by_data else plan.stopped_by
    return replace(plan, timed=tuple(timed), enough=best.enough, stopped_by=stopped_by)


def lengthened(
    config: TrainConfig, given: Collection[str], seconds: float, budget: float, images: int, least: int = 1
) -> Plan:
    """The steps and intervals of a configuration whose sizes are settled."""
    filled = intervals(config, given, seconds, budget)
    if "steps" in given:
        filled = intervals(config, given, seconds, config.steps * seconds)
        return Plan(filled, budget, seconds, images, stopped_by="you")
    steps = _steps(filled, seconds, budget)
    most = max(least, MOST_EPOCHS * images // config.batch_size)
    filled = replace(filled, steps=min(steps, most))
    return Plan(filled, budget, seconds, images, stopped_by="budget" if steps <= most else "data")


def intervals(config: TrainConfig, given: Collection[str], seconds: float, budget: float) -> TrainConfig:
    """Progress every few seconds; samples and checkpoints every few minutes, yet not so often that they take over."""
    grid = config.logging.samples * config.logging.sampler_steps * FORWARD / config.batch_size  # in steps
    often = min(budget / 10, 300.0) / seconds
    return fill(
        config,
        given,
        {
            "logging.log_every": _round(min(100.0, 5.0 / seconds)),
            "checkpoints.save_every": _round(max(often, 10 * grid)),
        },
    )


def held_out(count: int) -> int:
    """Every tenth image, at most a thousand; none of a handful."""
    return min(MOST_HELD_OUT, int(count * HELD_OUT_SHARE)) if count >= LEAST_TO_HOLD_OUT else 0


def fit_held_out(config: TrainConfig, log: Log, hint: str = "") -> TrainConfig:
    """A recipe's number of held-out images is for its own data. Of a smaller folder, every tenth is held out."""
    wanted = config.images.held_out
    if not wanted or config.images.autoencoder is not None:
        return config
    count = glance(config).count
    if wanted <= count * MOST_HELD_OUT_SHARE:
        return config
    fitting = held_out(count)
    log(f"of the {count} images of {config.data}, {fitting} are held out, not {wanted}{hint}")
    return with_values(config, {"images.held_out": fitting})


def fill(config: TrainConfig, given: Collection[str], values: dict[str, Any]) -> TrainConfig:
    """The configuration with these values, by dotted name, apart from those that the user gave."""
    return with_values(config, {path: value for path, value in values.items() if path.split(".")[-1] not in given})


def _steps(config: TrainConfig, seconds: float, budget: float) -> int:
    """Steps that fit, rounded to two digits, for people."""
    fits = max(1, int(budget * USABLE / (seconds * (1 + _looks(config)))))
    unit = 10 ** max(0, len(str(fits)) - 2)
    return fits // unit * unit


def _looks(config: TrainConfig) -> float:
    """What samples and held-out losses add to the time of a step."""
    forwards = 0.0
    if config.samples_every:
        forwards += config.logging.samples * config.logging.sampler_steps / config.samples_every
    forwards += config.images.held_out / config.held_out_every
    return forwards * FORWARD / config.batch_size


def _side(rung: Rung, native: int) -> int:
    """At most that of the images, and a multiple of the patch, or of what a UNet halves twice."""
    side = min(rung.side, native)
    unit = HALVED if rung.model.startswith("unet/") else _patch(side)
    return max(unit, side // unit * unit)


def _patch(side: int) -> int:
    # Patches of 2x2 up to 32 pixels: larger ones leave a grain that takes far longer to vanish.
    return 2 if side <= 32 else 4 if side <= 64 else 8


def _round(value: float) -> int:
    """Down to 1, 2 or 5 times a power of ten."""
    if value < 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return int(next(digit for digit in (5, 2, 1) if digit * power <= value) * power)


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 0.1 else f"{value * 1000:.2g} ms"


# The timing


def size_run(config: TrainConfig, given: Collection[str], log: Log, progress: Any = None) -> Plan:
    """Look at the data, time a few sizes and choose. Of several processes the first one does it."""
    accelerator = make_accelerator(config, ".")

    def work() -> Plan:
        pictures = glance(config, progress)
        if config.images.held_out:
            require_both_sides(config.images.held_out, pictures.count, config.data)
        budget = config.budget or default_budget(accelerator.device)
        sizes = pictures.sizes or f"{pictures.width}x{pictures.height}"
        counted = f"{pictures.count} image{'s' * (pictures.count != 1)}"
        log(f"{config.data}: {counted} of {sizes}; timing a few networks ...")
        if pictures.count < FEW_IMAGES:
            log(f"{counted}: a network learns so few by heart; a few hundred are needed for something new")

        def timed(each: TrainConfig) -> float:
            return step_seconds(each, pictures.shape(each), accelerator)

        plan = choose(config, given, pictures, timed, seconds_of(budget))
        return replace(plan, config=replace(plan.config, budget=budget))

    return on_main(accelerator, work)


def lengthen_run(config: TrainConfig, given: Collection[str], data: ImageData) -> Plan:
    """The steps of a configuration with sizes of its own, for its budget."""
    accelerator = make_accelerator(config, ".")
    shape = DataShape(data.channels, data.height, data.width, data.classes)

    def work() -> Plan:
        seconds = step_seconds(config, shape, accelerator)
        budget = seconds_of(config.budget or default_budget(accelerator.device))
        return lengthened(config, given, seconds, budget, len(data))

    return on_main(accelerator, work)


def default_budget(device: torch.device) -> str:
    return CPU_BUDGET if device.type == "cpu" else GPU_BUDGET


def glance(config: TrainConfig, progress: Callable[[int, int], None] | None = None) -> Pictures:
    """Number, size and channels of the images. Those of different sizes are measured by the smallest."""
    if config.images.autoencoder is not None:
        raise InvalidConfigError("what trains on latents is not sized to the machine: leave out --budget, give --steps")
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
    whole = config.batch_size
    parts = accelerator.num_processes * config.hardware.accumulation
    few = min(whole, 4 * torch.get_num_threads() * parts)
    if accelerator.device.type == "cpu" and few < whole:
        # A step on a CPU takes as long as it has images: a slow one is timed on a part of its batch.
        share = _median_step(config, shape, accelerator, few, 0.0) * whole / few
        if share > SLOW_STEP:
            return share
    return _median_step(config, shape, accelerator, whole, patience)


def _median_step(config: TrainConfig, shape: DataShape, accelerator: Any, images: int, patience: float) -> float:
    quiet = replace(config.logging, monitor_every=0, trackers=())
    config = replace(config, batch_size=images, steps=100, logging=quiet, start_from=None, lora=0)
    random = global_state()
    with TemporaryDirectory() as nowhere, ExitStack() as stack:
        stack.callback(restore_global_state, random)
        progress = TrainingProgress(1, enabled=False)
        trainer = Trainer(config, RunFolder(nowhere), accelerator, _grey(config, shape), progress)
        stack.callback(trainer.close)
        trainer.begin_at(0)
        taken: list[float] = []
        while len(taken) < 4 or (sum(taken) < patience and len(taken) < 20):
            batches = [next(trainer.source) for _ in trainer.parts]
            began = time.perf_counter()
            float(trainer.step(batches).grad_norm)  # waits for the device
            taken.append(time.perf_counter() - began)
        return median(taken[1:])


def _grey(config: TrainConfig, shape: DataShape) -> RunData:
    """Images without content, and as much of labels and captions as the condition needs."""
    count = config.batch_size
    labels = torch.zeros(count, dtype=torch.long) if shape.classes else None
    captions = ["grey"] * count if config.diffusion.condition == "text" else None
    images = torch.full((count, *shape.image), 128, dtype=torch.uint8)
    data = MemoryData("grey", images, Annotations(labels, shape.classes, captions))
    return RunData(config, data, data)
