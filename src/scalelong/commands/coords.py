"""scalelong coords: the coordinate check, how far each block moves in a few steps, over widths or depths."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidConfigError
from .find import json_object
from .options import (
    add_output_options,
    add_seed_options,
    add_trust_option,
    config_file,
    listed,
    names_in,
    seed_count,
    speaker,
    split,
    whole_number,
)

if TYPE_CHECKING:
    from ..mup import Coordinates
    from ..runs.config import TrainConfig

_EPILOG = """\
MODEL is one of
  a recipe               such as digits-tiny: its network, data and loss
  file.py[:Name]         a Python file with a function model(width), or Name. Its loss(model, i), of batch i, says
                         what is trained on; without it, fixed random numbers for its example_inputs()
  package.module:Class   --config gives its keyword arguments, among them the width (dim, width, hidden_size, ..., or
                         diffusers' block_out_channels), which is replaced; heads keep their size

examples
  scalelong coords digits-tiny --widths 64,128,256 --out runs/coords
  scalelong coords my_unet.py --widths 32,64,128 --parametrisations standard,mup,mup:unit
  scalelong coords diffusers:UNet2DModel --config unet.json --widths 32,64,128
  scalelong coords digits-tiny --depths 4,8,16 --parametrisations standard,branches:1
"""


def run(options: argparse.Namespace) -> int:
    from ..files import make_folder

    seed_count(options)
    if options.out is not None:
        make_folder(options.out)
    say = speaker(options)
    found = over_depths(options, say) if options.depths else over_widths(options, say)
    if options.out is not None:
        found.save(options.out)
    if options.json:
        print(found.to_json())
        return 0
    print(f"\n{found}")
    if options.out is not None:
        print(f"table, picture and numbers: {options.out}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong coords",
        description="Train a network for a few steps at several widths and measure by how much the output of each "
        "block changes. Under μP the changes are alike at all widths (slopes of about 0), under the standard "
        "parametrisation they grow.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("model", nargs="?", help="a recipe (default: digits-tiny), file.py[:Name] or module:Class")
    made.add_argument("--widths", default="64,128,256", help="comma-separated (default: %(default)s)")
    made.add_argument("--depths", help="along the depth of a recipe's U-ViT instead, for example 4,8,16")
    made.add_argument("--base", type=whole_number, help="the width where rates were tuned (default: the smallest)")
    made.add_argument(
        "--parametrisations",
        help="standard, mup, or mup:START with another output start (default: standard,mup); with --depths standard or "
        "branches:A, residual branches times (base/depth)^A",
    )
    made.add_argument("--lr", type=float, default=2e-3, help="AdamW's rate at the base (default: %(default)s)")
    made.add_argument("--steps", type=whole_number, default=5, help="training steps (default: %(default)s)")
    add_seed_options(made, 3)
    made.add_argument(
        "--batches",
        choices=("fixed", "fresh"),
        default="fixed",
        help="train on one batch (default), or on fresh ones, whose updates are not aligned: slopes fall then",
    )
    made.add_argument("--batch-size", type=whole_number, default=16, help="images, of a recipe (default: %(default)s)")
    made.add_argument("--rows", help="modules to look at, comma-separated (default: all blocks)")
    made.add_argument("--config", help="a YAML file for a recipe; keyword arguments as JSON or a JSON file for a class")
    made.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="other fields of a recipe, as in scalelong range"
    )
    add_trust_option(made)
    made.add_argument("--out", type=Path, help="folder for coords.json, coords.txt and coords.png")
    add_output_options(made, "all numbers")
    return made


def over_widths(options: argparse.Namespace, say: Callable[[str], None]) -> "Coordinates":
    from ..mup import coordinates

    name = options.model or "digits-tiny"
    make, task = (
        recipe_task(options, name) if name in names_in("runs.recipes", "RECIPES") else model_task(options, name)
    )
    return coordinates(
        make,
        listed(options.widths, int, "--widths"),
        parametrisations=split(options.parametrisations or "standard,mup"),
        base=options.base,
        title=name,
        say=say,
        **settings(options),
        **task,
    )


def settings(options: argparse.Namespace) -> dict[str, Any]:
    rows = split(options.rows) if options.rows else None
    return {"lr": options.lr, "steps": options.steps, "seeds": options.seeds, "batches": options.batches, "rows": rows}


def recipe_task(options: argparse.Namespace, name: str) -> tuple[Callable[[int], Any], dict[str, Any]]:
    from ..runs.model import with_width

    config = configuration(options, name)
    build, loss = _task(config)
    return lambda width: build(with_width(config, width)), {"loss": loss, "betas": config.optimizer.betas}


def configuration(options: argparse.Namespace, name: str) -> "TrainConfig":
    from ..experiments.runs import as_variant
    from ..runs.recipes import recipe

    options.config = Path(options.config) if options.config else None
    config = config_file(options, recipe(name))
    config = as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config
    optimizer = replace(config.optimizer, base_width=None)  # the parametrisations say how
    return replace(config, batch_size=options.batch_size, optimizer=optimizer)


def _task(config: "TrainConfig") -> tuple[Callable[["TrainConfig"], Any], Callable[[Any, int], Any]]:
    """How networks of a recipe are built, with torch's own seed of the moment, and their loss on batch i."""
    import torch

    from ..experiments.rates import RecipeTask
    from ..models.call import Denoiser
    from ..randomness import generator
    from ..runs.model import build_model

    task = RecipeTask(config)

    def build(given: "TrainConfig") -> Any:
        return build_model(replace(given, seed=torch.initial_seed() % 2**31), task.shape)

    return build, lambda model, i: task.loss(Denoiser(model).given, generator(0, "coords", i))


def model_task(options: argparse.Namespace, spec: str) -> tuple[Callable[[int], Any], dict[str, Any]]:
    from ..mup import width_options
    from ..optional import load_object
    from .find import module_of

    file, _, name = spec.partition(":")
    values = json_object(options.config)
    if not file.endswith(".py"):
        if ":" not in spec:
            raise InvalidConfigError(
                f"{spec!r} is neither a recipe ({', '.join(names_in('runs.recipes', 'RECIPES'))}), nor a Python file, "
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


def over_depths(options: argparse.Namespace, say: Callable[[str], None]) -> "Coordinates":
    """Along depth nothing of the width's groups applies: a parametrisation is a factor of the residual branches."""
    from ..experiments.compare import at
    from ..mup import coordinates
    from ..runs.model import is_uvit

    name = options.model or "digits-tiny"
    depths = listed(options.depths, int, "--depths")
    if name not in names_in("runs.recipes", "RECIPES"):
        raise InvalidConfigError("--depths goes along the depth of a recipe's U-ViT: name a recipe")
    config = configuration(options, name)
    if not is_uvit(config):
        raise InvalidConfigError(f"--depths goes along the depth of a U-ViT, and {name} has {config.model}")
    build, loss = _task(config)
    base = options.base or min(depths)
    found: Coordinates | None = None
    for parametrisation in split(options.parametrisations or "standard,branches:1"):
        power = _power(parametrisation)

        def make(depth: int, power: float | None = power) -> Any:
            given = at(config, "depth", depth)
            if power is not None:
                scaled = {**given.model_options, "residual_scaling": min(1.0, (base / depth) ** power)}
                given = replace(given, model_options=scaled)
            return build(given)

        part = coordinates(
            make,
            depths,
            parametrisations=("standard",),
            base=base,
            axis="depth",
            title=name,
            loss=loss,
            betas=config.optimizer.betas,
            say=say,
            **settings(options),
        )
        records = [replace(record, parametrisation=parametrisation) for record in part.records]
        found = replace(part, records=[*(found.records if found else []), *records])
    assert found is not None
    return found


def _power(parametrisation: str) -> float | None:
    if parametrisation == "standard":
        return None
    kind, _, power = parametrisation.partition(":")
    try:
        if kind == "branches":
            return float(power or 1)
    except ValueError:
        pass
    raise InvalidConfigError(f"with --depths a parametrisation is standard or branches:A, got {parametrisation!r}")
