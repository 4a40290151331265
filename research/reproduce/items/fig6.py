"""Figure 6: small batches and deep networks."""

from ..arms import Arm, arms
from ..claims import Claim, scaling_below
from ..dot_figure import QUALITY_FIGURES
from ..item import Item
from ..methods import PAPER
from ..quantities import FRECHET, LOSS, qualities
from ..results import Results
from ..settings import Scale, batch_sizes, depths


def runs(scale: Scale) -> list[Arm]:
    return arms([*batch_sizes(scale), *depths(scale)], PAPER)


def claims(results: Results) -> list[Claim]:
    return scaling_below(results, distinct(results), qualities(results))


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
    figures=QUALITY_FIGURES,
)
