"""Table 3: scaling the outputs of blocks, as in classification, in place of the long skips."""

from ..arms import Arm, arms
from ..claims import Claim, below
from ..dot_figure import QUALITY_FIGURES
from ..item import Item
from ..methods import CS, LS, NONE, REZERO, STABLE
from ..quantities import FRECHET, LOSS, qualities
from ..results import Results
from ..settings import Scale, base


def runs(scale: Scale) -> list[Arm]:
    return arms([base(scale)], (NONE, CS, LS, *STABLE, REZERO))


def claims(results: Results) -> list[Claim]:
    (setting,) = results.settings
    return [
        below(results, setting, method, other, quantity)
        for quantity in qualities(results)
        for method in (CS, LS)
        for other in (*STABLE, REZERO)
    ]


ITEM = Item(
    name="table3",
    title="Table 3: scaling of block outputs",
    paper="Methods that scale the outputs of blocks (stable τ, ReZero) do worse than CS and LS, with U-ViT on "
    "CIFAR-10.",
    here="Held-out loss and Fréchet distance, as in Table 1.",
    arms=runs,
    quantities=(FRECHET, LOSS),
    claims=claims,
    figures=QUALITY_FIGURES,
    published={
        CS.label: "2.98",
        LS.label: "3.01",
        "stable τ = 0.1": "3.77",
        "stable τ = 0.3": "3.75",
        REZERO.label: "3.46",
    },
)
