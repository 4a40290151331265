"""Images per second to a given Fréchet distance: which sampler, with how many steps."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contender import interleave, turn_of
from ..record import Result, Spread, Table
from ..settings import Settings

if TYPE_CHECKING:
    from scalelong.runs.load import Run


SWEEP = {
    "dpm++": (5, 10, 20),
    "ddim": (10, 25, 50),
    "euler": (10, 25),
    "heun": (5, 12),
    "ddpm": (100,),
}
QUICK_SWEEP = {"dpm++": (2, 4), "ddim": (2,)}
BATCH = 64
TRAINING_STEPS = 600
NEAR = 1.05
"""The target, if none is given, as a multiple of the best distance."""


def sweep(rounds: int, settings: Settings) -> Result:
    import torch

    from scalelong.diffusion.images import requests
    from scalelong.diffusion.solvers import SampleSettings
    from scalelong.evaluation import load_extractor, reference_of, score_images
    from scalelong.evaluation.judge import evaluation_wishes, reference_data

    torch.set_num_threads(settings.threads)
    count = 32 if settings.quick else 500
    ways = [(sampler, steps) for sampler, all_ in (QUICK_SWEEP if settings.quick else SWEEP).items() for steps in all_]
    with _run(settings) as run:
        data = reference_data(run.config)
        extractor = load_extractor("classifier", data, None, _silent)
        reference = reference_of(data, extractor, _silent)
        wanted = requests(count, 0, evaluation_wishes(run.config, data, count)[0])
        distances: dict[str, Any] = {}
        turns = {}
        for sampler, steps in ways:
            way = SampleSettings(sampler=sampler, steps=steps)
            images = run.maker.all(wanted, way, batch_size=BATCH)
            name = f"{sampler}, {steps} steps"
            distances[name] = score_images(images, data, extractor, reference, subject={}).frechet
            turns[name] = turn_of(partial(run.maker.all, wanted[:BATCH], way, batch_size=BATCH))
        seconds = interleave(turns, settings.rounds_or(rounds), turn_seconds=0.0, warm_up=1)
        title = f"Sampling {data.name}, {run.config.model}, {run.step} training steps, {count} images for a distance"
    return _result(title, distances, seconds, min(BATCH, count), settings)


def _result(
    title: str, distances: dict[str, Any], seconds: dict[str, list[float]], batch: int, settings: Settings
) -> Result:
    best = min(score.value for score in distances.values())
    target = settings.target or NEAR * best
    rates = {name: Spread.of([batch / value for value in values]) for name, values in seconds.items()}
    reached = {name: rates[name] for name, score in distances.items() if score.value <= target}
    rows = [
        [name, rates[name], Spread(score.value, score.low, score.high), "yes" if name in reached else "no"]
        for name, score in distances.items()
    ]
    columns = {
        "sampler": "text",
        "images per second": "rate",
        "Fréchet distance": "number",
        "reaches the target": "text",
    }
    chosen = f"; the fastest that reaches it: {max(reached, key=lambda name: reached[name].median)}" if reached else ""
    notes = [
        f"Target: {target:.3g}, the best found is {best:.3g}{chosen or '; none reaches it'}.",
        "The brackets of the distance are its 95 % interval.",
    ]
    plain = {name: score.value for name, score in distances.items()}
    return Result([Table(title, columns, rows, notes)], {"seconds": seconds, "frechet": plain, "target": target})


@contextmanager
def _run(settings: Settings) -> "Iterator[Run]":
    """The given run, or a short one on digits."""
    from dataclasses import replace

    from scalelong.runs.load import load_run
    from scalelong.runs.recipes import recipe
    from scalelong.training import train

    if settings.run is not None:
        yield load_run(settings.run)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = recipe("digits-tiny")
        config = replace(
            base,
            steps=20 if settings.quick else TRAINING_STEPS,
            logging=replace(base.logging, trackers=(), samples_every=0, log_every=500),
            hardware=replace(base.hardware, cpu=True),
        )
        train(config, f"{folder}/run")
        yield load_run(f"{folder}/run")


def _silent(_: str) -> None: ...


CASES = {"sweep": partial(sweep, 2)}
