"""Flags that several commands share, each written once, and what becomes of them. Nothing here imports torch early."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import RECIPES, SAMPLERS, TrainConfig, field_paths, load_config, recipe, with_values
from ..console import silent
from ..errors import InvalidConfigError
from .parser import Parser, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from ..diffusion import SampleSettings
    from ..experiments import Engine
    from ..runs import Run

INTERRUPTED = 130
"""128 + SIGINT, as shells count. `scalelong.cli` turns it into 143 where SIGTERM was the reason."""
DATA = "images: a folder, a file or the name of a data set"
SHIPPED = ("digits-class", "digits-text", "fashion-class", "fashion-text")
"""The trained networks that come with the package."""
ENGINES = ("local", "submitit", "slurm", "ray")

# Which run: a recipe, a file, other data


def add_run_options(parser: Parser, default: str | None = "digits-tiny") -> None:
    """--recipe, --config, --data and --trust."""
    shown = f" (default: {default})" if default else ""
    parser.add_argument("--recipe", choices=tuple(RECIPES), metavar="NAME", help=f"{', '.join(RECIPES)}{shown}")
    parser.add_argument("--config", type=Path, help="a YAML file with other values, such as a run's config.yaml")
    parser.add_argument("--data", help=f"{DATA} (default: the recipe's)")
    add_trust_option(parser)
    parser.set_defaults(default_recipe=default)


def run_config(options: argparse.Namespace) -> TrainConfig:
    """The recipe's configuration, then the file's values, then --data."""
    config = recipe(options.default_recipe if options.recipe is None else options.recipe)
    config = config_file(options, config)
    if options.data is None:
        return config
    from ..training import fit_held_out

    return fit_held_out(replace(config, data=options.data), lambda text: print(text, file=sys.stderr))


def sized_config(options: argparse.Namespace, data: str) -> TrainConfig:
    """What `scalelong train` would train on these images on this machine; --model and --size where they are given."""
    from ..training import size_run

    given = {"data": data, "model": getattr(options, "model", None), "size": getattr(options, "size", None)}
    given = {name: value for name, value in given.items() if value is not None}
    paths = field_paths()
    config = with_values(TrainConfig(), {paths[name]: value for name, value in given.items()})
    return size_run(config, given, lambda text: print(text, file=sys.stderr)).config


def config_file(options: argparse.Namespace, base: TrainConfig) -> TrainConfig:
    """The values of --config over those of a recipe. Code that the file names needs --trust."""
    if options.config is None:
        return base
    from ..runs import require_trust, require_trusted_training

    config = load_config(options.config, base)
    if config.model != getattr(options, "model", None):  # --model is the user's own word
        require_trust(config, options.config, options.trust)
    require_trusted_training(config, options.config, options.trust)
    return config


def add_trust_option(parser: Parser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the Python code that a run folder or --config names as its model (package.module:factory)",
    )


# Trained runs


def add_checkpoint_options(parser: Parser) -> None:
    """Which weights of a run: those of the newest checkpoint, averaged, unless something else is wanted."""
    parser.add_argument(
        "--weights",
        metavar="ema|raw|ema:LENGTH",
        help="averaged weights (default), raw ones, or an average of another length such as ema:10%%",
    )
    parser.add_argument("--checkpoint", type=_step_or_best, metavar="STEP|best", help="default: the newest")
    parser.add_argument(
        "--tuned", type=Path, metavar="FILE", help="scale the long skips as this file of `scalelong lab tune` says"
    )
    add_trust_option(parser)


def _step_or_best(text: str) -> int | str:
    return text if text == "best" else whole_number(text)


def add_model_option(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        choices=SHIPPED,
        help="instead of RUN: a small trained network that comes with the package; its run folder is runs/NAME",
    )


def model_folder(name: str) -> Path:
    """The run folder of a network that comes with the package, made at its first use."""
    from ..optional import needs

    for package in ("numpy", "accelerate", "PIL"):
        needs(package, "train", "using a trained network")
    from ..runs import unpack

    return unpack(name, Path("runs") / name)


def trained_run(folder: Path, options: argparse.Namespace) -> Run:
    """The run with the weights and, where --tuned is given, the coefficients that the flags ask for."""
    from ..attaching import TunedSkips
    from ..models import keep_freed_memory
    from ..runs import load_run

    scaling = None if options.tuned is None else TunedSkips.load(options.tuned).spelled()
    keep_freed_memory()  # every command that runs a trained network calls it again and again
    weights = options.weights or "ema"
    return load_run(folder, weights=weights, step=options.checkpoint, trust=options.trust, scaling=scaling)


# Sampling and features


def add_sampling_options(parser: Parser, steps: int = 50) -> None:
    """How images are made. What was not given is None, so that a command can refuse what it cannot use."""
    parser.add_argument("--seed", type=whole_number, default=0, help="seed of the first image (default: %(default)s)")
    parser.add_argument("--sampler", choices=SAMPLERS, help="default: dpm++")
    parser.add_argument(
        "--steps", "--num-inference-steps", type=whole_number, help=f"steps of the sampler (default: {steps})"
    )
    parser.add_argument(
        "--guidance", "--guidance-scale", type=float, help="classifier-free guidance (default: 1, none)"
    )
    add_checkpoint_options(parser)
    parser.add_argument("--batch-size", type=whole_number, default=64, help="default: %(default)s")
    add_device_option(parser)
    parser.set_defaults(default_steps=steps)


def sample_settings(options: argparse.Namespace) -> SampleSettings:
    from ..diffusion import SampleSettings

    return SampleSettings(
        sampler=options.sampler or "dpm++",
        steps=options.default_steps if options.steps is None else options.steps,
        guidance=1.0 if options.guidance is None else options.guidance,
    )


def add_feature_options(parser: Parser) -> None:
    parser.add_argument(
        "--features",
        default="auto",
        help="auto: the first that tell noise from the data (default); random; classifier, trained on the data; "
        "efficientnet; pixels; inception; or package.module:factory",
    )
    parser.add_argument("--feature-weights", type=Path, help="the weights of Inception, from torch-fidelity")


def add_device_option(parser: Parser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps, ... (default: the accelerator that is there)")


def device_of(options: argparse.Namespace) -> str:
    """The device that --device names, or the accelerator that is there, or the CPU."""
    import torch

    from ..runs import require_device

    require_device(options.device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return options.device or str(found or "cpu")


def is_cpu(options: argparse.Namespace) -> bool:
    """For training, which takes the accelerator that is there: --device chooses between it and the CPU."""
    chosen, there = (device_of(given).partition(":")[0] for given in (options, argparse.Namespace(device=None)))
    if chosen not in ("cpu", there):
        raise InvalidConfigError(f"`device` must be cpu or {there}, which this machine trains on, got {chosen!r}")
    return chosen == "cpu"


# Sweeps


def add_seed_options(parser: Parser, default: int) -> None:
    parser.add_argument(
        "--seeds", type=whole_number, default=default, help="number of seeds: 0, 1, ... (default: %(default)s)"
    )


def seed_count(options: argparse.Namespace, least: int = 1, reason: str = "") -> int:
    if options.seeds < least:
        raise InvalidConfigError(f"`seeds` must be at least {least}{reason}, got {options.seeds}")
    return options.seeds


def add_engine_options(parser: Any) -> None:
    """Where the runs of a sweep are carried out. `engine_of` makes the engine."""
    group = parser.add_argument_group("where the runs are carried out (docs/sweeps.md)")
    group.add_argument(
        "--engine",
        default="local",
        choices=ENGINES,
        help="local: processes of this machine (default); submitit: its local executor; slurm: SLURM, through "
        "submitit; ray: a Ray cluster. The same command with another engine continues the sweep there",
    )
    group.add_argument("--jobs", type=whole_number, help="runs at a time (default: one per core or per GPU here)")
    group.add_argument(
        "--cpus-per-run", type=whole_number, help="cores of each run (default: as the sweep began, or 1)"
    )
    group.add_argument("--gpus-per-run", type=whole_number, help="GPUs of each run")
    group.add_argument("--partition", help="slurm: the partition")
    group.add_argument(
        "--time", help="slurm: the time limit of a job, as 4:00:00; a longer run goes on in the next one"
    )
    group.add_argument("--address", help="ray: the cluster, as HOST:PORT (default: RAY_ADDRESS, or this machine)")
    group.add_argument(
        "--engine-options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="slurm: options of sbatch, such as account=lab mem=16G; ray: resources, such as memory=8e9",
    )
    group.add_argument("--detach", action="store_true", help="slurm: submit and return; --status looks")
    if isinstance(parser, Parser):
        parser.hide(*(action for action in group._group_actions if action.dest not in ("engine", "jobs")))


def engine_of(options: argparse.Namespace) -> Engine:
    """The engine that the flags ask for."""
    from ..experiments import make_engine

    return make_engine(
        options.engine,
        jobs=options.jobs,
        cpus=options.cpus_per_run,
        gpus=options.gpus_per_run,
        partition=options.partition,
        time=options.time,
        address=options.address,
        options=_named_values(options.engine_options),
        detach=options.detach,
    )


def _named_values(words: list[str]) -> dict[str, str]:
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise InvalidConfigError(f"`engine_options` are written NAME=VALUE, got {word!r}")
    return dict(word.split("=", 1) for word in words)


def left_to_do(engine: Engine) -> int:
    """Say that not all runs are finished; the exit code."""
    if engine.detach:
        print("submitted. `scalelong compare --status` looks; the same command collects the results")
        return 0
    print("interrupted; the same command continues", file=sys.stderr)
    return INTERRUPTED


def without_out_flag(arguments: list[str]) -> list[str]:
    """The output folder is not part of a command that is written down: it names a place of this machine."""
    kept = [word for word in arguments if not word.startswith(("--out=", "--output-dir="))]
    names = [place for place, word in enumerate(kept) if word in ("--out", "--output-dir")]
    return [word for place, word in enumerate(kept) if place not in names and place - 1 not in names]


# Output


def add_out_option(parser: Parser, text: str) -> None:
    parser.add_argument("--out", "--output-dir", type=Path, help=text)


def add_output_options(parser: Parser, result: str) -> None:
    """--json and --quiet, spelled alike everywhere. With --json, nothing else goes to the standard output."""
    parser.add_argument("--json", action="store_true", help=f"print {result} as JSON, and nothing else")
    add_quiet_option(parser)


def add_quiet_option(parser: Parser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print the result alone, no progress")


@contextmanager
def progress_aside(quiet: bool) -> Iterator[None]:
    """What is printed on the way goes to the standard error, and nowhere with --quiet: the result has the output."""
    if not quiet:
        with redirect_stdout(sys.stderr):
            yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def speaker(options: argparse.Namespace) -> Callable[[str], None]:
    """Where remarks go: to the standard output, or nowhere with --json or --quiet."""
    return silent if options.json or options.quiet else print


def load_images(
    spec: str, limit: int = 4096, size: int | tuple[int, int] | None = None, channels: int | None = None
) -> Tensor:
    """Images of a data set, evenly chosen, in [-1, 1]."""
    from ..console import Progress
    from ..data import load_data, to_float

    data = load_data(spec, limit=limit, size=size, channels=channels, progress=Progress("reading images"))
    return to_float(data.fetch(range(len(data))).images)
