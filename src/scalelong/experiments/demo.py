"""The demonstration: a deep U-ViT at a rate where it breaks, and what keeps it alive, in under three minutes.

The setting is that of a range of one rate. It was chosen by trying, not by argument: docs/range.md says how, what the
verdict is for other base seeds, and what it looks like at depth 8, where nothing differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import DiffusionConfig, OptimizerConfig, TrainConfig
from ..errors import InvalidConfigError
from ..files import make_folder
from ..models import Denoiser
from ..noise import as_epsilon
from ..randomness import generator
from ..runs import image_grid, save_png
from ..stability import RateRange, RateRun
from .rates import RecipeTask, config_range

METHODS = ("none", "start:cs:0.7", "unit gain: model_options.init_std=unit")
RATE = 1.6e-2
DEPTH = 24
SEEDS = 8
STEPS = 130
WARMUP = 50
SHOWN = 10
NOISE_TIME = 200.0
"""The network's time at which it is shown noisy images: ᾱ = 0.66."""


def demo_config(depth: int = DEPTH) -> TrainConfig:
    """A U-ViT on the embedded garments, with the authors' start at the equal of their deviation for this width."""
    return TrainConfig(
        data="garments",
        model="uvit",
        model_options={"patch_size": 4, "dim": 64, "depth": depth, "heads": 4, "init_std": 0.0566},
        batch_size=8,
        diffusion=DiffusionConfig(schedule="vp", prediction="epsilon"),
        optimizer=OptimizerConfig(lr=RATE, weight_decay=0.03, betas=(0.9, 0.99)),
    )


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    seeds: int = SEEDS,
    steps: int = STEPS,
    depth: int = DEPTH,
    rates: Sequence[float] = (RATE,),
    jobs: int | None = None,
    say: Callable[[str], None] | None = print,
) -> RateRange:
    """Base seed n takes the seeds 100 n, 100 n + 1, ...: no two base seeds share a run."""
    if seed < 0:
        raise InvalidConfigError(f"the base seed must be at least 0, got {seed}")
    first = 100 * seed
    samples = out / "samples"
    make_folder(samples)

    def draw(task: RecipeTask, model: nn.Module, run: RateRun) -> None:
        if run.seed == first and run.rate == max(rates):
            save_png(samples / _file(run), image_grid(_denoised(task, model), SHOWN))

    config = demo_config(depth)
    found = config_range(
        replace(config, optimizer=replace(config.optimizer, lr=0.0)),
        rates=rates,
        methods=METHODS,
        seeds=range(first, first + seeds),
        steps=steps,
        warmup=WARMUP,
        jobs=jobs,
        out=out,
        title=f"A U-ViT of depth {depth} on 16×16 garments, {steps} steps at constant rates",
        after=draw,
        say=say,
    )
    drawn = [run for run in found.runs if run.seed == first and run.rate == max(rates)]
    with_samples = replace(
        found,
        samples=tuple(
            {
                "method": run.method,
                "rate": run.rate,
                "seed": run.seed,
                "outcome": run.outcome,
                "file": f"samples/{_file(run)}",
                "caption": "Images; the same with noise; what the network makes of those after its last step.",
            }
            for run in drawn
            if (samples / _file(run)).exists()
        ),
    )
    with_samples.save(out)
    return with_samples


@torch.no_grad()
def _denoised(task: RecipeTask, model: nn.Module) -> Tensor:
    """Images, the same with noise, and what the network makes of them: x̂_0 = (x_t - √(1-ᾱ) ε̂) / √ᾱ. (3n, C, H, W).

    Runs of this length are too short to draw images from nothing; whether a network knows images shows here.
    """
    x0 = task.inputs.clean(task.data, SHOWN)
    t = torch.full((len(x0),), NOISE_TIME)
    noise = torch.randn(x0.shape, generator=generator(0, "demo"))
    noisy = task.process.add_noise(x0, noise, t)
    network = Denoiser(model.eval())
    epsilon = as_epsilon(task.process, task.config.diffusion.prediction, network(noisy, t), noisy, t)
    signal, sigma = (value.view(-1, 1, 1, 1) for value in task.process.signal_and_noise(t))
    # A broken network may answer with anything: its pixels are drawn gray.
    cleaned = torch.nan_to_num((noisy - sigma * epsilon) / signal, 0.0, 0.0, 0.0)
    return torch.cat([x0, noisy, cleaned]).clamp(-1, 1)


def _file(run: RateRun) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in run.method)
    return f"{name}-seed{run.seed}.png"
