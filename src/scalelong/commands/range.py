"""scalelong range: the range of learning rates in which a network trains, with and without each fix."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidConfigError
from .compare import without_out_flag
from .options import constant_in, listed, names_in

if TYPE_CHECKING:
    from ..runs.config import TrainConfig

RATES = "1e-3,2e-3,4e-3,8e-3,16e-3"


def run(options: argparse.Namespace) -> int:
    from ..experiments.rates import config_range
    from ..files import write_text

    config = configuration(options)
    methods = [*listed(options.methods, str, "--methods"), *options.variants]
    rates = listed(options.rates, float, "--rates")
    if options.seeds < 1 or options.first_seed < 0:
        raise InvalidConfigError(f"--seeds must be at least 1 and --first-seed at least 0, got {options.seeds}")
    name = options.recipe or Path(config.data).name or "custom"
    out = options.out or Path("runs") / f"range-{name}"
    out.mkdir(parents=True, exist_ok=True)
    found = config_range(
        config,
        rates=rates,
        methods=methods,
        seeds=range(options.first_seed, options.first_seed + options.seeds),
        steps=options.steps,
        warmup=options.warmup,
        jobs=options.jobs,
        out=out,
        title=f"{name}: {config.model}{_options(config)}, {options.steps} steps at constant rates",
    )
    write_text(out / "command.txt", f"scalelong range {shlex.join(without_out_flag(options.arguments))}\n")
    print(f"\n{found}\n")
    print(f"picture, table and runs: {out}; for a report: scalelong report {out}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong range",
        description="Train the network of a recipe, or one for a folder of images, at several constant learning rates, "
        "with and without each fix, and count the runs that survive. Runs that are finished are not repeated: the same "
        "command continues an interrupted range, and more rates, methods or seeds add to it.",
    )
    made.add_argument("data", nargs="?", help="a folder of images, a file or the name of a data set")
    made.add_argument(
        "--recipe", choices=names_in("runs.recipes", "RECIPES"), help="the setting (default: digits-tiny)"
    )
    made.add_argument("--config", type=Path, help="a YAML file with other values, such as a run's config.yaml")
    made.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="other fields of the configuration, for example model_options.depth=24 batch_size=8",
    )
    made.add_argument("--rates", default=RATES, help="comma-separated (default: %(default)s)")
    made.add_argument(
        "--methods",
        default=",".join(constant_in("stability.range", "METHODS")),
        help="the first is the baseline (default: %(default)s)",
    )
    made.add_argument(
        "--variants",
        nargs="*",
        default=[],
        metavar="'NAME: FIELD=VALUE ...'",
        help="besides methods: networks with other options, for example 'unit gain: model_options.init_std=unit'",
    )
    made.add_argument("--seeds", type=int, default=8, help="number of seeds (default: %(default)s)")
    made.add_argument("--first-seed", type=int, default=0, help="the first of them (default: %(default)s)")
    made.add_argument("--steps", type=int, default=300, help="training steps of each run (default: %(default)s)")
    made.add_argument("--warmup", type=int, help="steps of linear warm-up (default: a sixth of the steps)")
    made.add_argument("--jobs", type=int, help="runs at a time (default: one per core, or one on an accelerator)")
    made.add_argument("--out", type=Path, help="folder of the results (default: runs/range-NAME)")
    return made


def configuration(options: argparse.Namespace) -> "TrainConfig":
    from ..experiments.runs import as_variant
    from ..runs.config import TrainConfig, load_config
    from ..runs.recipes import recipe

    if options.data is None and options.recipe is None and options.config is None:
        base = recipe("digits-tiny")
    else:
        base = recipe(options.recipe) if options.recipe else TrainConfig()
    config = load_config(options.config, base) if options.config else base
    if options.data is not None:
        config = as_variant(f"given: data={options.data}").apply(config)
    return as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config


def _options(config: "TrainConfig") -> str:
    shown = [f"{name} {config.model_options[name]}" for name in ("depth", "dim") if name in config.model_options]
    return f" of {', '.join(shown)}" if shown else ""
