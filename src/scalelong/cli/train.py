"""scalelong train: a diffusion model from images. The same command continues it.

The flags are the fields of `scalelong.config.TrainConfig`. A recipe comes first, then a file, then the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from ..config import RECIPES, TrainConfig, field_paths, load_config, recipe, with_values
from ..console import silent
from ..errors import InvalidConfigError
from .options import INTERRUPTED, add_device_option, add_out_option, add_quiet_option, add_trust_option, is_cpu
from .parser import Parser, add_fields
from .settle import Command, dry_run, require_consent, settle

DESCRIPTION = """\
Train a diffusion model on a folder of images, a file or the name of a data set. Image size, network, batch and steps
are chosen for this machine and --budget, apart from those that are given. To continue a run, give the same command
again. A recipe or a file fixes all that is not given. Folders of classes are used with --condition class."""

EXAMPLES = """\
  scalelong train photos/ --budget 30m                 train for half an hour on this machine
  scalelong train flowers/ --condition class           one folder for each class
  scalelong train photos/ --dry-run                    what would happen, and how long it would take
  scalelong train --recipe digits-tiny --scaling cs    a recipe, with constant scaling of the long skips
"""

COMMON = {"model", "scaling", "start_from", "steps", "batch_size", "budget", "seed", "size", "condition", "lr"}
"""Fields whose flags `--help` shows; `--help-all` shows all."""

CHOSEN: dict[str, str] = dict.fromkeys(("model", "steps", "batch_size", "lr", "size"), "chosen for the machine")

ALIASES = {
    "lr": ["--learning-rate"],
    "steps": ["--max-train-steps"],
    "batch_size": ["--train-batch-size"],
    "size": ["--resolution"],
    "flip": ["--random-flip"],
    "workers": ["--dataloader-num-workers"],
    "warmup": ["--lr-warmup-steps"],
    "decay": ["--lr-scheduler"],
    "clip": ["--max-grad-norm"],
    "precision": ["--mixed-precision"],
    "accumulation": ["--gradient-accumulation-steps"],
    "save_every": ["--checkpointing-steps"],
    "keep_last": ["--checkpoints-total-limit"],
    "trackers": ["--report-to"],
    "start_from": ["--from", "--init-from"],
}
"""Names that other training scripts use for the same thing."""


def parser() -> Parser:
    made = Parser("train", DESCRIPTION, EXAMPLES, "[IMAGES] [OPTIONS]")
    made.add_argument("images_given", nargs="?", metavar="IMAGES", help="a folder, a file or the name of a data set")
    made.add_argument("--recipe", metavar="NAME", help=f"begin with a recipe: {', '.join(RECIPES)}")
    made.add_argument("--config", type=Path, help="then take the values of a YAML file, such as a run's config.yaml")
    add_out_option(made, "the run folder (default: runs/NAME-SCALING-seedN)")
    made.add_argument("--dry-run", action="store_true", help="print all that would happen and how long it would take")
    add_device_option(made)
    shown = len(made._actions)
    add_quiet_option(made)
    add_trust_option(made)
    made.hide(*made._actions[shown:])
    add_fields(made, TrainConfig, ALIASES, COMMON, CHOSEN)
    return made


def parse(arguments: list[str]) -> Command:
    return command_of(parser().parse_args(arguments))


def command_of(options: argparse.Namespace) -> Command:
    """Recipe, then file, then flags."""
    paths = field_paths()
    values = {name: value for name, value in vars(options).items() if name in paths}
    if options.images_given is not None:
        values["data"] = options.images_given
    if "data" not in values and options.recipe is None and options.config is None:
        raise InvalidConfigError(
            "nothing to train on: give a folder of images (scalelong train IMAGES), --recipe NAME or --config FILE; "
            "--help shows more"
        )
    if options.device is not None:
        values["cpu"] = is_cpu(options)
    # An empty name is a mistake (a variable of the shell that is not set), not the default.
    base = TrainConfig() if options.recipe is None else recipe(options.recipe)
    base = base if options.config is None else load_config(options.config, base)
    config = with_values(base, {paths[name]: value for name, value in values.items()})
    inherited = base.model_options if config.model == base.model else {}
    config = dataclasses.replace(config, model_options={**inherited, **values.get("model_options", {})})
    if options.config is not None:
        require_consent(config, options.config, options.trust, values.keys())
    by_name = options.recipe is not None or options.config is not None
    given = frozenset(values)
    return Command(config, options.out, options.dry_run, options.quiet, given, by_name, options.trust)


def run(options: argparse.Namespace) -> int:
    from ..files import require_folder_place
    from ..training import train

    command = command_of(options)
    if command.out is not None:
        require_folder_place(command.out)  # before the sizing, which takes time
    say = silent if command.quiet else log
    if command.dry_run:
        print(dry_run(command, say))
        return 0
    config, folder, plan = settle(command, say)
    if plan is not None:
        say(str(plan))
    result = train(config, folder, quiet=command.quiet)
    if os.environ.get("RANK", "0") == "0":
        print(result, flush=True)
    return 0 if result.finished else INTERRUPTED


def log(text: str) -> None:
    """Remarks and progress go to the standard error, results to the standard output."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)
