"""Table 1: quality after training, by network and data."""

from ..arms import Arm, arms
from ..claims import Claim, below
from ..dot_figure import dot_figure
from ..item import Item
from ..methods import CORE, CS, KAPPAS, LS, NONE, PAPER, UNIFORM
from ..quantities import FRECHET, LOSS, quality
from ..results import Results
from ..settings import Scale, base, other_data, other_unets, unet


def runs(scale: Scale) -> list[Arm]:
    others = [*other_data(scale), unet(scale), *other_unets(scale)]
    return [*arms([base(scale)], (*CORE, *KAPPAS)), *arms(others, PAPER)]


def claims(results: Results) -> list[Claim]:
    compared = ((CS, NONE), (LS, NONE), (CS, UNIFORM), (LS, UNIFORM))
    return [
        below(results, setting, method, other, quality(results))
        for setting in results.settings
        for method, other in compared
    ]


ITEM = Item(
    name="table1",
    title="Table 1: quality after training",
    paper="Over unconditional, class-conditional and text-to-image settings, UNet and U-ViT end with a better FID "
    "with CS or LS than without scaling, and than with 1/√2.",
    here="Held-out loss of the averaged weights at the end of short training; `paper` judges by the Fréchet distance "
    "of 10,000 images. Other κ of CS are shown beside the one that is judged. The paper's FIDs are those of "
    "U-ViT and UNet on CIFAR-10.",
    arms=runs,
    quantities=(LOSS, FRECHET),
    claims=claims,
    figures={"quality": lambda results: dot_figure(results, quality(results))},
    published={
        NONE.label: "3.11 / 3.17",
        UNIFORM.label: "3.11 / 3.14",
        CS.label: "2.98 / 3.05",
        LS.label: "3.01 / 3.07",
    },
)
