"""The demonstration: a deep U-ViT at a rate where it breaks, what delays that, and what lasts.

The setting was chosen by trying, on seeds that no base seed has; docs/range.md says how, and what base seeds that chose
nothing say.
"""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import DiffusionConfig, OptimizerConfig, TrainConfig, slug
from ..console import listed
from ..diffusion import image_grid
from ..errors import require
from ..files import make_folder, results_folder, write_bytes
from ..models import Denoiser
from ..noise import as_epsilon
from ..optional import needs
from ..randomness import generator
from ..runs import read_png, save_png
from ..stability import RateRange, RateRun
from .rates import RecipeTask, config_range

METHODS = ("none", "cs:0.7", "merge_norm")
IN_WORDS = {"none": "without a cure", "cs:0.7": "with CS, small skips", "merge_norm": "with a norm in its merges"}
RATE = 2.4e-2
DEPTH, WIDTH = 24, 48
SEEDS = 4
STEPS = 400
WARMUP = 50
SHOWN = 10
NOISE_TIME = 200.0
"""The network's time at which it is shown noisy images: ᾱ = 0.66."""
COLOURS = ("#555555", "#0072b2", "#d55e00")
"""Distinguishable with the common forms of colour blindness (Okabe and Ito)."""
CAPTION = "Images; the same with noise; what the network makes of those after its last step."


def demo_config() -> TrainConfig:
    """A U-ViT on the embedded garments, with the authors' start at the equal of their deviation for this width."""
    start = round(0.02 * (512 / WIDTH) ** 0.5, 4)
    return TrainConfig(
        data="garments",
        model="uvit",
        model_options={"patch_size": 4, "dim": WIDTH, "depth": DEPTH, "heads": 4, "init_std": start},
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
    jobs: int | None = None,
    device: str | None = None,
) -> RateRange:
    """Base seed n takes the seeds 100 n, 100 n + 1, ...: no two base seeds share a run."""
    require(seed >= 0, f"the base seed must be at least 0, got {seed}")
    first = 100 * seed
    make_folder(results_folder(out) / "samples")

    def draw(task: RecipeTask, model: nn.Module, run: RateRun) -> None:
        if run.seed == first:
            save_png(out / _file(run), image_grid(_denoised(task, model), SHOWN))

    config = demo_config()
    found = config_range(
        replace(config, optimizer=replace(config.optimizer, lr=0.0)),
        rates=(RATE,),
        methods=METHODS,
        seeds=range(first, first + seeds),
        steps=steps,
        warmup=min(WARMUP, steps // 2),
        jobs=jobs,
        device=device,
        out=out,
        title=f"A U-ViT of depth {DEPTH} on 16×16 garments, {steps} steps at constant rates",
        after=draw,
    )
    shown = [run for run in found.runs if run.seed == first and (out / _file(run)).exists()]
    samples = [
        {"method": run.method, "rate": run.rate, "seed": run.seed, "outcome": run.outcome, "file": _file(run)}
        for run in shown
    ]
    found = replace(found, samples=tuple({**each, "caption": CAPTION} for each in samples), summary=summary_of(found))
    found.save(out)
    _draw(found, shown, out)
    return found


def summary_of(found: RateRange) -> str:
    """Who is lost and who lives, by the majority of each method's runs, which base seeds have in common; then how many
    and when."""
    groups: dict[str, list[str]] = {"collapse": [], "survive": []}
    fates: list[str] = []
    for method in found.methods:
        alive, count = found.survivors(method)
        groups["survive" if 2 * alive > count else "collapse"].append(method)
        ends = sorted(run.steps for run in found.runs if run.method == method and not run.survived)
        lost = f", lost after {ends[0]} to {ends[-1]}" if ends else ""
        fates.append(f"{method} {alive} of {count} alive after {found.steps} steps{lost}")
    sentence = ", and ".join(f"runs with {listed(names)} {verb}" for verb, names in groups.items() if names)
    return f"{sentence[:1].upper()}{sentence[1:]}: {'; '.join(fates)}."


@torch.no_grad()
def _denoised(task: RecipeTask, model: nn.Module) -> Tensor:
    """Images, the same with noise, and what the network makes of them: x̂_0 = (x_t - √(1-ᾱ) ε̂) / √ᾱ. (3n, C, H, W).

    Runs of this length are too short to draw images from nothing; whether a network knows images shows here.
    """
    x0 = task.inputs.clean(task.data, SHOWN)
    t = torch.full((len(x0),), NOISE_TIME)
    noise = torch.randn(x0.shape, generator=generator(0, "demo"))
    noisy = task.process.add_noise(x0, noise, t)
    network = Denoiser(model.eval().cpu())  # it has been trained, and is drawn here
    epsilon = as_epsilon(task.process, task.config.diffusion.prediction, network(noisy, t), noisy, t)
    signal, sigma = (value.view(-1, 1, 1, 1) for value in task.process.signal_and_noise(t))
    # A broken network may answer with anything: its pixels are drawn gray.
    cleaned = torch.nan_to_num((noisy - sigma * epsilon) / signal, 0.0, 0.0, 0.0)
    return torch.cat([x0, noisy, cleaned]).clamp(-1, 1)


def _file(run: RateRun) -> str:
    return f"samples/{slug(run.method)}-seed{run.seed}.png"


def _draw(found: RateRange, shown: Sequence[RateRun], out: Path) -> None:
    """demo.png: the loss of every run, and what the networks of one seed make of noisy images."""
    figure = needs("matplotlib.figure", "report", "drawing the demo").Figure(
        figsize=(11, 4.2), layout="constrained", dpi=130
    )
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    axes = left.subplots()
    for method, color in zip(found.methods, COLOURS, strict=False):
        for number, run in enumerate(run for run in found.runs if run.method == method):
            steps, losses = [step for step, _ in run.curve], [loss for _, loss in run.curve]
            label = IN_WORDS[method] if number == 0 else None
            axes.plot(steps, losses, color=color, linewidth=1.2, label=label)
            if not run.survived and steps:
                axes.plot(steps[-1:], losses[-1:], "x", color=color, markersize=8, markeredgewidth=2)
    axes.axhline(found.reference_loss, color="#999999", linewidth=0.8, linestyle=":")
    # At the right, where no line is.
    place = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    axes.annotate("a network that has learned nothing", (0.98, found.reference_loss), fontsize=7, **place)
    axes.set(xlabel="training step", ylabel="training loss", ylim=(0, 1.3 * found.reference_loss))
    axes.set_title("Each line is a run; × marks a collapse", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    strips = []  # each picture is a grid of three strips: images, the same with noise, what was made of them
    for run in shown:
        _, noisy, cleaned = read_png(out / _file(run))[0].chunk(3)
        strips = strips or [("noisy images", noisy)]
        strips.append((f"{IN_WORDS[run.method]}:\n{run.outcome}", cleaned))
    if strips:
        places = right.subplots(len(strips), 1)
        for place, (text, strip) in zip(places, strips, strict=True):
            place.imshow(strip, cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="equal")
            place.set(xticks=[], yticks=[])
            place.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8)
        right.suptitle("Noise removed by the trained networks", fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(out / "demo.png", content.getvalue())
