"""Figure 6: small batches and deep networks."""

from ..arms import Arm, arms
from ..claims import Claim, below
from ..dot_figure import dot_figure
from ..item import Item
from ..methods import CS, LS, NONE, PAPER, UNIFORM
from ..quantities import FRECHET, LOSS, qualities
from ..results import Results
from ..settings import Scale, batch_sizes, depths


def runs(scale: Scale) -> list[Arm]:
    return arms([*batch_sizes(scale), *depths(scale)], PAPER)


def claims(results: Results) -> list[Claim]:
    compared = ((CS, NONE), (LS, NONE), (CS, UNIFORM), (LS, UNIFORM))
    return [
        below(results, setting, method, other, quantity)
        for quantity in qualities(results)
        for setting in distinct(results)
        for method, other in compared
    ]


def distinct(results: Results) -> list[str]:
    """The usual batch and the usual depth are the same runs, which are judged once."""
    found: dict[frozenset[str], str] = {}
    for setting in results.settings:
        found.setdefault(frozenset(run.run for run in results.runs if run.setting == setting), setting)
    return list(found.values())


ITEM = Item(
    name="fig6",
    title="Figure 6: batch sizes and depths",
    paper="CS and LS improve U-ViT much at every batch size and depth that was tried, over no scaling and over 1/√2.",
    here="Held-out loss and Fréchet distance at the end of training. The same number of steps, and the same rate, at "
    "every batch size and depth.",
    arms=runs,
    quantities=(LOSS, FRECHET),
    claims=claims,
    figures={
        "loss": lambda results: dot_figure(results, LOSS),
        "frechet": lambda results: dot_figure(results, FRECHET),
    },
)
