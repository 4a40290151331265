"""Images per second to a given Fréchet distance: which sampler, with how many steps; and diffusers' own pipeline."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..contender import interleave, turn_of
from ..record import Result, Spread, Table, ratios
from ..settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from scalelong.data import ImageData
    from scalelong.diffusion.images import ImageMaker
    from scalelong.diffusion.solvers import SampleSettings
    from scalelong.runs.load import Run


SWEEP = {
    "dpm++": (10, 15, 20, 25),
    "ddim": (50,),
    "ddpm": (250,),
}
QUICK_SWEEP = {"dpm++": (2, 4), "ddpm": (6,)}
NETWORKS = ("digits-class", "fashion-class")
"""Those that come with the package."""
BATCH = 64
SETS, IMAGES = 8, 150
"""Sets into which the images are divided for the intervals, and the images of a set."""
NEAR = 1.05
"""The target, if none is given, as a multiple of the distance of the last way of the sweep."""


def sweep(rounds: int, settings: Settings) -> Result:
    """Two networks that come with the package, or the given run: speed and distance of each sampler."""
    from scalelong.diffusion.solvers import SampleSettings

    ways = (QUICK_SWEEP if settings.quick else SWEEP).items()
    return _over_runs(
        {
            f"{sampler}, {count} steps": SampleSettings(sampler=sampler, steps=count)
            for sampler, counts in ways
            for count in counts
        },
        rounds,
        settings,
    )


def _over_runs(ways: "dict[str, SampleSettings]", rounds: int, settings: Settings) -> Result:
    import torch

    from scalelong.runs.load import load_run
    from scalelong.runs.shipped import load_trained

    torch.set_num_threads(settings.threads)
    runs = [load_run(settings.run)] if settings.run is not None else map(load_trained, NETWORKS)
    tables, values = [], {}
    for run in runs:
        table, found = _sweep_run(run, ways, rounds, settings)
        tables.append(table)
        values[run.folder.name] = found
        if settings.quick:
            break
    return Result(tables, values)


def _sweep_run(
    run: "Run", ways: "dict[str, SampleSettings]", rounds: int, settings: Settings
) -> tuple[Table, dict[str, Any]]:
    """The last of the ways is what the others are compared with."""
    from scalelong.diffusion.images import requests
    from scalelong.evaluation import evaluation_prompts, reference_data, trusted_features

    sets, count = (2, 32) if settings.quick else (SETS, IMAGES)
    data = reference_data(run.config)
    extractor, reference = trusted_features("auto", data, None, _silent)
    wanted = requests(sets * count, 0, evaluation_prompts(run.config, data, count)[0])
    distances: dict[str, Distances] = {}
    turns = {}
    for name, way in ways.items():
        images = run.maker.all(wanted, way, batch_size=BATCH)
        distances[name] = _distances(images, sets, extractor, reference)
        turns[name] = turn_of(partial(run.maker.all, wanted[:BATCH], way, batch_size=BATCH), _clock(settings))
    seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=0.0, warm_up=1)
    table = _table(run, data, distances, seconds, count, extractor.name, settings)
    return table, {"seconds": seconds, "frechet": {name: asdict(found) for name, found in distances.items()}}


@dataclass(frozen=True)
class Distances:
    """The Fréchet distance of all images, and that without each of the sets."""

    whole: float
    without: list[float]

    def score(self) -> Spread:
        return jackknife(self.whole, self.without)

    def beyond(self, other: "Distances") -> Spread:
        """The difference to the distance of images of the same seeds."""
        pairs = zip(self.without, other.without, strict=True)
        return jackknife(self.whole - other.whole, [one - two for one, two in pairs])


STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
"""Of the t distribution, for 95 % intervals, by degrees of freedom."""


def jackknife(value: float, without: Sequence[float]) -> Spread:
    """A value with its 95 % interval, from the values without each of several groups (delete-a-group jackknife)."""
    groups, mean = len(without), statistics.mean(without)
    variance = (groups - 1) / groups * sum((each - mean) ** 2 for each in without)
    half = STUDENT.get(groups - 1, 1.96) * math.sqrt(variance)
    return Spread(value, value - half, value + half)


def _distances(images: "Tensor", sets: int, extractor: Any, reference: Any) -> Distances:
    import torch

    from scalelong.evaluation.features import features_of
    from scalelong.evaluation.scores import Moments, frechet_distance

    def distance(features: "Tensor") -> float:
        return frechet_distance(reference.moments, Moments.of(features))

    parts = features_of(extractor, images).chunk(sets)
    without = [distance(torch.cat([*parts[:number], *parts[number + 1 :]])) for number in range(sets)]
    return Distances(distance(torch.cat(parts)), without)


def _clock(settings: Settings) -> Callable[[], float]:
    """One thread is timed by its processor time, which others on the machine disturb less."""
    return time.process_time if settings.threads == 1 else time.perf_counter


def _clock_name(settings: Settings) -> str:
    return "processor time of one thread" if settings.threads == 1 else f"{settings.threads} threads, the clock"


def _table(
    run: "Run",
    data: "ImageData",
    distances: dict[str, Distances],
    seconds: dict[str, list[float]],
    count: int,
    features: str,
    settings: Settings,
) -> Table:
    last = list(distances)[-1]
    target = settings.target or NEAR * distances[last].whole
    images = count * len(distances[last].without)
    rates = {name: Spread.of([min(BATCH, images) / value for value in values]) for name, values in seconds.items()}
    reached = {name: rates[name].median for name, found in distances.items() if found.whole <= target}
    rows = [
        [
            name,
            rates[name],
            found.score(),
            None if name == last else found.beyond(distances[last]),
            "yes" if name in reached else "no",
        ]
        for name, found in distances.items()
    ]
    columns = {
        "sampler": "text",
        "images per second": "rate",
        "Fréchet distance": "number",
        f"beyond that of {last}": "number",
        "reaches the target": "text",
    }
    fastest = f"the fastest that reaches it is {max(reached, key=lambda name: reached[name])}" if reached else "no one"
    clock = _clock_name(settings)
    notes = [
        f"Target: a distance of {target:.3g}; {fastest}.",
        f"Distances of {images} images of the same seeds, by {features} features; 95 % intervals by a jackknife over "
        f"{len(distances[last].without)} sets, for the differences over pairs of sets.",
        f"Images per second by {clock}, batches of {min(BATCH, images)}.",
    ]
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    title = f"Sampling {data.name} with {run.folder.name} ({run.config.model}, {parameters:,} parameters)"
    return Table(title, columns, rows, notes)


# Mixed precision

FRESH = {"U-ViT, dim 128, depth 12, 65 tokens": 64, "U-ViT-S/2": 16, "unet/cifar10": 16}
"""Networks as they are built, and their batches: how fast they are does not depend on what they have learned."""


def precision(rounds: int, settings: Settings) -> Result:
    """Speed and distance in bf16 of networks that come with the package, and speed of larger ones."""
    from scalelong.diffusion.solvers import SampleSettings

    steps = 2 if settings.quick else 25
    ways = {
        f"dpm++, {steps} steps, bf16": SampleSettings(steps=steps, precision="bf16"),
        f"dpm++, {steps} steps": SampleSettings(steps=steps),
    }
    found = _over_runs(ways, rounds, settings)
    if settings.quick or settings.run is not None:
        return found
    from scalelong.diffusion.images import requests

    rows, values = [], {}
    for name, batch in FRESH.items():
        maker, wanted = _fresh(name), requests(batch, 0)
        turns = {
            each: turn_of(partial(maker.all, wanted, SampleSettings(steps=2, precision=each)), _clock(settings))
            for each in ("no", "bf16")
        }
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=0.0, warm_up=1)
        rates = [Spread.of([batch / value for value in seconds[each]]) for each in ("no", "bf16")]
        rows.append([f"{name}, batch {batch}", *rates, Spread.of(ratios(seconds["no"], seconds["bf16"]))])
        values[name] = seconds
    columns = {"network": "text", "float32, images per second": "rate", "bf16": "rate", "times as fast": "times"}
    notes = [f"Two steps of dpm++; {_clock_name(settings)}."]
    table = Table("Sampling in bf16, networks with random weights", columns, rows, notes)
    return Result([*found.tables, table], {**found.rounds, "fresh": values})


def _fresh(name: str) -> "ImageMaker":
    import torch

    from scalelong.models import UViT
    from scalelong.models.presets import unet

    torch.manual_seed(0)
    if name == "unet/cifar10":
        model: Any = unet("cifar10")
        model.to(memory_format=torch.channels_last)
    elif name == "U-ViT-S/2":
        model = UViT.preset("cifar10-s2")
    else:
        model = UViT(image_size=32, patch_size=4, channels=3, dim=128, depth=12, heads=4)
    return _unconditional(model)


def _unconditional(model: Any) -> "ImageMaker":
    """For images of 32x32 in colour."""
    from scalelong.diffusion.conditions import Unconditional
    from scalelong.diffusion.images import ImageMaker
    from scalelong.models.call import Denoiser
    from scalelong.noise import NoiseProcess

    process = NoiseProcess("ddpm")
    return ImageMaker(model.eval(), Denoiser(model), process, "epsilon", (3, 32, 32), Unconditional(), None)


# diffusers' own pipeline, with the same network and the same scheduler

PIPELINES = (("digits-class", "dpm++", 25), ("fashion-class", "dpm++", 25), ("unet", "dpm++", 5), ("unet", "ddim", 5))


def pipeline(rounds: int, settings: Settings) -> Result:
    """Both make the same images of the same seeds, and take turns in one process."""
    import torch

    torch.set_num_threads(settings.threads)
    rows, values = [], {}
    for network, sampler, steps in PIPELINES[: 1 if settings.quick else None]:
        steps, batch = (2, 8) if settings.quick else (steps, BATCH if network != "unet" else 16)
        ours, theirs = _both(network, sampler, steps, batch)
        apart = float((ours().float() - theirs().float()).abs().max())
        turns = {"ours": turn_of(ours, _clock(settings)), "theirs": turn_of(theirs, _clock(settings))}
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=settings.turn_seconds, warm_up=1)
        name = f"{network}, {sampler}, {steps} steps, batch {batch}"
        rates = [Spread.of([batch / value for value in seconds[side]]) for side in ("ours", "theirs")]
        rows.append([name, *rates, Spread.of(ratios(seconds["theirs"], seconds["ours"])), apart])
        values[name] = {"seconds": seconds, "levels apart": apart}
    columns = {
        "network and sampler": "text",
        "ours, images per second": "rate",
        "diffusers' pipeline": "rate",
        "times as fast": "times",
        "levels apart": "number",
    }
    clock = _clock_name(settings)
    notes = [
        "`DDPMPipeline` of diffusers, which takes any network and scheduler, against `scalelong sample`, in turns in "
        f"one process; {clock}. unet is unet/cifar10, narrow (32x32). Levels apart: the largest difference of a pixel, "
        "of 255.",
    ]
    return Result([Table("Sampling against diffusers' own pipeline", columns, rows, notes)], values)


def _both(network: str, sampler: str, steps: int, batch: int) -> "tuple[Callable[[], Tensor], Callable[[], Tensor]]":
    """One batch of images, as uint8 (B, C, H, W), by each side."""
    import torch
    from diffusers.pipelines.ddpm.pipeline_ddpm import DDPMPipeline
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

    from scalelong.diffusion.images import requests
    from scalelong.diffusion.solvers import SampleSettings, scheduler

    maker, prompts = _maker(network)
    wanted = requests(batch, 0, prompts)
    condition = maker.conditions.from_prompts([request.prompt for request in wanted if request.prompt is not None])
    kind = {"dpm++": DPMSolverMultistepScheduler, "ddim": DDIMScheduler}[sampler]
    # Made anew of its configuration, so that it is diffusers' own.
    solver = kind.from_config(scheduler(maker.process, maker.prediction, sampler).config)

    class Network(torch.nn.Module):
        """What the pipeline asks for."""

        config = SimpleNamespace(in_channels=maker.shape[0], sample_size=maker.shape[1:])
        dtype, device = torch.float32, torch.device("cpu")

        def forward(self, x: "Tensor", t: "Tensor") -> SimpleNamespace:
            times = maker.process.network_time(t).expand(len(x))
            return SimpleNamespace(sample=maker.network(x, times, condition))

    made: Any = DDPMPipeline(unet=Network(), scheduler=solver)  # pyright: ignore[reportArgumentType]
    made.set_progress_bar_config(disable=True)
    settings = SampleSettings(sampler=sampler, steps=steps)

    def theirs() -> "Tensor":
        generators = [torch.Generator().manual_seed(request.seed) for request in wanted]
        found = made(batch_size=batch, generator=generators, num_inference_steps=steps, output_type="pt").images
        return (found * 255).round().to(torch.uint8)

    return lambda: maker.all(wanted, settings, batch_size=batch), theirs


def _maker(network: str) -> "tuple[ImageMaker, Sequence[str]]":
    import torch

    from scalelong.runs.shipped import load_trained

    if network != "unet":
        run = load_trained(network)
        return run.maker, run.default_prompts
    from ..contenders.ours import NETWORKS as OTHERS

    torch.manual_seed(0)
    return _unconditional(OTHERS["unet/cifar10, narrow"]()), ()


def _silent(_: str) -> None: ...


CASES = {"sweep": partial(sweep, 3), "precision": partial(precision, 5), "pipeline": partial(pipeline, 9)}
