"""Train a network for a few steps at several widths and measure by how much the output of each block changes.

Under μP the changes are alike at all widths (slopes of about 0), under the standard parametrisation they grow.

MODEL is one of
  a recipe               such as digits-tiny: its network, data and loss
  file.py[:Name]         a Python file with a function model(width), or Name. Its loss(model), on one batch, says
                         what is trained on; without it, fixed random numbers for its example_inputs()
  package.module:Class   --config gives its keyword arguments, among them the width (dim, width, hidden_size, ..., or
                         diffusers' block_out_channels), which is replaced; heads keep their size
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import RECIPES, TrainConfig, recipe
from ..errors import InvalidConfigError
from . import shared
from .find import json_object, module_of
from .parser import Parser, numbers, split

EXAMPLES = """\
  scalelong lab coords digits-tiny --widths 48,96,192 --out runs/coords
  scalelong lab coords my_unet.py --widths 32,64,128 --parametrisations standard,mup,mup:unit
  scalelong lab coords diffusers:UNet2DModel --config unet.json --widths 32,64,128
"""


def coords_parser() -> Parser:
    made = Parser("lab coords", __doc__ or "", EXAMPLES, "[MODEL] [OPTIONS]")
    text = "a recipe, file.py[:Name] or module:Class (default: digits-tiny)"
    made.flag("model", text, "digits-tiny", nargs="?")
    made.flag("--widths", "comma-separated (default: 64,128,256; of a recipe: a half, one and two times its own)")
    made.flag("--base", "the width where rates were tuned (default: the smallest)", kind=int)
    made.flag("--parametrisations", "standard, mup, or mup:START with another output start", "standard,mup")
    made.flag("--lr --learning-rate", "the rate at the base", 2e-3)
    made.flag("--optimizer", "adamw, muon, or another Adam", "adamw")
    made.flag("--steps", "training steps", 5)
    made.flag("--seeds", "number of seeds: 0, 1, ...", 3)
    made.flag("--batch-size", "images, of a recipe", 16)
    made.flag("--rows", "modules to look at, comma-separated (default: all blocks)")
    made.flag("--config", "a YAML file for a recipe; keyword arguments as JSON or a JSON file for a class")
    text = "other fields of a recipe, as in scalelong range"
    made.flag("--set", text, [], kind=str, nargs="+", metavar="FIELD=VALUE")
    shared.add_trust_flag(made)
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
    found = coordinates(
        make,
        numbers(options.widths, int, "`widths`") if options.widths else widths,
        parametrisations=split(options.parametrisations),
        base=options.base,
        title=options.model,
        lr=options.lr,
        optimizer=_optimizer_maker(options.optimizer, task.pop("betas", (0.9, 0.99))),
        steps=options.steps,
        seeds=options.seeds,
        rows=split(options.rows) if options.rows else None,
        **task,
    )
    if options.out is not None:
        found.save(options.out)
    print(found.to_json() if options.json else f"\n{found}")
    if options.out is not None:
        shared.speaker(options)(f"all numbers: {options.out}")
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

    options.config = Path(options.config) if options.config else None
    config = shared.config_file(options, recipe(options.model))
    config = as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config
    # The parametrisations say how to train by μP.
    config = replace(config, batch_size=options.batch_size, optimizer=replace(config.optimizer, base_width=None))
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
    from ..mup import width_options
    from ..optional import load_object

    file, colon, name = options.model.partition(":")
    values = json_object(options.config)
    if file.endswith(".py"):
        module = module_of(Path(file))
        factory = getattr(module, name or "model", None)
        inputs, loss = getattr(module, "example_inputs", None), getattr(module, "loss", None)
        task = {"inputs": inputs() if callable(inputs) else inputs, "loss": loss}
    elif colon:
        factory, task = load_object(options.model, "model"), {}
    else:
        raise InvalidConfigError(
            f"{options.model!r} is neither a recipe ({', '.join(RECIPES)}), nor a Python file, nor of the form "
            f"module:Class: give one of these"
        )
    if not callable(factory):
        raise InvalidConfigError(f"{file} has no function {name or 'model'}(width) that builds the network")

    def make(width: int) -> Any:
        try:
            return (
                factory(width, **values) if file.endswith(".py") else factory(**width_options(factory, values, width))
            )
        except InvalidConfigError:
            raise
        # The user's own code may fail in any way.
        except Exception as error:
            raise InvalidConfigError(
                f"{options.model} cannot be built with the width {width} ({type(error).__name__}: {error}); a function "
                f"of a file must take the width as its first argument"
            ) from error

    return make, task, [64, 128, 256]
