"""Figure 1: features and gradients oscillate while a UNet is trained, less so with scaled long skips."""

from ..arms import Arm, arms
from ..claims import Claim, scaling_below
from ..dot_figure import dot_figure
from ..item import Item
from ..methods import CORE, PAPER
from ..quantities import FEATURES, GRADIENTS, LOSS
from ..results import Results
from ..settings import Scale, base, deepest, unet
from ..trace_figure import trace_figure


def runs(scale: Scale) -> list[Arm]:
    return [*arms([base(scale)], CORE), *arms([deepest(scale), unet(scale)], PAPER)]


def claims(results: Results) -> list[Claim]:
    return scaling_below(results, results.settings, (FEATURES, GRADIENTS))


ITEM = Item(
    name="fig1",
    title="Figure 1: oscillation of features and gradients",
    paper="The outputs of hidden layers and the gradients oscillate during training, most in deep networks. 1/√2 "
    "helps somewhat; CS and LS help clearly more.",
    here="Oscillation in numbers: the RMS of every block's output on a fixed batch, and the norm of the gradient, "
    "are read at equal distances; O1 is how far the readings lie from their own local trend, in logs "
    "(docs/stability.md). Smaller is smoother.",
    arms=runs,
    quantities=(FEATURES, GRADIENTS, LOSS),
    claims=claims,
    figures={"traces": trace_figure, "oscillation": lambda results: dot_figure(results, FEATURES)},
    traces=True,
)
