"""Table 4: the direction of the decay."""

from dataclasses import replace

from ..arms import Arm, arms
from ..claims import Claim, below
from ..curve_figure import curve_figure
from ..item import Item
from ..methods import CS, NONE, REVERSED
from ..quantities import loss_at
from ..results import Results
from ..settings import TINY_STEPS, Scale, Setting, base

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


def runs(scale: Scale) -> list[Arm]:
    return arms([setting(scale)], (NONE, CS, REVERSED))


def claims(results: Results) -> list[Claim]:
    (name,) = results.settings
    return [below(results, name, CS, REVERSED, loss_at(step)) for step in STEPS[results.scale][1:]]


ITEM = Item(
    name="table4",
    title="Table 4: direction of the decay",
    paper="κ_i = κ^(i-1), which fades inner skips, is better than the reverse, κ^(N-i+1), from 10,000 steps on; at "
    "the first look, at 5,000 steps, it is worse.",
    here="Held-out loss at quarters of a short run; the first quarter is not judged.",
    arms=runs,
    quantities=tuple(loss_at(step) for steps in STEPS.values() for step in steps),
    claims=claims,
    figures={"curves": curve_figure},
)
