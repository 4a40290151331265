"""Figure 3: how large x_t is, how large the noise is beside it, and what extra noise on the input does."""

import math
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from scalelong.data import load_data, to_float
from scalelong.errors import ScaleLongError
from scalelong.experiments import PlannedRun, Results, RunRecord
from scalelong.noise import epsilon_losses, even_fractions
from scalelong.runs.load import load_run
from scalelong.runs.model import load_run_data
from scalelong.theory import expected_input_norm, noise_gain, sampled_statistics, second_moment

from .claims import ABOVE_ZERO, BELOW_ZERO, CLEARLY, Claim, Quantity, Region, Study, StudyResults, below, rounded
from .figures import by_method, colour, draw_seeds, legend, panels
from .settings import CS, LS, NONE, PAPER, UNIFORM, Arm, Scale, arms, base, unet

# Figure 3: histograms of the input, and the loss of trained networks under extra noise.

RANGES = {"norm": (0, 2, "‖x_t‖² / m"), "ratio": (0, 6, "‖ε‖² / ‖x_t‖²")}


def noise_figure(results: StudyResults) -> Figure:
    figure, axes = panels(2 + len(results.settings))
    histograms, losses = axes[:2], axes[2:]
    for axis, (name, (low, high, label)) in zip(histograms, RANGES.items(), strict=True):
        for data, values in results.survey.get("data", {}).items():
            counts = values["histograms"][name]
            width = (high - low) / len(counts)
            edges = [low + width * place for place in range(len(counts) + 1)]
            axis.stairs([count / width for count in counts], edges, label=data, fill=True, alpha=0.5)
        axis.set(xlabel=label, ylabel="density")
        axis.tick_params(labelsize=7)
    histograms[1].set_yscale("log")
    legend(histograms[0])
    for axis, setting in zip(losses, results.settings, strict=True):
        for method, runs in by_method(results, setting):
            measured = [run.measured["losses"] for run in runs if "losses" in run.measured]
            lines = [([float(sigma) for sigma in one], list(one.values())) for one in measured]
            draw_seeds(axis, lines, method, colour(results, method))
        axis.set(title=setting, xlabel="σ of extra noise", ylabel="held-out loss")
        axis.tick_params(labelsize=7)
    legend(losses[0])
    return figure


# Figure 3: how large x_t is, how large the noise is beside it, and what extra noise on the input does.

SIGMAS = (0.1, 0.2, 0.4)
"""Of the extra noise."""
PROBE, GAIN_SIGMA, JUDGED = 32, 0.1, 512
DATA = {"tiny": ("fashion-mnist", "cifar10"), "paper": ("cifar10", "celeba", "imagenet")}
IMAGES, BINS, SCHEDULE = 2000, 60, "ddpm"
GAIN = Quantity(f"gain of noise of σ = {GAIN_SIGMA}", lambda record: record.measured.get("gain"), "{:.3f}")


def runs(scale: Scale) -> list[Arm]:
    return arms([base(scale), unet(scale)], PAPER)


def survey(scale: Scale, seeds: int) -> dict[str, Any]:
    """(a) and (b), which need the data alone: moments of each seed's draws, and the histograms of the first."""
    found = {}
    for name in DATA[scale]:
        try:
            data = load_data(name, size=base(scale).config.images.size)
        except ScaleLongError as error:
            print(f"{name} is left out of (a) and (b): {error}", flush=True)
            continue
        images = to_float(data.fetch(torch.arange(min(IMAGES, len(data)))).images)
        drawn = [sampled_statistics(images, SCHEDULE, draws=4, seed=1000 * seed) for seed in range(seeds)]
        found[name] = {
            "s": rounded(second_moment(images)),
            "lemma": rounded(expected_input_norm(1, SCHEDULE)),
            "lemma_general": rounded(expected_input_norm(1, SCHEDULE, second_moment(images))),
            "norm": [rounded(float(one.norm.mean())) for one in drawn],
            "ratio": [rounded(float(one.ratio.mean())) for one in drawn],
            "below_5": [rounded(float((one.ratio < 5).double().mean())) for one in drawn],
            "histograms": {"norm": histogram(drawn[0].norm, 0, 2), "ratio": histogram(drawn[0].ratio, 0, 6)},
        }
    return {"data": found}


def histogram(values: Tensor, low: float, high: float) -> list[float]:
    counts = torch.histc(values.clamp(low, high).float(), BINS, low, high)
    return [rounded(float(count)) for count in counts / counts.sum()]


@torch.no_grad()
def measure(run: PlannedRun) -> dict[str, Any]:
    """The loss of the trained network with extra noise on x_t, and by how much it amplifies such noise."""
    trained = load_run(run.folder)
    data = load_run_data(run.config)
    held_out = data.held_out
    assert held_out is not None
    count = min(JUDGED, len(held_out))
    x0 = data.inputs().clean(held_out, count)
    condition = data.conditions.from_batch(held_out.fetch(torch.arange(count)))
    generator = torch.Generator().manual_seed(run.seed)
    noise, extra = torch.randn(2, *x0.shape, generator=generator)
    t = trained.process.times(even_fractions(count))

    def loss(sigma: float) -> float:
        predict = noisily(trained.network.given(condition), sigma * extra)
        prediction = run.config.diffusion.prediction
        return float(epsilon_losses(predict, trained.process, prediction, x0, noise, t).mean())

    x, times, told = data.probe(PROBE)
    gain = noise_gain(trained.model, x, times, sigma=GAIN_SIGMA, keywords=trained.network.keywords(told))
    return {"losses": {str(sigma): rounded(loss(sigma)) for sigma in (0.0, *SIGMAS)}, "gain": rounded(gain)}


def noisily(predict: Callable[[Tensor, Tensor], Tensor], extra: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, t: predict(x + extra, t)


def increase(sigma: float) -> Quantity:
    """How many times the loss is that without extra noise."""

    def value(record: RunRecord) -> float | None:
        losses = record.measured.get("losses", {})
        return losses[str(sigma)] / losses["0.0"] if losses else None

    return Quantity(f"rise of the loss under extra noise of σ = {sigma}", value, "{:.3f}")


def claims(results: StudyResults) -> list[Claim]:
    return data_claims(results) + [claim for setting in results.settings for claim in noise_claims(results, setting)]


def noise_claims(results: Results, setting: str) -> list[Claim]:
    """(c), of the networks of one setting."""
    return [
        hurts(results, setting, SIGMAS[-1]),
        *(
            below(results, setting, method, NONE, quantity, CLEARLY)
            for quantity in (*map(increase, SIGMAS), GAIN)
            for method in (UNIFORM, CS, LS)
        ),
    ]


def hurts(results: Results, setting: str, sigma: float) -> Claim:
    values = [increase(sigma).of(run) for run in results.of(NONE.label, setting)]
    logs = [math.log(value) if value else None for value in values]
    return Claim(
        f"extra noise of σ = {sigma} raises the loss without scaling",
        setting,
        logs,
        ABOVE_ZERO,
        (BELOW_ZERO,),
        effect=-CLEARLY,
    )


def data_claims(results: StudyResults) -> list[Claim]:
    found: list[Claim] = []
    limit = math.log(1.05)
    for data, values in results.survey.get("data", {}).items():
        found.append(
            Claim(
                "‖x_t‖²/m: within 5 % of Lemma 3.2 for uniform data",
                data,
                [math.log(value / values["lemma"]) for value in values["norm"]],
                Region(-limit, limit),
                (Region(high=-limit), Region(low=limit)),
                effect=limit,
            )
        )
        found.append(
            Claim(
                "‖ε‖²/‖x_t‖²: more than 97 % are below 5",
                data,
                values["below_5"],
                Region(low=0.97),
                (Region(high=0.97),),
                "{:.4f}".format,
            )
        )
    return found


ITEM = Study(
    name="fig3",
    title="Figure 3: the input of the network, and extra noise on it",
    paper="(a, b) On common data ‖x_t‖² is of the order of the dimension m, as Lemma 3.2 says of uniform data, and "
    "more than 97 % of ‖ε‖²/‖x_t‖² are below 5. (c) Extra noise on the input hurts a standard network much; scaled "
    "long skips soften the blow.",
    here="(a, b) are measured on the data, with DDPM's schedule. (c) The trained networks are given x_t with extra "
    "Gaussian noise of deviation σ, and the rise of their loss is compared; the gain says how much they amplify it.",
    arms=runs,
    quantities=(*map(increase, SIGMAS), GAIN),
    claims=claims,
    figures={"noise": noise_figure},
    measure=measure,
    survey=survey,
)
