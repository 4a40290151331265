"""scalelong train: a diffusion model from images. The same command continues it.

The flags are the fields of `scalelong.config.TrainConfig`. A recipe comes first, then a file, then the flags. A run
that has begun goes on with its own values and those that were given. A new one is sized for the machine, unless a
recipe, a file or weights to begin with fix its sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import (
    RECIPES,
    TrainConfig,
    default_folder,
    field_paths,
    flatten,
    load_config,
    recipe,
    seconds_of,
    to_dict,
    with_values,
)
from ..errors import InvalidConfigError
from . import shared
from .parser import Parser, add_fields

if TYPE_CHECKING:
    from ..training import Plan

logger = logging.getLogger(__name__)

DESCRIPTION = """\
Train a diffusion model on a folder of images, a file or the name of a data set. The same command continues it.

Image size, network, batch and steps are chosen for this machine and --budget, apart from those that are given. A recipe
or a file fixes all that is not given. Folders of classes are used with --condition class."""

EXAMPLES = """\
  scalelong train photos/ --budget 30m                 train for half an hour on this machine
  scalelong train flowers/ --condition class           one folder for each class
  scalelong train photos/ --dry-run                    what would happen, and how long it would take
  scalelong train --recipe digits-tiny --scaling cs    a recipe, with constant scaling of the long skips
"""

COMMON = {"model", "scaling", "start_from", "steps", "batch_size", "budget", "seed", "size", "condition", "lr"}
"""Fields whose flags `--help` shows; `--help-all` shows all."""
CHOSEN = {"model", "steps", "batch_size", "lr", "size", "prediction", "held_out", "warmup", "betas", "clip"}
CHOSEN |= {"samples", "log_every", "save_every"}
"""Fields that are chosen for the images and the machine where nothing says otherwise."""

ALIASES = {
    "lr": "--learning-rate",
    "steps": "--max-train-steps",
    "batch_size": "--train-batch-size",
    "size": "--resolution",
    "flip": "--random-flip",
    "workers": "--dataloader-num-workers",
    "warmup": "--lr-warmup-steps",
    "decay": "--lr-scheduler",
    "clip": "--max-grad-norm",
    "precision": "--mixed-precision",
    "accumulation": "--gradient-accumulation-steps",
    "save_every": "--checkpointing-steps",
    "keep_last": "--checkpoints-total-limit",
    "trackers": "--report-to",
    "start_from": "--from --init-from",
}
"""Names that other training scripts use for the same thing."""


def train_parser() -> Parser:
    made = Parser("train", DESCRIPTION, EXAMPLES, "[IMAGES] [OPTIONS]")
    made.flag("images_given", "a folder, a file or the name of a data set", nargs="?", metavar="IMAGES")
    made.flag("--recipe", f"begin with a recipe: {', '.join(RECIPES)}", metavar="NAME")
    made.flag("--config", "then take the values of a YAML file, such as a run's config.yaml", kind=Path)
    shared.add_out_flag(made, "the run folder (default: in runs/, by the name of the images or the recipe)")
    made.flag("--dry-run", "print all that would happen and how long it would take", False)
    text = "with --dry-run: memory, exchange and data rate on so many accelerators, without reading images"
    made.flag("--for", text, kind=int, rare=True, dest="needs_for", metavar="N")
    made.flag("--device-memory", "of --for: memory of each of them, in GB", kind=float, rare=True, metavar="GB")
    shared.add_device_flag(made)
    shared.add_quiet_flag(made, rare=True)
    shared.add_trust_flag(made)
    add_fields(made, TrainConfig, ALIASES, COMMON, CHOSEN)
    return made


@dataclasses.dataclass
class TrainCommand:
    """A parsed command line: the configuration, and which of its fields the user gave."""

    train: TrainConfig
    given: frozenset[str]
    options: argparse.Namespace

    @property
    def by_name(self) -> bool:
        """A recipe or a file says all that is not given; otherwise it is chosen for the machine."""
        return self.options.recipe is not None or self.options.config is not None

    @property
    def is_sized(self) -> bool:
        """Sizes that are not given are chosen for the machine; a run that begins with weights has their network."""
        return not self.by_name and self.train.images.autoencoder is None and self.train.start_from is None


def run_train(options: argparse.Namespace) -> int:
    from ..training import describe_needs, train

    command = command_of(options)
    if options.needs_for is not None:
        if not command.by_name and "model" not in command.given:
            raise InvalidConfigError("`needs_for` counts a network that is known: give `recipe`, `config` or `model`")
        print(describe_needs(command.train, options.needs_for, options.device_memory))
        return 0
    if options.dry_run:
        print(dry_run(command))
        return 0
    config, folder, plan = settle(command)
    if plan is not None:
        logger.info(str(plan))
    result = train(config, folder, quiet=options.quiet)
    if os.environ.get("RANK", "0") == "0":
        print(result, flush=True)
        if result.finished and (remark := worth(config, command.given)):
            print(remark, flush=True)
    return 0 if result.finished else shared.INTERRUPTED


def worth(config: TrainConfig, given: Collection[str]) -> str:
    """A sentence about a run that was too short for samples that show something; "" for others."""
    from ..training import steps_needed

    needed = steps_needed(config)
    if needed is None or config.steps >= needed or config.budget is None:
        return ""
    minutes = math.ceil(seconds_of(config.budget) * needed / config.steps / 60)
    longer = f"--steps {needed}" if "steps" in given else f"--budget {minutes}m"
    return f"{config.steps:,} steps; images like these need about {needed:,}: the same command with {longer} goes on"


def parse(arguments: list[str]) -> TrainCommand:
    return command_of(train_parser().parse_args(arguments))


def command_of(options: argparse.Namespace) -> TrainCommand:
    """Recipe, then file, then flags."""
    paths = field_paths()
    values = {name: value for name, value in vars(options).items() if name in paths}
    if options.images_given is not None:
        values["data"] = options.images_given
    if "data" not in values and not (options.recipe or options.config or options.needs_for):
        raise InvalidConfigError(
            "nothing to train on: give a folder of images (scalelong train IMAGES), --recipe NAME or --config FILE; "
            "--help shows more"
        )
    if options.device is not None:
        values["cpu"] = shared.is_cpu(options.device)
    # An empty name is a mistake (a variable of the shell that is not set), not the default.
    base = TrainConfig() if options.recipe is None else recipe(options.recipe)
    base = base if options.config is None else load_config(options.config, base)
    config = with_values(base, {paths[name]: value for name, value in values.items()})
    inherited = base.model_options if config.model == base.model else {}
    config = dataclasses.replace(config, model_options={**inherited, **values.get("model_options", {})})
    if options.config is not None:
        _require_trust(config, options.config, options.trust, values)
    return TrainCommand(config, frozenset(values), options)


def settle(command: TrainCommand) -> tuple[TrainConfig, Path, Plan | None]:
    """The configuration to train with, its folder, and how it was sized, unless it is that of a run that has begun."""
    from ..console import Progress
    from ..files import require_folder_place
    from ..runs import RunFolder, load_images
    from ..training import fit_held_out, lengthen_run, size_run

    config, given = command.train, command.given
    network_open = command.is_sized and not given & {"model", "model_options"}
    folder = command.options.out or default_folder(config, network_open)
    require_folder_place(folder)  # before minutes of measuring
    before = RunFolder(folder).begun_with()
    if before is not None:
        return continued(command, before), folder, None
    _mention_classes(config)
    if config.start_from is not None:
        plan = started(command)
        return plan.config, folder, plan
    if command.is_sized:
        plan = size_run(config, given, Progress("reading images"))
        return plan.config, folder, plan
    if "held_out" not in given:
        config = fit_held_out(config, " (--held-out says otherwise)")
    if config.budget is None:
        return config, folder, None
    plan = lengthen_run(config, given, load_images(config)[0])
    return plan.config, folder, plan


def _mention_classes(config: TrainConfig) -> None:
    """A folder of folders is often one of classes, which training uses only if it is asked to."""
    folder = Path(config.data)
    if config.diffusion.condition != "none" or not folder.is_dir():
        return
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) > 1:
        shown = ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
        logger.info(f"{folder} has {len(classes)} folders ({shown}): --condition class trains on them as classes")


def started(command: TrainCommand) -> Plan:
    """A run that begins with weights has their network; it gets the steps that fit the budget, and held-out images."""
    from ..runs import adopt_weights, load_images
    from ..training import fit_held_out, held_out, lengthen_run

    config, given = adopt_weights(command.train, command.given, command.options.trust), command.given
    if "held_out" not in given:
        if not command.by_name:
            config = with_values(config, {"images.held_out": held_out(len(load_images(config)[0]))})
        config = fit_held_out(config, " (--held-out says otherwise)")
    return lengthen_run(config, given, load_images(config)[0])


def continued(command: TrainCommand, before: TrainConfig) -> TrainConfig:
    """A run that has begun is never sized again. Its folder says what was chosen, the flags what is to change."""
    config, given, paths = command.train, command.given, field_paths()
    was, now = flatten(to_dict(before)), flatten(to_dict(config))
    if not command.by_name or before.start_from is not None:
        _require_trust(before, command.options.out or "the run folder", command.options.trust, given)
        settings = config.optimizer
        dictionaries = {"optimizer_options": settings.optimizer_options, "decay_options": settings.decay_options}
        values = {paths[name]: dictionaries.get(name, now.get(paths[name])) for name in given - {"model_options"}}
        options = {**before.model_options, **config.model_options}
        config = dataclasses.replace(with_values(before, values), model_options=options)
    elif "held_out" not in given:
        config = with_values(config, {"images.held_out": before.images.held_out})
    if command.train.budget is None or "steps" in given or before.budget is None:
        return config
    # The same budget means the same steps, and another one as many more or less.
    chosen = ("checkpoints.save_every", "logging.log_every")
    config = with_values(config, {path: was[path] for path in chosen if path.split(".")[-1] not in given})
    factor = seconds_of(command.train.budget) / seconds_of(before.budget)
    return dataclasses.replace(config, steps=max(1, round(before.steps * factor)))


def dry_run(command: TrainCommand) -> str:
    """All that would happen, and how long it would take."""
    from ..runs import load_images
    from ..training import describe_run, lengthen_run

    config, folder, plan = settle(command)
    data, _ = load_images(config)  # says which files were not read
    timed = plan or lengthen_run(config, field_paths(), data)
    parts = [str(plan)] if plan is not None and not command.by_name else []
    return "\n\n".join([*parts, describe_run(config, data, folder, seconds=timed.seconds)])


def _require_trust(config: TrainConfig, source: Any, trust: bool, given: Collection[str]) -> None:
    """Code that a file or a run folder names, and not the user, needs consent."""
    from ..runs import require_trust

    require_trust(config, source, trust, given, training=True)
