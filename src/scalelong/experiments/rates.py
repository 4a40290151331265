"""The range of learning rates of a recipe: its own data, network, loss and optimiser at constant rates.

    config_range(recipe("fashion-tiny"), rates=(4e-3, 8e-3, 16e-3), out="runs/range")

A method is a scaling ("cs:0.7"), a start ("start:cs:0.7"), or a variant of the configuration
("unit gain: model_options.init_std=unit"). What the configuration says about the rate over time and about the length
of a run is left aside: a range is measured at constant rates, in short runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from ..models.call import Denoiser
from ..noise import losses
from ..randomness import generator
from ..runs.config import TrainConfig, flatten, to_dict
from ..runs.model import build_model, example_forward, load_run_data
from ..stability import Method, RateRange, RateRun, rate_range
from ..stability.range import METHODS
from .runs import Variant, as_variant

LEFT_ASIDE = ("checkpoints", "logging", "guard", "steps", "seed", "scaling", "optimizer.lr", "optimizer.warmup")
LEFT_ASIDE += ("optimizer.decay", "optimizer.ema", "images.workers", "hardware")
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

    def step(self, model: nn.Module, i: int, source: torch.Generator) -> Tensor:  # noqa: ARG002, the generator knows i
        return self.loss(Denoiser(model).given, source)

    def loss(self, predict: Callable[[Tensor | None], Any], source: torch.Generator) -> Tensor:
        """The loss of one batch: images, times, noise and conditions are functions of the generator's seed."""
        size = self.config.batch_size
        batch = self.data.fetch(torch.randint(len(self.data), (size,), generator=source))
        maker = replace(self.inputs, seed=source.initial_seed())
        x0, noise, t, condition = maker.for_step(0, range(size), batch)
        return losses(predict(condition), self.process, self.config.diffusion.prediction, x0, noise, t).mean()

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
    out: str | PathLike[str] | None = None,
    title: str = "",
    after: Callable[[RecipeTask, nn.Module, RateRun], object] | None = None,
    say: Callable[[str], None] | None = print,
) -> RateRange:
    """`rate_range` of a configuration. Its own learning rate is "your rate"."""
    if config.hardware.precision != "no" or config.images.autoencoder is not None:
        raise InvalidConfigError(
            "a range is measured in float32 and on images: give precision 'no' and no autoencoder, or call "
            "scalelong.rate_range with a step function of your own"
        )
    listed = [_method(method, config) for method in methods]
    task = RecipeTask(config)
    example = example_forward(task.build(0), config, task.shape)
    values = flatten(to_dict(config))
    return rate_range(
        task.build,
        task.step,
        rates=rates,
        methods=listed,
        seeds=seeds,
        steps=steps,
        warmup=warmup,
        your_rate=config.optimizer.lr or None,
        optimizer=task.optimizer,
        clip=config.optimizer.clip,
        reference_loss=task.zero_loss(),
        example_inputs=example,
        jobs=jobs,
        out=out,
        title=title,
        about={name: value for name, value in values.items() if not name.startswith(LEFT_ASIDE)},
        after=None if after is None else lambda model, run: after(task, model, run),
        say=say,
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
