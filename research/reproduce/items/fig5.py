"""Figure 5: training curves. CS and LS reach the baseline's quality in at least 1.5 times fewer steps."""

from ..arms import Arm, arms
from ..claims import Claim, faster
from ..curve_figure import curve_figure
from ..item import Item
from ..methods import CORE, CS, LS, NONE, PAPER
from ..quantities import LOSS, Quantity
from ..results import Results
from ..settings import Scale, base, batch_sizes, deepest, other_data, unet


def runs(scale: Scale) -> list[Arm]:
    smallest = batch_sizes(scale)[0]
    others = [deepest(scale), smallest, *other_data(scale), unet(scale)]
    return [*arms([base(scale)], CORE), *arms(others, PAPER)]


def claims(results: Results) -> list[Claim]:
    return [faster(results, setting, method, NONE) for setting in results.settings for method in (CS, LS)]


HALF_WAY = Quantity("held-out loss half way", lambda record: 1.0 if record.diverged else _half_way(record.held_out))


def _half_way(points: list[tuple[int, float]]) -> float | None:
    return next((value for step, value in points if 2 * step >= points[-1][0]), None)


ITEM = Item(
    name="fig5",
    title="Figure 5: training curves",
    paper="CS and LS learn at least 1.5 times faster, in steps, than the unscaled network, over data sets, batch "
    "sizes, depths and architectures.",
    here="The steps after which a method reaches the held-out loss where no scaling ends, divided by the steps that no "
    "scaling needs for it, under the same seed. For a method that does not get there, the other way round: the steps "
    "that it had, divided by those after which no scaling had passed the loss where the method ends.",
    arms=runs,
    quantities=(LOSS, HALF_WAY),
    claims=claims,
    figures={"curves": curve_figure},
)
