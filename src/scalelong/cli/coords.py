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
from .find import json_object, module_of
from .options import (
    add_out_option,
    add_output_options,
    add_seed_options,
    add_trust_option,
    config_file,
    seed_count,
)
from .parser import Parser, numbers, split, whole_number

EXAMPLES = """\
  scalelong lab coords digits-tiny --widths 48,96,192 --out runs/coords
  scalelong lab coords my_unet.py --widths 32,64,128 --parametrisations standard,mup,mup:unit
  scalelong lab coords diffusers:UNet2DModel --config unet.json --widths 32,64,128
"""

WIDTHS = "64,128,256"


def parser() -> Parser:
    made = Parser("lab coords", __doc__ or "", EXAMPLES, "[MODEL] [OPTIONS]")
    made.add_argument("model", nargs="?", help="a recipe (default: digits-tiny), file.py[:Name] or module:Class")
    made.add_argument(
        "--widths", help="comma-separated (default: 64,128,256; of a recipe: a half, one and two times its own)"
    )
    made.add_argument("--base", type=whole_number, help="the width where rates were tuned (default: the smallest)")
    made.add_argument(
        "--parametrisations",
        default="standard,mup",
        help="standard, mup, or mup:START with another output start (default: %(default)s)",
    )
    made.add_argument(
        "--lr", "--learning-rate", type=float, default=2e-3, help="AdamW's rate at the base (default: %(default)s)"
    )
    made.add_argument("--steps", type=whole_number, default=5, help="training steps (default: %(default)s)")
    add_seed_options(made, 3)
    made.add_argument("--batch-size", type=whole_number, default=16, help="images, of a recipe (default: %(default)s)")
    made.add_argument("--rows", help="modules to look at, comma-separated (default: all blocks)")
    made.add_argument("--config", help="a YAML file for a recipe; keyword arguments as JSON or a JSON file for a class")
    made.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="other fields of a recipe, as in scalelong range"
    )
    add_trust_option(made)
    add_out_option(made, "folder for coords.json, all numbers")
    add_output_options(made, "all numbers")
    return made


def run(options: argparse.Namespace) -> int:
    from ..files import make_folder
    from ..mup import coordinates

    seed_count(options)
    if options.out is not None:
        make_folder(options.out)
    name = options.model or "digits-tiny"
    make, task = recipe_task(options, name) if name in RECIPES else model_task(options, name)
    widths = task.pop("widths", WIDTHS)
    found = coordinates(
        make,
        numbers(options.widths or widths, int, "`widths`"),
        parametrisations=split(options.parametrisations),
        base=options.base,
        title=name,
        lr=options.lr,
        steps=options.steps,
        seeds=options.seeds,
        rows=split(options.rows) if options.rows else None,
        **task,
    )
    if options.out is not None:
        found.save(options.out)
    if options.json:
        print(found.to_json())
        return 0
    print(f"\n{found}")
    if options.out is not None:
        print(f"all numbers: {options.out}")
    return 0


def recipe_task(options: argparse.Namespace, name: str) -> tuple[Callable[[int], Any], dict[str, Any]]:
    from ..runs import with_width

    config = configuration(options, name)
    build, loss = _task(config)
    task: dict[str, Any] = {"loss": loss, "betas": config.optimizer.betas}
    dim = config.model_options.get("dim")
    if isinstance(dim, int):
        task["widths"] = f"{dim // 2},{dim},{2 * dim}"
    return lambda width: build(with_width(config, width)), task


def configuration(options: argparse.Namespace, name: str) -> TrainConfig:
    from ..experiments import as_variant

    options.config = Path(options.config) if options.config else None
    config = config_file(options, recipe(name))
    config = as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config
    optimizer = replace(config.optimizer, base_width=None)  # the parametrisations say how
    return replace(config, batch_size=options.batch_size, optimizer=optimizer)


def _task(config: TrainConfig) -> tuple[Callable[[TrainConfig], Any], Callable[[Any], Any]]:
    """How networks of a recipe are built, with torch's own seed of the moment, and their loss on one batch."""
    import torch

    from ..experiments import RecipeTask
    from ..randomness import generator
    from ..runs import build_model

    task = RecipeTask(config)

    def build(given: TrainConfig) -> Any:
        return build_model(replace(given, seed=torch.initial_seed() % 2**31), task.shape)

    return build, lambda model: task.step(model, 0, generator(0, "coords", 0))


def model_task(options: argparse.Namespace, spec: str) -> tuple[Callable[[int], Any], dict[str, Any]]:
    from ..mup import width_options
    from ..optional import load_object

    file, _, name = spec.partition(":")
    values = json_object(options.config)
    if not file.endswith(".py"):
        if ":" not in spec:
            raise InvalidConfigError(
                f"{spec!r} is neither a recipe ({', '.join(RECIPES)}), nor a Python file, "
                f"nor of the form module:Class: give one of these"
            )
        factory = load_object(spec, "model")
        return lambda width: factory(**width_options(factory, values, width)), {}
    module = module_of(Path(file))
    factory = getattr(module, name or "model", None)
    if not callable(factory):
        raise InvalidConfigError(f"{file} has no function {name or 'model'}(width) that builds the network")
    inputs, loss = getattr(module, "example_inputs", None), getattr(module, "loss", None)
    task: dict[str, Any] = {"inputs": inputs() if callable(inputs) else inputs, "loss": loss}

    def make(width: int) -> Any:
        try:
            return factory(width, **values)
        # The user's own code may fail in any way.
        except Exception as error:
            raise InvalidConfigError(
                f"{file}: {name or 'model'}({width}) cannot be built ({type(error).__name__}: {error}): it must take a "
                f"width as its first argument"
            ) from error

    return make, task
