"""Train a network at several constant learning rates, with and without each fix, and count the runs that survive.

On a folder of images it is the network that `scalelong train` would train there. Finished runs are not repeated: the
same command continues an interrupted range, and more rates, methods or seeds add to it.
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from ..config import TrainConfig, dump_config, load_config, recipe
from ..errors import InvalidConfigError
from .options import (
    add_device_option,
    add_engine_options,
    add_out_option,
    add_output_options,
    add_run_options,
    add_seed_options,
    config_file,
    engine_of,
    left_to_do,
    progress_aside,
    sized_config,
    without_out_flag,
)
from .parser import Parser, numbers, split, whole_number

RATES, METHODS = "1e-3,2e-3,4e-3,8e-3,16e-3", "none,start:cs:0.7,cs:0.7,ls"
NETWORK = "network.yaml"

EXAMPLES = """\
  scalelong range photos/ --rates 1e-3,4e-3 --seeds 2 --steps 100
  scalelong range --recipe digits-tiny --methods none,cs:0.7
  scalelong range garments --set model_options.depth=24 batch_size=8
"""


def parser() -> Parser:
    made = Parser("range", __doc__ or "", EXAMPLES, "[IMAGES] [OPTIONS]")
    made.add_argument(
        "images", nargs="?", metavar="IMAGES", help="a folder of images, a file or the name of a data set"
    )
    add_run_options(made)
    made.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="other fields of the configuration, for example model_options.depth=24 batch_size=8",
    )
    made.add_argument("--rates", default=RATES, help="comma-separated (default: %(default)s)")
    made.add_argument("--methods", default=METHODS, help="the first is the baseline (default: %(default)s)")
    made.add_argument(
        "--variants",
        nargs="*",
        default=[],
        metavar="'NAME: FIELD=VALUE ...'",
        help="besides methods: networks with other options, for example 'unit gain: model_options.init_std=unit'",
    )
    add_seed_options(made, 8)
    made.add_argument("--first-seed", type=whole_number, default=0, help="the first of them (default: %(default)s)")
    made.add_argument("--steps", "--max-train-steps", type=whole_number, default=300, help="of each run (default: 300)")
    made.add_argument("--warmup", "--lr-warmup-steps", type=whole_number, help="steps (default: a sixth of the steps)")
    add_out_option(made, "folder of the results (default: runs/range-NAME)")
    add_device_option(made)
    add_engine_options(made)
    add_output_options(made, "the range")
    return made


def run(options: argparse.Namespace) -> int:
    from ..errors import UnfinishedError
    from ..experiments import LocalEngine, config_range
    from ..files import make_folder, write_text

    methods = [*split(options.methods), *options.variants]
    rates = numbers(options.rates, float, "`rates`")
    if not methods:
        raise InvalidConfigError("`methods` must name at least one method, for example none,cs")
    if options.seeds < 1 or options.first_seed < 0:
        raise InvalidConfigError(f"`seeds` must be at least 1 and `first_seed` at least 0, got {options.seeds}")
    data = options.images or options.data
    out = options.out or Path("runs") / f"range-{options.recipe or (Path(data).name if data else 'digits-tiny')}"
    make_folder(out)
    config = configuration(options, out)
    engine = engine_of(options)
    engine.check()
    # Processes that are forked share the data and start at once, but cannot have a GPU each.
    forked = isinstance(engine, LocalEngine) and len(engine.devices) < 2
    shown = ", ".join(f"{name} {value}" for name, value in config.model_options.items() if name in ("depth", "dim"))
    title = f"{config.data}: {config.model}{f' of {shown}' if shown else ''}, {options.steps} steps at constant rates"
    with progress_aside(options.quiet):
        print(title, flush=True)
        try:
            found = config_range(
                config,
                rates=rates,
                methods=methods,
                seeds=range(options.first_seed, options.first_seed + options.seeds),
                steps=options.steps,
                warmup=options.warmup,
                jobs=options.jobs,
                out=out,
                title=title,
                engine=None if forked else engine,
            )
        except UnfinishedError:
            return left_to_do(engine)
    write_text(out / "command.txt", f"scalelong range {shlex.join(without_out_flag(options.arguments))}\n")
    if options.json:
        print(found.to_json())
        return 0
    print(f"\n{found}\n")
    print(f"picture, table and runs: {out}; for a report: scalelong report {out}")
    return 0


def configuration(options: argparse.Namespace, out: Path) -> TrainConfig:
    """A recipe or a file, or the network that `scalelong train` would take for the images; then --set.

    A network that was chosen by timing is written down, so that the same command finds the same one.
    """
    from ..experiments import as_variant
    from ..files import write_text

    data = options.images or options.data
    if options.recipe or options.config or data is None:
        config = config_file(options, recipe(options.recipe or "digits-tiny"))
        config = replace(config, data=data) if data else config
    elif (out / NETWORK).exists():
        config = replace(load_config(out / NETWORK), data=data)
    else:
        config = sized_config(options, data)
        write_text(out / NETWORK, dump_config(config))
    return as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config
