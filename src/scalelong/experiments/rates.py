"""The range of learning rates of a recipe: its own data, network, loss and optimiser at constant rates.

    config_range(recipe("fashion-tiny"), rates=(4e-3, 8e-3, 16e-3), out="runs/range")

A method is a scaling ("cs:0.7"), a start ("start:cs:0.7"), or a variant of the configuration
("unit gain: model_options.init_std=unit"). What the configuration says about the rate over time and about the length
of a run is left aside: a range is measured at constant rates, in short runs.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..diffusion.inputs import NoisyInputs
from ..errors import InvalidConfigError
from ..files import digest, fitting, read_json
from ..noise import mean_square, target
from ..randomness import generator
from ..runs.config import TrainConfig, flatten, from_dict, to_dict
from ..runs.model import build_model, example_forward, load_run_data
from ..stability import DenoisingStep, Method, RateRange, RateRun, rate_range
from ..stability.many import Key, Part, Work, kept_random_state
from ..stability.range import METHODS, CarryOut, Task, checked_task
from ..stability.together import Prepared
from .engines import Engine
from .runs import Variant, as_variant, slug
from .sweeps import Drive
from .units import RATE, Unit

LEFT_ASIDE = ("checkpoints", "logging", "guard", "steps", "seed", "scaling", "optimizer.lr", "optimizer.warmup")
LEFT_ASIDE += ("optimizer.decay", "optimizer.ema", "images.workers", "images.image_cache", "hardware")
"""Fields of the configuration that a range does not depend on, or sets itself."""
ZERO_BATCHES = 16


class RecipeTask:
    """Networks and losses of a configuration, in the form that `rate_range` asks for."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.source = load_run_data(config)
        self.data, self.shape = self.source.train, self.source.shape
        self.inputs = self.source.inputs()
        self.process = self.inputs.process

    def build(self, seed: int) -> nn.Module:
        return build_model(replace(self.config, seed=seed, scaling="none"), self.shape)

    @property
    def step(self) -> DenoisingStep:
        return DenoisingStep(lambda _, source: self.prepare(source))  # the generator knows the step

    def loss(self, predict: Callable[[Tensor | None], Any], source: torch.Generator) -> Tensor:
        (x, t, condition), loss = self.prepare(source)
        return loss(predict(condition)(x, t))

    def prepare(self, source: torch.Generator) -> Prepared:
        """A batch: images, times, noise and conditions are functions of the generator's seed."""
        size = self.config.batch_size
        batch = self.data.fetch(torch.randint(len(self.data), (size,), generator=source))
        maker = replace(self.inputs, seed=source.initial_seed())
        x0, noise, t, condition = maker.for_step(0, range(size), batch)
        wanted = target(self.process, self.config.diffusion.prediction, x0, noise, t)
        inputs = NoisyInputs(self.process.add_noise(x0, noise, t), t, condition)
        return inputs, lambda output: mean_square(wanted - output).mean()

    def zero_loss(self) -> float:
        """The loss of a network that always answers zero, over some batches."""
        found = [
            float(self.loss(lambda _: lambda x, t: torch.zeros_like(x), generator(0, "zero", i)))  # noqa: ARG005
            for i in range(ZERO_BATCHES)
        ]
        return sum(found) / len(found)

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        settings = self.config.optimizer
        if settings.optimizer != "adamw":
            raise InvalidConfigError(f"rates are counted with AdamW, not with --optimizer {settings.optimizer}")
        return torch.optim.AdamW(
            parameters, lr=rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )


def config_range(
    config: TrainConfig,
    *,
    rates: Sequence[float],
    methods: Sequence[str | Variant | Method] = METHODS,
    seeds: int | Sequence[int] = 8,
    steps: int = 300,
    warmup: int | None = None,
    jobs: int | None = None,
    stack: int | None = None,
    out: str | PathLike[str] | None = None,
    title: str = "",
    after: Callable[[RecipeTask, nn.Module, RateRun], object] | None = None,
    say: Callable[[str], None] | None = print,
    engine: Engine | None = None,
    runs_per_job: int | None = None,
) -> RateRange:
    """`rate_range` of a configuration. Its own learning rate is "your rate".

    With an engine, every run is a unit of a sweep in the folder `out`; `runs_per_job` of them go one after the other in
    one process (default: one of each method), and none is stacked. UnfinishedError if they are submitted only, or
    interrupted.
    """
    task, arguments = _recipe_task(config, methods)
    values = flatten(to_dict(config))
    if engine is not None:
        if out is None or after is not None:
            raise InvalidConfigError("a range on an engine needs a folder, out=, and nothing to be called after runs")
        if stack is not None and stack != 1:
            raise InvalidConfigError(f"runs on an engine are trained one by one: leave out --stack {stack}")
        stack = 1
        engine.check()
        spec = {
            "config": to_dict(config),
            "methods": [_text(method) for method in methods],
            "steps": steps,
            "warmup": warmup,
            "reference_loss": arguments["reference_loss"],
        }
        arguments["carry_out"] = on_engine(engine, Path(out), spec, runs_per_job or len(methods))
    return rate_range(
        task.build,
        task.step,
        rates=rates,
        seeds=seeds,
        steps=steps,
        warmup=warmup,
        your_rate=config.optimizer.lr or None,
        jobs=jobs,
        stack=stack,
        out=out,
        title=title,
        about={name: value for name, value in values.items() if not name.startswith(LEFT_ASIDE)},
        after=None if after is None else lambda model, run: after(task, model, run),
        say=say,
        **arguments,
    )


def _recipe_task(config: TrainConfig, methods: Sequence[str | Variant | Method]) -> tuple[RecipeTask, dict[str, Any]]:
    """The task of a configuration, and what `rate_range` and a worker are told about it alike."""
    if config.hardware.precision != "no" or config.images.autoencoder is not None:
        raise InvalidConfigError(
            "a range is measured in float32 and on images: give precision 'no' and no autoencoder, or call "
            "scalelong.rate_range with a step function of your own"
        )
    if config.optimizer.base_width is not None:
        raise InvalidConfigError(
            "a range is counted with one rate for all parameters, and μP has several: leave base_width out"
        )
    listed = [_method(method, config) for method in methods]
    task = RecipeTask(config)
    return task, {
        "methods": listed,
        "optimizer": task.optimizer,
        "clip": config.optimizer.clip,
        "reference_loss": task.zero_loss(),
        "example_inputs": example_forward(task.build(0), config, task.shape),
    }


# On an engine: every run is a unit, which a worker carries out from what its job file says


def on_engine(engine: Engine, folder: Path, spec: dict[str, Any], runs_per_job: int) -> CarryOut:
    def carry_out(_: Work, parts: list[Part], __: int) -> Iterator[RateRun]:
        waiting = [key for part in parts for key in part]
        units = {unit_of(folder, key).name: unit_of(folder, key) for key in waiting}
        for (method, rate, seed), unit in zip(waiting, units.values(), strict=True):
            job = {"kind": RATE, "method": method, "rate": rate, "seed": seed, "range": spec, "command": sys.argv}
            # A result of other settings is none.
            if unit.result.exists() and not (unit.job.exists() and _same(unit.read(), job)):
                unit.result.unlink()
            unit.write(job)
        found = [unit for unit in units.values() if unit.result.exists()]
        yield from map(_result, found)
        left = [unit for unit in units.values() if unit not in found]
        if not left:
            return
        drive = Drive(engine, folder, threads=1, total=len(left), runs_per_job=runs_per_job)
        for unit in drive.carry_out(left, lambda unit: unit.result.exists(), lambda _: ""):
            yield _result(unit)

    return carry_out


def unit_of(folder: Path, key: Key) -> Unit:
    method, rate, seed = key
    short = slug(method)
    told = short if short == method else f"{short[:80]}-{digest(method.encode())[:6]}"
    return Unit(folder, f"rate-{rate:g}/{told}-seed{seed}")


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    names = ("method", "rate", "seed", "range")
    old, new = ({**{name: job.get(name) for name in names}} for job in (before, json.loads(json.dumps(now))))
    # More methods change nothing for the others.
    old["range"], new["range"] = ({**(job["range"] or {}), "methods": None} for job in (old, new))
    return old == new


def _result(unit: Unit) -> RateRun:
    return fitting(RateRun, read_json(unit.result))


def task_of(spec: dict[str, Any]) -> Task:
    """In a worker: what the job file says, ready to carry out any of its runs."""
    config = from_dict(spec["config"])
    task, arguments = _recipe_task(config, spec["methods"])
    del arguments["reference_loss"]
    # Rates and seeds are those of the jobs; one of each is enough to prepare.
    made = checked_task(
        task.build, task.step, rates=[1.0], seeds=1, steps=spec["steps"], warmup=spec["warmup"], **arguments
    )
    with kept_random_state():
        return made.prepared(None, spec["reference_loss"])[0]


def _text(method: str | Variant | Method) -> str:
    if isinstance(method, str):
        return method
    raise InvalidConfigError(
        f"the method {method.name!r} is Python code, which cannot be sent to an engine: write it as text, such as "
        f"'cs:0.7' or 'unit gain: model_options.init_std=unit'"
    )


def _method(given: str | Variant | Method, config: TrainConfig) -> Method | str:
    if isinstance(given, Method) or (isinstance(given, str) and ": " not in given):
        return given
    variant = as_variant(given)
    foreign = [name for name in variant.changes if not name.startswith(("model", "scaling"))]
    if foreign:
        raise InvalidConfigError(
            f"{variant.name!r} changes {', '.join(foreign)}: the methods of a range share data, loss and optimiser. "
            f"Leave it out; they may differ in the model, its options and the scaling alone"
        )
    changed = variant.apply(config)
    shape = load_run_data(changed).shape
    return Method(
        variant.name, changed.scaling, lambda seed: build_model(replace(changed, seed=seed, scaling="none"), shape)
    )


def clean_images(task: RecipeTask, count: int) -> Tensor:
    """The first images of the data in [-1, 1]: (count, C, H, W)."""
    return task.inputs.clean(task.data, count)
