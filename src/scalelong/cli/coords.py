"""Train the network of a recipe for a few steps at several widths and measure how far the output of each block moves.

Under μP the changes are alike at all widths (slopes of about 0), under the standard parametrisation they grow.
`scalelong.mup.coordinates(make, widths)` does the same for a network of your own.
"""

import argparse
import logging
from dataclasses import replace
from typing import Any

from ..config import RECIPES, recipe
from . import shared
from .parser import Parser, integers

logger = logging.getLogger(__name__)

EXAMPLES = """\
  scalelong lab coords digits-tiny --widths 48,96,192 --out runs/coords
"""


def coords_parser() -> Parser:
    made = Parser("lab coords", __doc__ or "", EXAMPLES, "[RECIPE] [OPTIONS]")
    made.flag("recipe", "default: digits-tiny", "digits-tiny", kind=tuple(RECIPES), nargs="?", metavar="NAME")
    made.flag("--widths", "default: a half, one and two times the recipe's own", kind=integers)
    made.flag("--base", "the width where rates were tuned (default: the smallest)", kind=int)
    made.flag("--lr --learning-rate", "the rate at the base", 2e-3)
    made.flag("--optimizer", "adamw, muon, or another Adam", "adamw")
    made.flag("--steps", "training steps", 5)
    made.flag("--seeds", "number of seeds: 0, 1, ...", 3)
    made.flag("--batch-size", "images", 16)
    shared.add_set_flag(made)
    shared.add_out_flag(made, "folder for coords.json, all numbers")
    shared.add_output_flags(made, "all numbers")
    return made


def run_coords(options: argparse.Namespace) -> int:
    import torch

    from ..experiments import RecipeTask
    from ..mup import coordinates
    from ..randomness import generator
    from ..runs import build_model, with_width
    from ..training import OptimizerConfig, make_optimizer

    shared.require_seeds(options.seeds)
    config = shared.with_set(replace(recipe(options.recipe), batch_size=options.batch_size), options)
    task, dim = RecipeTask(config), config.model_options.get("dim", 128)

    def build(width: int) -> Any:
        """With torch's own seed of the moment."""
        return build_model(replace(with_width(config, width), seed=torch.initial_seed() % 2**31), task.shape)

    def optimizer(model: Any, kinds: Any, lr: float) -> Any:
        settings = OptimizerConfig(
            optimizer=options.optimizer, lr=lr, betas=config.optimizer.betas, weight_decay=0.0, base_width=1
        )
        return make_optimizer(model, settings, kinds)

    found = coordinates(
        build,
        options.widths or [dim // 2, dim, 2 * dim],
        base=options.base,
        lr=options.lr,
        steps=options.steps,
        seeds=options.seeds,
        optimizer=optimizer,
        loss=lambda model: task.step(model, 0, generator(0, "coords", 0)),
        title=options.recipe,
    )
    print(found.to_json() if options.json else f"\n{found}")
    if options.out is not None:
        found.save(options.out)
        logger.info(f"all numbers: {options.out}")
    return 0
