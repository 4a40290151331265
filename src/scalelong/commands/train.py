"""scalelong train: a diffusion model from images. The same command continues it."""

import argparse
import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidConfigError
from ..optional import needs
from ..runs.config import TrainConfig, load_config
from ..runs.recipes import RECIPES, recipe
from ..training import train

DESCRIPTION = f"""\
Train a diffusion model: `scalelong train IMAGES` or `scalelong train --recipe NAME`. To continue a run, give the same \
command again. IMAGES is a folder of images, a file or the name of a data set, the same as --data. \
Recipes: {", ".join(RECIPES)}.
"""


@dataclass
class Command:
    """The flags of the command line: four of its own, and every field of TrainConfig."""

    recipe: str | None = None
    """Begin with the values of a recipe."""
    config: Path | None = None
    """Then take those of a YAML file, such as the config.yaml of a run folder."""
    out: Path | None = None
    """The run folder; left out, its name is made from the configuration: runs/RECIPE-SCALING-seedN."""
    dry_run: bool = False
    """Print all that would happen, and end."""
    train: TrainConfig = field(default_factory=TrainConfig)


class GivenOptions(dict[str, Any]):
    """Model options from the command line, as opposed to those of the recipe."""


def main(arguments: list[str]) -> int:
    command = parse(arguments)
    if command.dry_run:
        print(dry_run(command))
        return 0
    train(command.train, command.out)
    return 0


def parse(arguments: list[str]) -> Command:
    """Recipe, then file, then flags."""
    tyro = needs("tyro", "train", "`scalelong train`")
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--data", *arguments]
    base = _base(arguments)
    if not any(argument.startswith(("--data", "--recipe", "--config", "-h", "--help")) for argument in arguments):
        raise InvalidConfigError(
            "nothing to train on: give a folder of images (scalelong train IMAGES), --recipe NAME or --config FILE; "
            "--help tells more"
        )
    command = tyro.cli(
        Command,
        prog="scalelong train",
        description=DESCRIPTION,
        args=arguments,
        default=Command(train=base),
        # No `--optimizer.` before `--lr`: the names of all groups are different.
        config=(tyro.conf.OmitArgPrefixes,),
        registry=_options_registry(tyro),
    )
    options = command.train.model_options
    inherited = base.model_options if command.train.model == base.model else {}
    given = options if isinstance(options, GivenOptions) else {}
    return dataclasses.replace(command, train=dataclasses.replace(command.train, model_options={**inherited, **given}))


def _base(arguments: list[str]) -> TrainConfig:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(arguments)
    base = recipe(known.recipe) if known.recipe else TrainConfig()
    return load_config(known.config, base) if known.config else base


def _options_registry(tyro: Any) -> Any:
    """`--model-options depth=12 dim=256`: values are JSON, or else text."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(info: Any) -> Any:
        if typing.get_origin(info.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="NAME=VALUE",
            instance_from_str=lambda texts: GivenOptions(map(_option, texts)),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{name}={json.dumps(entry)}" for name, entry in value.items()],
        )

    return registry


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"a model option looks like depth=12, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def dry_run(command: Command) -> str:
    from ..runs.model import load_images
    from ..runs.recipes import default_folder
    from ..training.plan import describe_run

    config = command.train
    data, _ = load_images(config, lambda _: None)
    return describe_run(config, data, command.out or default_folder(config))
