"""Train a network for a few steps at several widths and measure by how much the output of each block changes.

Under μP the changes are alike at all widths (slopes of about 0), under the standard parametrisation they grow.

MODEL is one of
  a recipe               such as digits-tiny: its network, data and loss
  file.py[:Name]         a Python file with a function model(width), or Name. Its loss(model), on one batch, says
                         what is trained on; without it, fixed random numbers for its example_inputs()
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..config import RECIPES, TrainConfig, recipe
from . import shared
from .find import build, load_factory
from .parser import Parser, integers, split

logger = logging.getLogger(__name__)

EXAMPLES = """\
  scalelong lab coords digits-tiny --widths 48,96,192 --out runs/coords
  scalelong lab coords my_unet.py --widths 32,64,128 --parametrisations standard,mup,mup:unit
"""


def coords_parser() -> Parser:
    made = Parser("lab coords", __doc__ or "", EXAMPLES, "[MODEL] [OPTIONS]")
    made.flag("model", "a recipe or file.py[:Name] (default: digits-tiny)", "digits-tiny", nargs="?")
    made.flag("--widths", "default: 64,128,256; of a recipe: a half, one and two times its own", kind=integers)
    made.flag("--base", "the width where rates were tuned (default: the smallest)", kind=int)
    made.flag("--parametrisations", "standard, mup, or mup:START with another output start (default: both)", kind=split)
    made.flag("--lr --learning-rate", "the rate at the base", 2e-3)
    made.flag("--optimizer", "adamw, muon, or another Adam", "adamw")
    made.flag("--steps", "training steps", 5)
    made.flag("--seeds", "number of seeds: 0, 1, ...", 3)
    made.flag("--batch-size", "images, of a recipe", 16)
    made.flag("--rows", "modules to look at, comma-separated (default: all blocks)", kind=split)
    made.flag("--set", "other fields of a recipe", [], kind=str, nargs="+", metavar="FIELD=VALUE")
    shared.add_out_flag(made, "folder for coords.json, all numbers")
    shared.add_output_flags(made, "all numbers")
    return made


def run_coords(options: argparse.Namespace) -> int:
    from ..files import make_folder
    from ..mup import coordinates

    shared.require_seeds(options.seeds)
    if options.out is not None:
        make_folder(options.out)
    make, task, widths = (_recipe_task if options.model in RECIPES else _model_task)(options)
    found = shared.call(
        coordinates,
        options,
        make=make,
        widths=options.widths or widths,
        parametrisations=options.parametrisations or ("standard", "mup"),
        optimizer=_optimizer_maker(options.optimizer, task.pop("betas", (0.9, 0.99))),
        title=options.model,
        **task,
    )
    print(found.to_json() if options.json else f"\n{found}")
    if options.out is not None:
        found.save(options.out)
        logger.info(f"all numbers: {options.out}")
    return 0


def _optimizer_maker(name: str, betas: tuple[float, float]) -> Callable[..., Any]:
    from ..training import OptimizerConfig, make_optimizer

    def make(model: Any, kinds: Any, lr: float) -> Any:
        settings = OptimizerConfig(optimizer=name, lr=lr, betas=betas, weight_decay=0.0, base_width=1)  # Adams or Muon
        return make_optimizer(model, settings, kinds)

    return make


Task = tuple[Callable[[int], Any], dict[str, Any], list[int]]
"""The network of a width; what `coordinates` takes besides; the default widths."""


def _recipe_task(options: argparse.Namespace) -> Task:
    import torch

    from ..experiments import RecipeTask, as_variant
    from ..randomness import generator
    from ..runs import build_model, with_width

    config = replace(recipe(options.model), batch_size=options.batch_size)
    config = as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config
    task, dim = RecipeTask(config), config.model_options.get("dim")

    def build(width: int) -> Any:
        """With torch's own seed of the moment."""
        wide: TrainConfig = with_width(config, width)
        return build_model(replace(wide, seed=torch.initial_seed() % 2**31), task.shape)

    def loss(model: Any) -> Any:
        return task.step(model, 0, generator(0, "coords", 0))

    widths = [dim // 2, dim, 2 * dim] if isinstance(dim, int) else [64, 128, 256]
    return build, {"loss": loss, "betas": config.optimizer.betas}, widths


def _model_task(options: argparse.Namespace) -> Task:
    factory, module = load_factory(options.model, "a recipe")
    inputs = getattr(module, "example_inputs", None)
    task = {"inputs": inputs() if callable(inputs) else inputs, "loss": getattr(module, "loss", None)}
    return partial(build, factory, options.model), task, [64, 128, 256]
