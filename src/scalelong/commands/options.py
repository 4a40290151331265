"""Flags that several commands share, each written once, and what becomes of them.

Nothing here imports torch before a command runs. The names of recipes, samplers and schedules, which `--help` lists,
are read from the source of the modules that define them.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..console import silent
from ..errors import InvalidConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from ..diffusion.solvers import SampleSettings
    from ..experiments.engines import Engine
    from ..runs.config import TrainConfig
    from ..runs.load import Run

Value = TypeVar("Value", int, float, str)

INTERRUPTED = 130
"""128 + SIGINT, as shells count. `scalelong.cli` turns it into 143 where SIGTERM was the reason."""

ROOT = Path(__file__).parents[1]


@cache
def names_in(module: str, table: str) -> list[str]:
    """The keys of a dictionary, or the values of a Literal, that a module of ours writes out.

    They are read from the source: importing ("runs.recipes", "RECIPES") would import torch.
    """
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == table for target in targets):
            continue
        match getattr(node, "value", None):
            case ast.Dict(keys=names) | ast.Subscript(value=ast.Name("Literal"), slice=ast.Tuple(elts=names)):
                return [str(name.value) for name in names if isinstance(name, ast.Constant)]
    raise LookupError(f"scalelong.{module} does not write out {table}")


@cache
def constant_in(module: str, name: str) -> Any:
    """A number, a text or a tuple of them that a module of ours writes out: a default for `--help`."""
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
            return ast.literal_eval(node.value)
    raise LookupError(f"scalelong.{module} does not write out {name}")


# Numbers that a machine can count to


def whole_number(text: str) -> int:
    """The type of counts and sizes; whether one makes sense is for the command to say."""
    return _bounded(text, 2**31 - 1)


def seed_number(text: str) -> int:
    return _bounded(text, 2**62)


def _bounded(text: str, most: int) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text[:60]!r}") from error
    if abs(number) > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, got {text[:60]!r}")
    return number


# Which run: a recipe, a file, other data


def add_run_options(parser: argparse.ArgumentParser, default: str | None = "digits-tiny") -> None:
    """--recipe, --config and --data."""
    shown = f" (default: {default})" if default else ""
    parser.add_argument(
        "--recipe", choices=names_in("runs.recipes", "RECIPES"), help=f"the recipe to begin with{shown}"
    )
    parser.add_argument("--config", type=Path, help="a YAML file with other values, such as a run's config.yaml")
    parser.add_argument("--data", help=f"{DATA} (default: the recipe's)")
    add_trust_option(parser)
    parser.set_defaults(default_recipe=default)


DATA = "images: a folder, a file or the name of a data set"


def run_config(options: argparse.Namespace) -> TrainConfig:
    """The recipe's configuration, then the file's values, then --data."""
    from ..runs.recipes import recipe

    config = recipe(options.default_recipe if options.recipe is None else options.recipe)
    config = config_file(options, config)
    if options.data is None:
        return config
    from ..training.sizing import fit_held_out

    return fit_held_out(replace(config, data=options.data), lambda text: print(text, file=sys.stderr))


def config_file(options: argparse.Namespace, base: TrainConfig) -> TrainConfig:
    """The values of --config over those of a recipe. Code that the file names needs --trust."""
    from ..runs.config import load_config
    from ..runs.model import require_trust, require_trusted_training

    if options.config is None:
        return base
    config = load_config(options.config, base)
    if config.model != getattr(options, "model", None):  # --model is the user's own word
        require_trust(config, options.config, options.trust)
    require_trusted_training(config, options.config, options.trust)
    return config


def step_or_best(text: str) -> int | str:
    return text if text == "best" else whole_number(text)


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the Python code that a run folder or --config names as its model (package.module:factory)",
    )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Which weights of a run: those of the newest checkpoint, averaged, unless something else is wanted."""
    parser.add_argument(
        "--weights",
        default="ema",
        metavar="ema|raw|ema:LENGTH",
        help="averaged weights (default), raw ones, or an average of another length such as ema:10%% (scalelong ema)",
    )
    parser.add_argument("--checkpoint", type=step_or_best, metavar="STEP|best", help="checkpoint (default: the newest)")
    parser.add_argument(
        "--tuned", type=Path, metavar="FILE", help="scale the long skips as this file of `scalelong tune` says"
    )
    add_trust_option(parser)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        choices=names_in("runs.shipped", "NETWORKS"),
        help="instead of RUN: a small trained network that comes with the package; its run folder is runs/NAME",
    )


def model_folder(name: str) -> Path:
    """The run folder of a network that comes with the package, made at its first use."""
    from ..runs.shipped import unpack

    return unpack(name, Path("runs") / name)


def trained_run(folder: Path, options: argparse.Namespace) -> Run:
    """The run with the weights and, where --tuned is given, the coefficients that the flags ask for."""
    from ..models import keep_freed_memory
    from ..runs.load import load_run
    from ..skips import TunedSkips

    scaling = None
    if options.tuned is not None:
        tuned = TunedSkips.load(options.tuned)
        scaling = tuned.spelled()
    keep_freed_memory()  # every command that runs a trained network calls it again and again
    return load_run(folder, weights=options.weights, step=options.checkpoint, trust=options.trust, scaling=scaling)


# Sampling and features


def add_sampling_options(parser: argparse.ArgumentParser, steps: int = 50) -> None:
    samplers = names_in("diffusion.solvers", "SAMPLERS")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the first image (default: %(default)s)")
    parser.add_argument("--sampler", default="dpm++", choices=samplers, help="default: %(default)s")
    parser.add_argument("--steps", type=whole_number, default=steps, help="steps of the sampler (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=1.0, help="classifier-free guidance (default: 1, none)")
    add_checkpoint_options(parser)
    parser.add_argument("--batch-size", type=whole_number, default=64, help="default: %(default)s")
    parser.add_argument("--device", default=None, help="default: an accelerator if there is one")


def sample_settings(options: argparse.Namespace) -> SampleSettings:
    from ..diffusion.solvers import SampleSettings

    return SampleSettings(sampler=options.sampler, steps=options.steps, guidance=options.guidance)


def add_feature_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--features",
        default="auto",
        help="auto: the first that tell noise from the data (default); random; classifier, trained on the data; "
        "efficientnet; pixels; inception; or package.module:factory",
    )
    parser.add_argument("--feature-weights", type=Path, help="the weights of Inception, from torch-fidelity")


# Seeds, jobs, lists of numbers


def add_seed_options(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--seeds", type=whole_number, default=default, help="number of seeds: 0, 1, ... (default: %(default)s)"
    )


def seed_count(options: argparse.Namespace, least: int = 1, reason: str = "") -> int:
    if options.seeds < least:
        raise InvalidConfigError(f"--seeds must be at least {least}{reason}, got {options.seeds}")
    return options.seeds


def add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=whole_number, help="runs at a time (default: one per core, or one on an accelerator)"
    )


def add_stack_option(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    usual = "by their size; 1: one by one" if default is None else str(default)
    parser.add_argument(
        "--stack",
        type=whole_number,
        metavar="N",
        default=default,
        help=f"train up to N networks of one shape at once in each process (default: {usual})",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Where the runs of a sweep are carried out. `engine_of` makes the engine."""
    group = parser.add_argument_group("where the runs are carried out (docs/sweeps.md)")
    group.add_argument(
        "--engine",
        default="local",
        choices=names_in("experiments.sweeps", "ENGINES"),
        help="local: processes of this machine (default); submitit: its local executor; slurm: SLURM, through "
        "submitit; ray: a Ray cluster. The same command with another engine continues the sweep there",
    )
    group.add_argument(
        "--jobs",
        type=whole_number,
        help="runs at a time (default: one per core or per GPU here; as many as the cluster gives elsewhere)",
    )
    group.add_argument(
        "--cpus-per-run", type=whole_number, help="cores, and threads, of each run (default: as the sweep began, or 1)"
    )
    group.add_argument(
        "--gpus-per-run", type=whole_number, help="GPUs of each run; with several, torchrun starts a process for each"
    )
    group.add_argument(
        "--runs-per-job", type=whole_number, help="runs that one job does in turn, where they are short (default: 1)"
    )
    group.add_argument("--partition", help="slurm: the partition")
    group.add_argument(
        "--time", help="slurm: the time limit of a job, as 4:00:00; a longer run goes on in the next one"
    )
    group.add_argument(
        "--address", help="ray: the cluster, as HOST:PORT (default: RAY_ADDRESS, or one on this machine)"
    )
    group.add_argument(
        "--engine-options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="slurm: options of sbatch, such as account=lab mem=16G; ray: resources, such as memory=8e9",
    )
    group.add_argument("--detach", action="store_true", help="slurm: submit and return; `scalelong progress` looks")
    group.add_argument(
        "--print-commands",
        action="store_true",
        help="carry out nothing: print a shell line for each job, for any engine",
    )
    group.add_argument(
        "--step-time", help="for the estimate of the cost: seconds of a training step, or measure to time one here"
    )


def engine_of(options: argparse.Namespace) -> Engine:
    """The engine that the flags ask for."""
    from ..experiments.engines import PrintedCommands
    from ..experiments.sweeps import make_engine

    if options.runs_per_job is not None and options.runs_per_job < 1:
        raise InvalidConfigError(f"--runs-per-job must be at least 1, got {options.runs_per_job}")
    share: dict[str, Any] = {"jobs": options.jobs, "cpus": options.cpus_per_run, "gpus": options.gpus_per_run}
    engine = make_engine(
        options.engine,
        **share,
        partition=options.partition,
        time=options.time,
        address=options.address,
        options=_named_values(options.engine_options),
        detach=options.detach,
    )
    return PrintedCommands(**share) if options.print_commands else engine


def _named_values(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise InvalidConfigError(f"--engine-options are written NAME=VALUE, got {word!r}")
        found[name] = value
    return found


def left_to_do(engine: Engine, out: Path, arguments: list[str]) -> int:
    """What there is to say when not all runs are finished, and the exit code."""
    import shlex

    from ..experiments.engines import PrintedCommands

    if isinstance(engine, PrintedCommands):
        print("\n".join(engine.lines))
        same = shlex.join(word for word in arguments if word != "--print-commands")
        print(
            f"{len(engine.lines)} jobs: each line is one, in any order and on any machine that sees this folder and "
            f"{out}. A line that was killed is given again. `scalelong progress {shlex.quote(str(out))}` looks; the "
            f"results are collected by: scalelong {same}",
            file=sys.stderr,
        )
        return 0
    if engine.detach:
        print(f"submitted. To look: scalelong progress {shlex.quote(str(out))}; the same command collects the results")
        return 0
    print("interrupted; the same command continues", file=sys.stderr)
    return INTERRUPTED


def listed(text: str, kind: Callable[[str], Value], name: str) -> list[Value]:
    """The values of a flag such as --rates 1e-3,2e-3."""
    try:
        found = [kind(part) for part in split(text)]
        if not found and kind is not str:
            raise ValueError
        return found
    except ValueError as error:
        raise InvalidConfigError(f"{name} must be numbers with commas between them, got {text!r}") from error


def split(text: str) -> list[str]:
    """At commas, but not at those between the options of one method, as in "none,cs:kappa=0.5,reverse=true,ls"."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found: list[str] = []
    for part in filter(None, map(str.strip, parts)):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


# Output


def add_output_options(parser: argparse.ArgumentParser, result: str) -> None:
    """--json and --quiet, spelled alike everywhere. With --json, nothing else goes to the standard output."""
    parser.add_argument("--json", action="store_true", help=f"print {result} as JSON, and nothing else")
    add_quiet_option(parser)


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
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
