"""The demonstration: a deep U-ViT at a rate where it breaks, what delays that, and what lasts.

The setting was chosen by trying, on seeds that no base seed has; docs/range.md says how, and what base seeds that chose
nothing say.
"""

import io
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import DiffusionConfig, OptimizerConfig, TrainConfig
from ..console import listed
from ..diffusion import image_grid
from ..errors import InvalidConfigError
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


class Demo(RateRange):
    """A range whose verdict is a sentence that counts. It advises nothing: the setting was chosen to show this."""

    @property
    def sentence(self) -> str:
        """Who is lost and who lives, by the majority of each method's runs: the part that base seeds have in common."""
        alive = {method: 2 * self.survivors(method)[0] > self.survivors(method)[1] for method in self.methods}
        lost = [method for method, lives in alive.items() if not lives]
        kept = [method for method, lives in alive.items() if lives]
        groups = ((lost, "collapse"), (kept, "survive"))
        return ", and ".join(f"runs with {listed(names)} {verb}" for names, verb in groups if names)

    @cached_property
    def verdict(self) -> str:
        return f"{self.sentence[:1].upper()}{self.sentence[1:]}: {'; '.join(map(self._fate, self.methods))}."

    def _fate(self, method: str) -> str:
        runs = [run for run in self.runs if run.method == method]
        ends = sorted(run.steps for run in runs if not run.survived)
        alive = f"{method} {len(runs) - len(ends)} of {len(runs)} alive after {self.steps} steps"
        return f"{alive}, lost after {ends[0]} to {ends[-1]}" if ends else alive


def run_demo(
    out: Path,
    *,
    seed: int = 0,
    seeds: int = SEEDS,
    steps: int = STEPS,
    jobs: int | None = None,
    device: str | None = None,
) -> Demo:
    """Base seed n takes the seeds 100 n, 100 n + 1, ...: no two base seeds share a run."""
    if seed < 0:
        raise InvalidConfigError(f"the base seed must be at least 0, got {seed}")
    first = 100 * seed
    samples = make_folder(results_folder(out) / "samples")

    def draw(task: RecipeTask, model: nn.Module, run: RateRun) -> None:
        if run.seed == first:
            save_png(samples / _file(run), image_grid(_denoised(task, model), SHOWN))

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
    shown = [run for run in found.runs if run.seed == first and (samples / _file(run)).exists()]
    named = {each.name: getattr(found, each.name) for each in fields(found) if each.init}
    named["samples"] = tuple(
        {
            **{name: getattr(run, name) for name in ("method", "rate", "seed", "outcome")},
            "file": f"samples/{_file(run)}",
            "caption": CAPTION,
        }
        for run in shown
    )
    demo = Demo(**named)
    demo = replace(demo, summary=demo.verdict)
    demo.save(out)
    draw_demo(demo, [(run, samples / _file(run)) for run in shown], out / "demo.png")
    return demo


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
    name = "".join(letter if letter.isalnum() else "-" for letter in run.method)
    return f"{name}-seed{run.seed}.png"


def draw_demo(demo: Demo, pictures: Sequence[tuple[RateRun, Path]], path: Path) -> None:
    """The loss of every run, and what the networks of one seed make of noisy images: collapsed against alive."""
    needs("matplotlib", "report", "drawing the demo").use("Agg")
    plt = needs("matplotlib.pyplot", "report", "drawing the demo")
    figure = plt.figure(figsize=(11, 4.2), layout="constrained", dpi=130)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25))
    axes = left.subplots()
    for method, color in zip(demo.methods, COLOURS, strict=False):
        for number, run in enumerate(run for run in demo.runs if run.method == method):
            steps, losses = [step for step, _ in run.curve], [loss for _, loss in run.curve]
            label = IN_WORDS.get(method, method) if number == 0 else None
            axes.plot(steps, losses, color=color, linewidth=1.2, label=label)
            if not run.survived and steps:
                axes.plot(steps[-1:], losses[-1:], "x", color=color, markersize=8, markeredgewidth=2)
    axes.axhline(demo.reference_loss, color="#999999", linewidth=0.8, linestyle=":")
    # At the right, where no line is.
    place = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "bottom"}
    axes.annotate("a network that has learned nothing", (0.98, demo.reference_loss), fontsize=7, **place)
    axes.set(xlabel="training step", ylabel="training loss", ylim=(0, 1.3 * demo.reference_loss))
    axes.set_title("Each line is a run; × marks a collapse", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    rows = [(f"{IN_WORDS.get(run.method, run.method)}:\n{run.outcome}", read_png(file)) for run, file in pictures]
    if rows:
        height = rows[0][1].shape[-2] // 3
        thirds = [("noisy images", rows[0][1][:, height : 2 * height])]
        thirds += [(text, grid[:, 2 * height :]) for text, grid in rows]
        for place, (text, strip) in zip(right.subplots(len(thirds), 1, squeeze=False)[:, 0], thirds, strict=True):
            place.imshow(strip[0], cmap="gray", vmin=0, vmax=255, interpolation="nearest", aspect="equal")
            place.set(xticks=[], yticks=[])
            place.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8)
        right.suptitle("Noise removed by the trained networks", fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    plt.close(figure)
    write_bytes(path, content.getvalue())
