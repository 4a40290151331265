"""Figure 3: how large x_t is, how large the noise is beside it, and what extra noise on the input does."""

import math
from dataclasses import replace
from typing import Any

import torch

from ....data import to_float
from ....theory import expected_input_norm, noise_gain, sampled_statistics, second_moment
from ....training import load_run
from ....training.data_source import load_images
from ...probing import noisy_probe
from ...runs import PlannedRun
from ..arms import Arm, arms
from ..claims import Claim, below
from ..item import Item
from ..methods import CS, LS, NONE, PAPER, UNIFORM, Method
from ..noise_figure import noise_figure
from ..quantities import LOSS, Quantity
from ..results import Results, rounded
from ..settings import Scale, Setting, base, noises, other_data
from ..verdict import ABOVE_ZERO, BELOW_ZERO, Region

PROBE, SIGMA, IMAGES, BINS = 32, 0.1, 2000, 60
GAIN = Quantity(f"gain of noise of σ = {SIGMA}", lambda record: record.measured.get("gain"), "{:.3f}")


def runs(scale: Scale) -> list[Arm]:
    return arms([clean(scale), *noises(scale)], PAPER)


def clean(scale: Scale) -> Setting:
    return replace(base(scale), name="σ = 0")


def survey(scale: Scale, seeds: int) -> dict[str, Any]:
    """(a) and (b), which need the data alone: moments of each seed's draws, and the histograms of the first."""
    found = {}
    for setting in (base(scale), *other_data(scale)):
        if setting.config.images.autoencoder or setting.config.diffusion.condition == "text":
            continue
        data, _ = load_images(setting.config, lambda _: None)
        images = to_float(data.fetch(torch.arange(min(IMAGES, len(data)))).images)
        schedule = setting.config.diffusion.schedule
        drawn = [sampled_statistics(images, schedule, draws=4, seed=1000 * seed) for seed in range(seeds)]
        found[setting.config.data] = {
            "s": rounded(second_moment(images)),
            "lemma": rounded(expected_input_norm(1, schedule)),
            "lemma_general": rounded(expected_input_norm(1, schedule, second_moment(images))),
            "norm": [rounded(float(one.norm.mean())) for one in drawn],
            "ratio": [rounded(float(one.ratio.mean())) for one in drawn],
            "below_5": [rounded(float((one.ratio < 5).double().mean())) for one in drawn],
            "histograms": {"norm": histogram(drawn[0].norm, 0, 2), "ratio": histogram(drawn[0].ratio, 0, 6)},
        }
    return {"data": found}


def histogram(values: torch.Tensor, low: float, high: float) -> list[float]:
    counts = torch.histc(values.clamp(low, high).float(), BINS, low, high)
    return [rounded(float(count)) for count in counts / counts.sum()]


def measure(run: PlannedRun) -> dict[str, Any]:
    """By how much the trained network amplifies extra noise."""
    trained = load_run(run.folder)
    x, t, labels = noisy_probe(run.config, PROBE)
    rest = (t,) if labels is None else (t, labels)
    return {"gain": rounded(noise_gain(trained.model, x, *rest, sigma=SIGMA, output=output))}


def output(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.sample


def claims(results: Results) -> list[Claim]:
    names = list(results.settings)
    noisy = names[1:]
    hurts = [
        Claim(
            f"held-out loss: training with extra noise of {name} ends above training without",
            name,
            log_differences(results, name, names[0], NONE),
            ABOVE_ZERO,
            (BELOW_ZERO,),
        )
        for name in noisy
    ]
    helps = [below(results, name, method, NONE, LOSS) for name in noisy for method in (UNIFORM, CS, LS)]
    robust = [below(results, names[0], method, NONE, GAIN) for method in (UNIFORM, CS, LS)]
    return [*data_claims(results), *hurts, *helps, *robust]


def data_claims(results: Results) -> list[Claim]:
    found: list[Claim] = []
    for data, values in results.survey.get("data", {}).items():
        norms = [math.log(value / values["lemma"]) for value in values["norm"]]
        limit = math.log(1.05)
        found.append(
            Claim(
                "‖x_t‖²/m: within 5 % of Lemma 3.2 for uniform data",
                data,
                norms,
                Region(-limit, limit),
                (Region(high=-limit), Region(low=limit)),
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


def log_differences(results: Results, setting: str, other: str, method: Method) -> list[float | None]:
    """Of one method in two settings, under equal seeds."""
    theirs = {run.seed: run for run in results.of(other, method.label)}
    mine = [run for run in results.of(setting, method.label) if run.seed in theirs]
    return [math.log((LOSS.of(run) or 1) / (LOSS.of(theirs[run.seed]) or 1)) for run in mine]


ITEM = Item(
    name="fig3",
    title="Figure 3: the input of the network, and extra noise on it",
    paper="(a, b) On common data ‖x_t‖² is of the order of the dimension m, as Lemma 3.2 says of uniform data, and "
    "more than 97 % of ‖ε‖²/‖x_t‖² are below 5. (c) Extra noise on the input hurts a standard network much; "
    "scaled long skips soften the blow.",
    here="(a, b) are measured on the data of the runs. (c) The network is trained with extra Gaussian noise of "
    "deviation σ on x_t and judged on clean held-out images. Beside it stands by how much the networks trained "
    f"without extra noise amplify noise of σ = {SIGMA} on their input.",
    arms=runs,
    quantities=(LOSS, GAIN),
    claims=claims,
    figures={"noise": noise_figure},
    measure=measure,
    survey=survey,
)
