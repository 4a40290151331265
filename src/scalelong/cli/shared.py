"""Flags that several commands share, each written once, and what becomes of them. Nothing here imports torch early."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RECIPES, SAMPLERS, TrainConfig, load_config, recipe
from ..errors import InvalidConfigError
from ..files import refuse_link, refuse_links_in
from .parser import NamedValues, Parser, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from ..diffusion import SampleSettings
    from ..experiments import Engine
    from ..runs import Run

INTERRUPTED = 130
"""128 + SIGINT, as shells count. `scalelong.cli` turns it into 143 where SIGTERM was the reason."""
DATA = "images: a folder, a file or the name of a data set"
SHIPPED = ("portraits", "digits-class", "digits-text", "fashion-class", "fashion-text")
"""The trained networks that come with the package."""
ENGINES = ("local", "submitit", "slurm", "ray")

# Which run: a recipe, a file, other data


def add_run_flags(parser: Parser, default: str = "digits-tiny") -> None:
    """--recipe, --config, --data and --trust."""
    text = f"{', '.join(RECIPES)} (default: {default})"
    parser.flag("--recipe", text, kind=tuple(RECIPES), metavar="NAME")
    parser.flag("--config", "a YAML file with other values, such as a run's config.yaml", kind=Path)
    parser.flag("--data", f"{DATA} (default: the recipe's)")
    add_trust_flag(parser)
    parser.set_defaults(default_recipe=default)


def add_variants_flag(parser: Parser) -> None:
    text = "besides methods: what differs in other fields as well, such as 'unit: model_options.init_std=unit'"
    parser.flag("--variants", text, [], kind=str, nargs="*", metavar="'NAME: FIELD=VALUE ...'")


def add_set_flag(parser: Parser) -> None:
    parser.flag("--set", "other fields of the configuration", [], kind=str, nargs="+", metavar="FIELD=VALUE")


def with_set(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """The configuration with the fields of --set."""
    from ..experiments import as_variant

    return as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config


def run_config(options: argparse.Namespace) -> TrainConfig:
    """The recipe's configuration, then the file's values, then --data."""
    config = recipe(options.default_recipe if options.recipe is None else options.recipe)
    config = config_file(options, config)
    if options.data is None:
        return config
    from ..training import fit_held_out

    return fit_held_out(replace(config, data=options.data))


def sized_config(config: TrainConfig, given: Iterable[str]) -> TrainConfig:
    """What `scalelong train` would train on these images on this machine, with the fields that are given."""
    from ..training import size_run

    return size_run(config, {path.rpartition(".")[2] for path in given}).config


def network_line(config: TrainConfig) -> str:
    """The data, the network and its sizes in a line: the first that `range` and `diagnose` print."""
    pixels = f", on {config.images.size}x{config.images.size} pixels" if config.images.size else ""
    return f"{config.data}: {config.network}, batch {config.batch_size}{pixels}"


def config_file(options: argparse.Namespace, base: TrainConfig) -> TrainConfig:
    """The values of --config over those of a recipe. Code that the file names needs --trust."""
    if options.config is None:
        return base
    from ..runs import require_trust

    config = load_config(options.config, base)
    typed = {"model"} if config.model == getattr(options, "model", None) else ()
    require_trust(config, options.config, options.trust, typed, training=True)
    return config


def add_trust_flag(parser: Parser) -> None:
    text = "run the Python code that a run folder or --config names as its model (package.module:factory)"
    parser.flag("--trust", text, False, rare=True)


# Trained runs


def add_model_flag(parser: Parser) -> None:
    parser.flag("--model", "instead of RUN: a trained network that comes with the package", kind=SHIPPED)


def model_folder(name: str) -> Path:
    """The run folder of a network that comes with the package, made at its first use."""
    from ..optional import needs

    for package in ("numpy", "accelerate", "PIL"):
        needs(package, "train", "using a trained network")
    from ..runs import unpack

    return unpack(name, Path("runs") / name)


def add_checkpoint_flags(parser: Parser) -> None:
    """Which weights of a run: those of the newest checkpoint, averaged, unless something else is wanted."""
    parser.flag("--weights", "averaged (default), raw, or of another length such as ema:10%", metavar="NAME")
    parser.flag("--checkpoint", "default: the newest", kind=_step_or_best, metavar="STEP|best")
    parser.flag("--tuned", "scale the long skips as this file of `lab tune` says", kind=Path, metavar="FILE")
    add_trust_flag(parser)


def _step_or_best(text: str) -> int | str:
    return text if text == "best" else whole_number(text)


def trained_run(folder: Path | None, options: argparse.Namespace) -> Run:
    """The run of the folder, or else of --model, with the weights and the coefficients that the flags ask for."""
    from ..attaching import TunedSkips
    from ..models import keep_freed_memory
    from ..runs import load_run

    scaling = None if options.tuned is None else TunedSkips.load(options.tuned).spelled()
    keep_freed_memory()  # every command that runs a trained network calls it again and again
    folder = model_folder(options.model) if folder is None else folder
    weights = options.weights or "ema"
    return load_run(folder, weights=weights, step=options.checkpoint, trust=options.trust, scaling=scaling)


# Sampling, features, devices


def add_sampling_flags(parser: Parser, steps: int = 50) -> None:
    """How images are made. What was not given is None, so that a command can refuse what it cannot use."""
    parser.flag("--seed", "seed of the first image", 0)
    parser.flag("--sampler", "default: dpm++", kind=tuple(SAMPLERS))
    parser.flag("--steps --num-inference-steps", f"steps of the sampler (default: {steps})", kind=int)
    parser.flag("--guidance --guidance-scale", "classifier-free guidance (default: 1, none)", kind=float)
    add_checkpoint_flags(parser)
    parser.flag("--batch-size", "images at a time", 64)
    add_device_flag(parser)
    parser.set_defaults(default_steps=steps)


def sample_settings(options: argparse.Namespace) -> SampleSettings:
    from ..diffusion import SampleSettings

    return SampleSettings(
        sampler=options.sampler or "dpm++",
        steps=options.default_steps if options.steps is None else options.steps,
        guidance=1.0 if options.guidance is None else options.guidance,
    )


def add_feature_flags(parser: Parser) -> None:
    text = "auto: inception with its weights, else random (default); random; inception; or package.module:factory"
    parser.flag("--features", text, "auto")
    parser.flag("--feature-weights", "the weights of Inception, from torch-fidelity", kind=Path)


def add_device_flag(parser: Parser) -> None:
    parser.flag("--device", "cpu, cuda, cuda:1, mps, ... (default: the accelerator that is there)")


def device_of(device: str | None) -> str:
    """The device that --device names, or the accelerator that is there, or the CPU."""
    import torch

    from ..runs import require_device

    require_device(device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device or str(found or "cpu")


def is_cpu(device: str) -> bool:
    """For training, which takes the accelerator that is there: --device chooses between it and the CPU."""
    chosen, there = (device_of(each).partition(":")[0] for each in (device, None))
    if chosen not in ("cpu", there):
        raise InvalidConfigError(f"`device` must be cpu or {there}, which this machine trains on, got {chosen!r}")
    return chosen == "cpu"


# Sweeps


def add_engine_flags(parser: Parser) -> None:
    """Where the runs of a sweep are carried out (docs/sweeps.md). `engine_of` makes the engine."""
    parser.flag("--engine", "where runs are trained: this machine (default), SLURM, Ray", "local", kind=ENGINES)
    parser.flag("--jobs", "runs at a time (default: one per core or per GPU here)", kind=int)
    parser.flag("--cpus-per-run", "cores (default: as the sweep began, or 1)", kind=int, rare=True, dest="cpus")
    parser.flag("--gpus-per-run", "GPUs of each run", kind=int, rare=True, dest="gpus")
    text = "slurm: such as partition=gpu time=240 account=lab; ray: resources, as memory=8e9"
    values: Any = {"nargs": "+", "action": NamedValues, "metavar": "NAME=VALUE", "dest": "options"}
    parser.flag("--engine-options", text, kind=str, rare=True, **values)


def engine_of(options: argparse.Namespace) -> Engine:
    """The engine that the flags ask for."""
    from ..experiments import make_engine

    given = {name: getattr(options, name) for name in ("jobs", "cpus", "gpus", "options")}
    return make_engine(options.engine, **given)


def left_to_do() -> int:
    """Say that not all runs are finished; the exit code."""
    print("interrupted; the same command continues", file=sys.stderr)
    return INTERRUPTED


def require_seeds(seeds: int, least: int = 1, reason: str = "") -> None:
    if seeds < least:
        raise InvalidConfigError(f"`seeds` must be at least {least}{reason}, got {seeds}")


# Output


def add_out_flag(parser: Parser, text: str, default: Path | None = None) -> None:
    """A place that cannot be written is refused before the command begins."""
    parser.flag("--out --output-dir", text, default, kind=Path)


def folder_in(run: Path, name: str, options: argparse.Namespace) -> Path:
    """The folder of results that `--out` names, else one of this name in the run. Links are refused; not made yet."""
    if options.out is None:
        refuse_link(run / name)
    refuse_links_in(options.out or run / name)
    return options.out or run / name


def call(function: Callable[..., Any], options: argparse.Namespace, **more: Any) -> Any:
    """Call a function with the options that have the names of its parameters, and with `more`."""
    names = inspect.signature(function).parameters.keys() - more.keys()
    return function(**{name: value for name, value in vars(options).items() if name in names}, **more)


def add_output_flags(parser: Parser, result: str) -> None:
    """--json and --quiet, spelled alike everywhere. With --json, nothing else goes to the standard output."""
    parser.flag("--json", f"print {result} as JSON, and nothing else", False)
    add_quiet_flag(parser)


def add_quiet_flag(parser: Parser, rare: bool = False) -> None:
    parser.flag("--quiet", "print the result alone, no progress", False, rare=rare)


def some_images(spec: str, size: int | None = None) -> Tensor:
    """Up to 4,096 images of a data set, evenly chosen, in [-1, 1]."""
    from ..console import Progress
    from ..data import load_data, to_float

    data = load_data(spec, limit=4096, size=size, progress=Progress("reading images"))
    return to_float(data.fetch(range(len(data))).images)
