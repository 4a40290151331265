"""Table 1: quality after training, by network and data."""

from ..arms import Arm, arms
from ..claims import Claim, scaling_below
from ..dot_figure import QUALITY_FIGURES
from ..item import Item
from ..methods import CORE, CS, KAPPAS, LS, NONE, PAPER, UNIFORM
from ..quantities import FRECHET, LOSS, qualities
from ..results import Results
from ..settings import Scale, base, other_data, other_unets, unet


def runs(scale: Scale) -> list[Arm]:
    others = [*other_data(scale), unet(scale), *other_unets(scale)]
    return [*arms([base(scale)], (*CORE, *KAPPAS)), *arms(others, PAPER)]


def claims(results: Results) -> list[Claim]:
    return scaling_below(results, results.settings, qualities(results))


ITEM = Item(
    name="table1",
    title="Table 1: quality after training",
    paper="Over unconditional, class-conditional and text-to-image settings, UNet and U-ViT end with a better FID "
    "with CS or LS than without scaling, and than with 1/√2.",
    here="Held-out loss of the averaged weights at the end of training, and Fréchet distance in the features of a "
    "classifier of the same data: of 500 images in 10 steps of the sampler at the end of a short run (`paper`: 10,000 "
    "images). Other κ of CS are shown beside the one that is judged. The paper's FIDs are those of U-ViT and UNet on "
    "CIFAR-10; ours are in other features, and comparable among themselves alone.",
    arms=runs,
    quantities=(FRECHET, LOSS),
    claims=claims,
    figures=QUALITY_FIGURES,
    published={
        NONE.label: "3.11 / 3.17",
        UNIFORM.label: "3.11 / 3.14",
        CS.label: "2.98 / 3.05",
        LS.label: "3.01 / 3.07",
    },
)
