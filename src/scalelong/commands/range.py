"""scalelong range: the range of learning rates in which a network trains, with and without each fix."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidConfigError
from .compare import without_out_flag
from .options import (
    add_engine_options,
    add_output_options,
    add_seed_options,
    add_stack_option,
    add_trust_option,
    config_file,
    constant_in,
    engine_of,
    left_to_do,
    listed,
    names_in,
    progress_aside,
    whole_number,
)

if TYPE_CHECKING:
    from ..runs.config import TrainConfig

RATES = "1e-3,2e-3,4e-3,8e-3,16e-3"


def run(options: argparse.Namespace) -> int:
    from ..errors import UnfinishedError
    from ..experiments.cost import parse_step_time, range_cost
    from ..experiments.engines import ThisMachine
    from ..experiments.progress import finished_rates
    from ..experiments.rates import config_range
    from ..files import make_folder, write_text

    config = configuration(options)
    methods = [*listed(options.methods, str, "--methods"), *options.variants]
    rates = listed(options.rates, float, "--rates")
    if not methods:
        raise InvalidConfigError("--methods must name at least one method, for example none,cs")
    if options.seeds < 1 or options.first_seed < 0:
        raise InvalidConfigError(f"--seeds must be at least 1 and --first-seed at least 0, got {options.seeds}")
    name = options.recipe or Path(config.data).name or "custom"
    out = options.out or Path("runs") / f"range-{name}"
    engine, step_time = engine_of(options), parse_step_time(options.step_time)
    engine.check()
    make_folder(out)
    # Processes that are forked share the data and start at once, but cannot have a GPU each.
    forked = engine.name == "local" and isinstance(engine, ThisMachine) and len(engine.devices) < 2
    done = len(finished_rates(out))
    with progress_aside(options.quiet):
        waiting = max(0, len(rates) * len(methods) * options.seeds - done)
        if waiting:
            print(range_cost(config, waiting, options.steps, engine, step_time), flush=True)
        try:
            found = config_range(
                config,
                rates=rates,
                methods=methods,
                seeds=range(options.first_seed, options.first_seed + options.seeds),
                steps=options.steps,
                warmup=options.warmup,
                jobs=options.jobs,
                stack=options.stack,
                out=out,
                title=f"{name}: {config.model}{_options(config)}, {options.steps} steps at constant rates",
                engine=None if forked else engine,
                runs_per_job=options.runs_per_job,
            )
        except UnfinishedError:
            found = None
    if found is None:
        return left_to_do(engine, out, ["range", *options.arguments])
    write_text(out / "command.txt", f"scalelong range {shlex.join(without_out_flag(options.arguments))}\n")
    if options.json:
        print(found.to_json())
        return 0
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
    add_trust_option(made)
    made.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="other fields of the configuration, for example model_options.depth=24 batch_size=8",
    )
    methods = constant_in("stability.range", "METHODS")
    made.add_argument("--rates", default=RATES, help="comma-separated (default: %(default)s)")
    made.add_argument("--methods", default=",".join(methods), help="the first is the baseline (default: %(default)s)")
    made.add_argument(
        "--variants",
        nargs="*",
        default=[],
        metavar="'NAME: FIELD=VALUE ...'",
        help="besides methods: networks with other options, for example 'unit gain: model_options.init_std=unit'",
    )
    add_seed_options(made, 8)
    made.add_argument("--first-seed", type=whole_number, default=0, help="the first of them (default: %(default)s)")
    made.add_argument(
        "--steps", type=whole_number, default=300, help="training steps of each run (default: %(default)s)"
    )
    made.add_argument("--warmup", type=whole_number, help="steps of linear warm-up (default: a sixth of the steps)")
    made.add_argument("--out", type=Path, help="folder of the results (default: runs/range-NAME)")
    add_stack_option(made)
    add_engine_options(made)
    add_output_options(made, "the range")
    return made


def configuration(options: argparse.Namespace) -> "TrainConfig":
    from ..experiments.runs import as_variant
    from ..runs.config import TrainConfig
    from ..runs.recipes import recipe

    if options.data is None and options.recipe is None and options.config is None:
        base = recipe("digits-tiny")
    else:
        base = recipe(options.recipe) if options.recipe else TrainConfig()
    config = config_file(options, base)
    if options.data is not None:
        config = as_variant(f"given: data={options.data}").apply(config)
    return as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config


def _options(config: "TrainConfig") -> str:
    shown = [f"{name} {config.model_options[name]}" for name in ("depth", "dim") if name in config.model_options]
    return f" of {', '.join(shown)}" if shown else ""
