"""The figures and tables of the paper, one entry each: arms, quantities, claims and figures."""

import math
from collections.abc import Iterable
from dataclasses import replace

from scalelong.experiments import Results

from . import fig3, fig7
from .claims import (
    CLEARLY,
    FEATURES,
    FIDS,
    FRECHET,
    GRADIENTS,
    LOSS,
    Claim,
    Quantity,
    Study,
    StudyResults,
    alike,
    below,
    faster,
    loss_at,
    qualities,
    scaling_below,
)
from .figures import QUALITY_FIGURES, curve_figure, dot_figure, trace_figure
from .settings import (
    CORE,
    CS,
    KAPPAS,
    LS,
    LS_ACTIVATIONS,
    LS_IE,
    LS_PER_SKIP,
    LS_RATIOS,
    LS_SCALAR,
    NONE,
    PAPER,
    REVERSED,
    REZERO,
    STABLE,
    TINY_STEPS,
    Arm,
    Scale,
    Setting,
    arms,
    base,
    batch_sizes,
    deepest,
    depths,
    other_data,
    other_unets,
    unet,
)


def fids(methods: Iterable[str]) -> dict[str, str]:
    """The paper's, of U-ViT on CIFAR-10."""
    return {method: f"{FIDS['U-ViT'][method]:.2f}" for method in methods}


# Figure 1: features and gradients oscillate while a UNet is trained, less so with scaled long skips.


def fig1_runs(scale: Scale) -> list[Arm]:
    return [*arms([base(scale)], CORE), *arms([deepest(scale), unet(scale)], PAPER)]


def fig1_claims(results: StudyResults) -> list[Claim]:
    return scaling_below(results, results.settings, (FEATURES, GRADIENTS), CLEARLY)


FIG1 = Study(
    name="fig1",
    title="Figure 1: oscillation of features and gradients",
    paper="The outputs of hidden layers and the gradients oscillate during training, most in deep networks. 1/√2 "
    "helps somewhat; CS and LS help clearly more.",
    here="Oscillation in numbers: the RMS of every block's output on a fixed batch, and the norm of the gradient, "
    "are read at equal distances; O1 is how far the readings lie from their own local trend, in logs "
    "(docs/stability.md). Smaller is smoother.",
    arms=fig1_runs,
    quantities=(FEATURES, GRADIENTS, LOSS),
    claims=fig1_claims,
    figures={"traces": trace_figure, "oscillation": lambda results: dot_figure(results, FEATURES)},
    traces=True,
)


# Figure 5: training curves. CS and LS reach the baseline's quality in at least 1.5 times fewer steps.


def fig5_runs(scale: Scale) -> list[Arm]:
    smallest = batch_sizes(scale)[0]
    others = [deepest(scale), smallest, *other_data(scale), unet(scale)]
    return [*arms([base(scale)], CORE), *arms(others, PAPER)]


def fig5_claims(results: StudyResults) -> list[Claim]:
    return [faster(results, setting, method, NONE) for setting in results.settings for method in (CS, LS)]


HALF_WAY = Quantity(
    "held-out loss half way", lambda record: 1.0 if record.diverged is not None else _half_way(record.held_out.points)
)


def _half_way(points: list[tuple[int, float]]) -> float | None:
    return next((value for step, value in points if 2 * step >= points[-1][0]), None)


FIG5 = Study(
    name="fig5",
    title="Figure 5: training curves",
    paper="CS and LS learn at least 1.5 times faster, in steps, than the unscaled network, over data sets, batch "
    "sizes, depths and architectures.",
    here="The steps after which a method reaches the held-out loss where no scaling ends, divided by the steps that no "
    "scaling needs for it, under the same seed. For a method that does not get there, the other way round: the steps "
    "that it had, divided by those after which no scaling had passed the loss where the method ends.",
    arms=fig5_runs,
    quantities=(LOSS, HALF_WAY),
    claims=fig5_claims,
    figures={"curves": curve_figure},
)


# Figure 6: small batches and deep networks.


def fig6_runs(scale: Scale) -> list[Arm]:
    return arms([*batch_sizes(scale), *depths(scale)], PAPER)


def fig6_claims(results: StudyResults) -> list[Claim]:
    return scaling_below(results, distinct(results), qualities(results))


def distinct(results: StudyResults) -> list[str]:
    """The usual batch and the usual depth are the same runs, which are judged once."""
    found: dict[frozenset[str], str] = {}
    for setting in results.settings:
        found.setdefault(frozenset(run.run for run in results.runs if run.setting == setting), setting)
    return list(found.values())


FIG6 = Study(
    name="fig6",
    title="Figure 6: batch sizes and depths",
    paper="CS and LS improve U-ViT much at every batch size and depth that was tried, over no scaling and over 1/√2.",
    here="Held-out loss and Fréchet distance at the end of training. The same number of steps, and the same rate, at "
    "every batch size and depth.",
    arms=fig6_runs,
    quantities=(LOSS, FRECHET),
    claims=fig6_claims,
    figures=QUALITY_FIGURES,
)


# Table 1: quality after training, by network and data.


def table1_runs(scale: Scale) -> list[Arm]:
    others = [*other_data(scale), unet(scale), *other_unets(scale)]
    return [*arms([base(scale)], (*CORE, *KAPPAS)), *arms(others, PAPER)]


def table1_claims(results: StudyResults) -> list[Claim]:
    return scaling_below(results, results.settings, qualities(results))


TABLE1 = Study(
    name="table1",
    title="Table 1: quality after training",
    paper="Over unconditional, class-conditional and text-to-image settings, UNet and U-ViT end with a better FID "
    "with CS or LS than without scaling, and than with 1/√2.",
    here="Held-out loss of the averaged weights at the end of training, and Fréchet distance in the features of a "
    "classifier of the same data: of 500 images in 10 steps of the sampler at the end of a short run (`paper`: 10,000 "
    "images). Other κ of CS are shown beside the one that is judged. The paper's FIDs are those of U-ViT and UNet on "
    "CIFAR-10; ours are in other features, and comparable among themselves alone.",
    arms=table1_runs,
    quantities=(FRECHET, LOSS),
    claims=table1_claims,
    figures=QUALITY_FIGURES,
    published={method: f"{FIDS['U-ViT'][method]:.2f} / {value:.2f}" for method, value in FIDS["UNet"].items()},
)


# Table 2: LS does not depend on how its little network is made, as long as it is one.

MARGIN = 0.03
"""The paper's own spread over ratios and activations: FID 3.01 to 3.10."""


def table2_runs(scale: Scale) -> list[Arm]:
    return arms([base(scale)], (NONE, LS, *LS_RATIOS, *LS_ACTIVATIONS, LS_IE, LS_SCALAR, LS_PER_SKIP))


def table2_claims(results: StudyResults) -> list[Claim]:
    (setting,) = results.settings
    return [claim for quantity in qualities(results) for claim in modules_alike(results, setting, quantity)]


def modules_alike(results: Results, setting: str, quantity: Quantity) -> list[Claim]:
    others = (*LS_RATIOS, *LS_ACTIVATIONS, LS_IE, LS_PER_SKIP)
    return [
        *(alike(results, setting, other, LS, quantity, MARGIN) for other in others),
        *(below(results, setting, module, LS_SCALAR, quantity) for module in (LS, LS_IE)),
    ]


TABLE2 = Study(
    name="table2",
    title="Table 2: the network inside LS",
    paper="Ratio and activation of the SE module hardly matter, IE does nearly as well, plain learnable scalars do "
    "clearly worse, and one module per skip in place of a shared one costs nothing.",
    here=f"Held-out loss and Fréchet distance, as in Table 1. “Hardly” is {100 * MARGIN:.0f} %, the paper's own "
    "spread. LS is the authors': SE, ratio 16, ReLU, shared.",
    arms=table2_runs,
    quantities=(FRECHET, LOSS),
    claims=table2_claims,
    figures=QUALITY_FIGURES,
    published=fids(method for method in FIDS["U-ViT"] if method.startswith("LS")),
)


# Table 3: scaling the outputs of blocks, as in classification, in place of the long skips.


def table3_runs(scale: Scale) -> list[Arm]:
    return arms([base(scale)], (NONE, CS, LS, *STABLE, REZERO))


def table3_claims(results: StudyResults) -> list[Claim]:
    (setting,) = results.settings
    return [
        below(results, setting, method, other, quantity)
        for quantity in qualities(results)
        for method in (CS, LS)
        for other in (*STABLE, REZERO)
    ]


TABLE3 = Study(
    name="table3",
    title="Table 3: scaling of block outputs",
    paper="Methods that scale the outputs of blocks (stable τ, ReZero) do worse than CS and LS, with U-ViT on "
    "CIFAR-10.",
    here="Held-out loss and Fréchet distance, as in Table 1.",
    arms=table3_runs,
    quantities=(FRECHET, LOSS),
    claims=table3_claims,
    figures=QUALITY_FIGURES,
    published=fids(method.label for method in (CS, LS, *STABLE, REZERO)),
)


# Table 4: the direction of the decay.

STEPS = {
    "tiny": tuple(TINY_STEPS * share // 4 for share in (1, 2, 3, 4)),
    "paper": (5000, 10_000, 20_000, 30_000, 45_000),
}


def setting(scale: Scale) -> Setting:
    """The paper's table ends after 45,000 steps, and has a batch of 64."""
    found = base(scale)
    if scale == "tiny":
        return found
    logging = replace(found.config.logging, held_out_every=5000, scores_every=5000)
    config = replace(found.config, batch_size=64, steps=45_000, logging=logging)
    return replace(found, name="U-ViT, batch 64", config=config)


def table4_runs(scale: Scale) -> list[Arm]:
    return arms([setting(scale)], (NONE, CS, REVERSED))


DIRECTION = math.log(23.74 / 33.93)
"""Of the FIDs in the paper's table the smallest effect from 10,000 steps on, that at 10,000."""


def table4_claims(results: StudyResults) -> list[Claim]:
    (name,) = results.settings
    return [below(results, name, CS, REVERSED, loss_at(step), DIRECTION) for step in STEPS[results.scale][1:]]


TABLE4 = Study(
    name="table4",
    title="Table 4: direction of the decay",
    paper="κ_i = κ^(i-1), which fades inner skips, is better than the reverse, κ^(N-i+1), from 10,000 steps on; at "
    "the first look, at 5,000 steps, it is worse.",
    here="Held-out loss at quarters of a short run; the first quarter is not judged.",
    arms=table4_runs,
    quantities=tuple(loss_at(step) for steps in STEPS.values() for step in steps),
    claims=table4_claims,
    figures={"curves": curve_figure},
)


# All figures and tables, in the paper's order.

ITEMS: dict[str, Study] = {
    item.name: item for item in (FIG1, fig3.ITEM, FIG5, FIG6, fig7.ITEM, TABLE1, TABLE2, TABLE3, TABLE4)
}
