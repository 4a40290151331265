"""Table 2: LS does not depend on how its little network is made, as long as it is one."""

from ..arms import Arm, arms
from ..claims import Claim, alike, below
from ..dot_figure import QUALITY_FIGURES
from ..item import Item
from ..methods import LS, LS_ACTIVATIONS, LS_IE, LS_PER_SKIP, LS_RATIOS, LS_SCALAR, NONE
from ..quantities import FRECHET, LOSS, qualities
from ..results import Results
from ..settings import Scale, base

MARGIN = 0.03
"""The paper's own spread over ratios and activations: FID 3.01 to 3.10."""


def runs(scale: Scale) -> list[Arm]:
    return arms([base(scale)], (NONE, LS, *LS_RATIOS, *LS_ACTIVATIONS, LS_IE, LS_SCALAR, LS_PER_SKIP))


def claims(results: Results) -> list[Claim]:
    (setting,) = results.settings
    found: list[Claim] = []
    for quantity in qualities(results):
        for other in (*LS_RATIOS, *LS_ACTIVATIONS, LS_IE, LS_PER_SKIP):
            found.append(alike(results, setting, other, LS, quantity, MARGIN))
        found += [below(results, setting, module, LS_SCALAR, quantity) for module in (LS, LS_IE)]
    return found


ITEM = Item(
    name="table2",
    title="Table 2: the network inside of LS",
    paper="Ratio and activation of the SE module hardly matter, IE does nearly as well, plain learnable scalars do "
    "clearly worse, and one module per skip in place of a shared one costs nothing.",
    here=f"Held-out loss and Fréchet distance, as in Table 1. “Hardly” is {100 * MARGIN:.0f} %, the paper's own "
    "spread. LS is the authors': SE, ratio 16, ReLU, shared.",
    arms=runs,
    quantities=(FRECHET, LOSS),
    claims=claims,
    figures=QUALITY_FIGURES,
    published={
        LS.label: "3.01",
        "LS, ratio 4": "3.06",
        "LS, ratio 8": "3.10",
        "LS, ELU": "3.08",
        "LS, Mish": "3.08",
        LS_IE.label: "3.09",
        LS_SCALAR.label: "3.46",
    },
)
