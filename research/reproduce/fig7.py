"""Figure 7: the coefficients that LS learns, against the band of CS."""

import math
from typing import Any

import torch
from matplotlib.figure import Figure

from scalelong.attaching import coefficients
from scalelong.experiments import PlannedRun, Results, RunRecord
from scalelong.runs.load import load_run

from .claims import Claim, Quantity, Region, Study, StudyResults, rounded
from .figures import by_method, colour, draw_seeds, legend, panels
from .settings import LS, LS_FROM_CS, Arm, Method, Scale, arms, base, deepest, other_data, other_unets, unet

# κ_i over i, against the band of CS (Figure 7).


def coefficient_figure(results: StudyResults) -> Figure:
    figure, axes = panels(len(results.settings))
    for axis, setting in zip(axes, results.settings, strict=True):
        count = 0
        for method, runs in by_method(results, setting):
            lines = [run.measured.get("kappas") or run.kappas for run in runs]
            count = max([count, *map(len, lines)])
            color = colour(results, method)
            draw_seeds(axis, [(range(1, len(line) + 1), line) for line in lines], method, color)
        numbers = range(1, count + 1)
        low, high = ([kappa ** (i - 1) for i in numbers] for kappa in BAND)
        axis.fill_between(numbers, low, high, color="#e69f00", alpha=0.25, linewidth=0, label="CS, κ from 0.5 to 0.95")
        axis.set(title=setting, xlabel="long skip i (1 is the outermost)", ylabel=r"$\kappa_i$", ylim=(0, 1.05))
        axis.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore[reportCallIssue]
        axis.tick_params(labelsize=7)
    legend(axes[0])
    return figure


# Figure 7: the coefficients that LS learns, against the band of CS.

NOISES = 30
"""As many as the paper draws."""
BAND = (0.5, 0.95)
"""κ of CS, as Section 4.1 suggests it."""
CURVE = 0.7
"""The κ of CS whose curve the paper's LS falls along."""
TOLERANCE = 0.05
START, MOVED = 0.5, 0.1
"""Where the authors' gates start, and how far at least one must have moved before they say anything."""


def runs(scale: Scale) -> list[Arm]:
    others = [deepest(scale), *other_data(scale), unet(scale), *other_unets(scale)]
    return [*arms([base(scale)], (LS, LS_FROM_CS)), *arms(others, (LS,))]


def measure(run: PlannedRun) -> dict[str, Any]:
    """κ_i of the averaged weights on pure noise, at the time where x_t is that."""
    trained = load_run(run.folder)
    noise = torch.randn(NOISES, *trained.shape.image, generator=torch.Generator().manual_seed(0))
    t = trained.process.times(torch.ones(NOISES))
    labels = trained.shape.labels(run.config)
    condition = torch.arange(NOISES) % labels if labels else trained.shape.example_condition(run.config, NOISES)
    with torch.no_grad():
        trained.network(noise, t, condition)
    return {"kappas": [rounded(value) for value in coefficients(trained.model)]}


def kappas(record: RunRecord) -> list[float]:
    return record.measured.get("kappas") or list(record.kappas)


def slope(record: RunRecord) -> float:
    """Of log κ_i over i - 1, through κ_1: CS has log κ everywhere."""
    logs = [math.log(max(value, 1e-9)) for value in kappas(record)]
    ahead = range(1, len(logs))
    return sum(i * (logs[i] - logs[0]) for i in ahead) / sum(i * i for i in ahead)


def outside(record: RunRecord) -> float:
    """How far the worst coefficient lies outside the band."""
    low, high = BAND
    return max(max(low**i - value, value - high**i, 0.0) for i, value in enumerate(kappas(record)))


def has_learnt(record: RunRecord) -> bool:
    return any(abs(value - START) >= MOVED for value in kappas(record))


def claims(results: StudyResults) -> list[Claim]:
    return [claim for setting in results.settings for claim in of_setting(results, setting, LS)]


def of_setting(results: Results, setting: str, method: Method) -> list[Claim]:
    # Gates that still stand where they were put have learnt nothing that could agree or disagree with the paper.
    runs = [run if has_learnt(run) else None for run in results.of(method.label, setting)]
    low, high = (math.log(kappa) for kappa in BAND)
    return [
        Claim(
            f"{method.label}: all κ_i within {TOLERANCE} of the band of CS",
            setting,
            [None if run is None else outside(run) for run in runs],
            Region(high=TOLERANCE),
            (Region(low=TOLERANCE),),
            "{:.2f}".format,
        ),
        Claim(
            f"{method.label}: κ_i falls by a factor of {BAND[0]} to {BAND[1]} per skip",
            setting,
            [None if run is None else slope(run) for run in runs],
            Region(low, high),
            (Region(low=0.0),),
            lambda value: f"× {math.exp(value):.2f}",
            effect=math.log(CURVE),
        ),
    ]


ITEM = Study(
    name="fig7",
    title="Figure 7: what LS learns",
    paper="The coefficients that LS predicts for Gaussian noise lie in the band that CS suggests (κ from 0.5 to "
    "0.95), and fall with i along almost the same exponential curve.",
    here=f"κ_i of the averaged weights, mean over {NOISES} draws of noise. The claims are about LS as its authors "
    f"start it, at {START} for every skip: what falls there was learnt. Runs in which no coefficient has moved by "
    f"{MOVED} have learnt too little to be judged. LS from CS begins on the curve and is shown beside it.",
    arms=runs,
    quantities=(
        Quantity("distance from the band", outside, "{:.2f}"),
        Quantity("largest κ_i", lambda record: max(kappas(record)), "{:.3f}"),
        Quantity("smallest κ_i", lambda record: min(kappas(record)), "{:.3f}"),
        Quantity("factor per skip", lambda record: math.exp(slope(record)), "{:.3f}"),
    ),
    claims=claims,
    figures={"coefficients": coefficient_figure},
    measure=measure,
)
