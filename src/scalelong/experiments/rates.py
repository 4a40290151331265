"""The range of learning rates of a recipe: its own data, network, loss and optimiser at constant rates.

    config_range(recipe("fashion-tiny"), rates=(4e-3, 8e-3, 16e-3), out="runs/range")

A method is a scaling ("cs:0.7"), a start ("start:cs:0.7"), or a variant of the configuration
("unit gain: model_options.init_std=unit"). What the configuration says about the rate over time and about the length
of a run is left aside: a range is measured at constant rates, in short runs.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..config import TrainConfig, from_dict, result_values, to_dict
from ..diffusion import NoisyInputs
from ..errors import InvalidConfigError
from ..files import fitting, read_json_lines
from ..models import Denoiser
from ..noise import flat_losses, mean_square, target
from ..randomness import generator
from ..runs import build_model, example_forward, load_run_data
from ..stability import METHODS, RUNS, Method, RateRange, RateRun, rate_range
from ..training import make_optimizer
from .engines import Engine
from .plan import Variant, as_variant
from .sweeps import make_job, run_jobs

_SET_BY_RANGE = (
    "steps",
    "seed",
    "scaling",
    "optimizer.lr",
    "optimizer.warmup",
    "optimizer.decay",
    "optimizer.ema",
    "hardware",
)
"""Fields that a range sets itself, or does not depend on."""
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

    def step(self, model: nn.Module, _: int, source: torch.Generator) -> Tensor:
        """The loss of a network on the batch of a step. The generator knows the step."""
        (x, t, condition), wanted = self.prepare(source)
        device = next(model.parameters()).device
        output = Denoiser(model)(x.to(device), t.to(device), None if condition is None else condition.to(device))
        return mean_square(wanted.to(device) - output).mean()

    def prepare(self, source: torch.Generator) -> tuple[NoisyInputs, Tensor]:
        """A batch, and what the network should answer. All is drawn from the seed of the generator."""
        size = self.config.batch_size
        batch = self.data.fetch(torch.randint(len(self.data), (size,), generator=source))
        maker = replace(self.inputs, seed=source.initial_seed())
        x0, noise, t, condition = maker.for_step(0, range(size), batch)
        wanted = target(self.process, self.config.diffusion.prediction, x0, noise, t)
        return NoisyInputs(self.process.add_noise(x0, noise, t), t, condition), wanted

    def zero_loss(self) -> float:
        """The loss of a network that knows nothing, over some batches."""
        batches = [self.prepare(generator(0, "zero", i)) for i in range(ZERO_BATCHES)]
        return fmean(float(flat_losses(wanted).mean()) for _, wanted in batches)

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return make_optimizer(model, replace(self.config.optimizer, lr=rate))


def config_range(
    config: TrainConfig,
    *,
    methods: Sequence[str | Variant | Method] | None = None,
    steps: int = 300,
    warmup: int | None = None,
    device: torch.device | str | None = None,
    out: str | PathLike[str] | None = None,
    after: Callable[[RecipeTask, nn.Module, RateRun], object] | None = None,
    engine: Engine | None = None,
    **more: Any,
) -> RateRange:
    """`rate_range` of a configuration, with the arguments of that (`rates`, `seeds`, `jobs`, `title`, ...). Its own
    learning rate is "your rate".

    With an engine, the runs are jobs of a sweep in the folder `out`. UnfinishedError if they were interrupted; the
    same call goes on.
    """
    if config.hardware.precision not in ("auto", "fp32") or config.images.autoencoder is not None:
        raise InvalidConfigError(
            "a range is measured in float32 and on images: give precision 'fp32' and no autoencoder, or call "
            "scalelong.rate_range with a step function of your own"
        )
    if config.optimizer.base_width is not None:
        raise InvalidConfigError(
            "a range is counted with one rate for all parameters, and μP has several: leave base_width out"
        )
    listed = None if methods is None else [_method(method, config) for method in methods]
    task = RecipeTask(config)
    if engine is not None:
        if out is None or after is not None:
            raise InvalidConfigError("a range on an engine needs a folder, `out`, and nothing to be called after runs")
        engine.check()
        shared = {"config": to_dict(config), "steps": steps, "warmup": warmup, "device": device and str(device)}
        more["run_all"] = _in_jobs(engine, Path(out), METHODS if methods is None else methods, shared)
    return rate_range(
        task.build,
        task.step,
        methods=listed,
        steps=steps,
        warmup=warmup,
        device=device,
        out=out,
        your_rate=config.optimizer.lr or None,
        optimizer=task.optimizer,
        clip=config.optimizer.clip,
        reference_loss=task.zero_loss(),
        example_inputs=example_forward(task.build(0), config, task.shape),
        about={name: value for name, value in result_values(config).items() if not name.startswith(_SET_BY_RANGE)},
        after=None if after is None else lambda model, run: after(task, model, run),
        **more,
    )


# On an engine: a job is the range of one rate and one seed, with all methods, in a folder of its own

PARTS = "parts"


def _in_jobs(
    engine: Engine, out: Path, methods: Sequence[str | Variant | Method], shared: Mapping[str, Any]
) -> Callable[[Any, Sequence[tuple[str, float, int]], int], Iterator[RateRun]]:
    """What `rate_range` calls to carry out the runs that are not finished."""
    code = [method.name for method in methods if not isinstance(method, str)]
    if code:
        raise InvalidConfigError(
            f"the method {code[0]!r} is Python code, which cannot be sent to an engine: write it as text, such as "
            f"'cs:0.7' or 'unit gain: model_options.init_std=unit'"
        )
    texts = {as_variant(text).name if ": " in text else text: text for text in map(str, methods)}

    def carry_out(_: object, waiting: Sequence[tuple[str, float, int]], __: int) -> Iterator[RateRun]:
        jobs: dict[str, list[tuple[str, float, int]]] = {}
        for key in waiting:
            jobs.setdefault(f"rate-{key[1]:g}-seed{key[2]}", []).append(key)

        def done(name: str) -> list[RateRun]:
            path = out / PARTS / name / RUNS
            runs = [fitting(RateRun, line) for line in read_json_lines(path)] if path.exists() else []
            return [run for run in runs if (run.method, run.rate, run.seed) in jobs[name]]

        left = [name for name in jobs if len(done(name)) < len(jobs[name])]
        made = []
        for name in left:
            _, rate, seed = jobs[name][0]
            given = {"methods": [texts[method] for method, _, _ in jobs[name]], "rate": rate, "seed": seed, **shared}
            made.append(make_job(out, name, {"kind": "range", "out": f"../{PARTS}/{name}", **given}))
        run_jobs(made, engine, lambda job: len(done(job.name)) == len(jobs[job.name]))
        yield from (run for name in jobs for run in done(name))

    return carry_out


def run_part(file: Path, job: Mapping[str, Any]) -> bool:
    """In a worker: the range of one rate and one seed."""
    config_range(
        from_dict(job["config"]),
        rates=[job["rate"]],
        methods=job["methods"],
        seeds=[job["seed"]],
        steps=job["steps"],
        warmup=job["warmup"],
        device=job.get("device"),
        jobs=1,
        out=Path(os.path.normpath(file.parent / job["out"])),
    )
    return True


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
