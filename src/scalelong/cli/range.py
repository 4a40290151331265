"""Train a network at several constant learning rates, with and without each cure, and count the runs that survive.

On a folder of images it is the network that `scalelong train` would train there. Finished runs are not repeated: the
same command continues an interrupted range, and more rates, methods or seeds add to it.
"""

import argparse
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import TrainConfig, dump_config, load_config, recipe
from ..console import silent
from ..errors import InvalidConfigError
from . import shared
from .parser import Parser, numbers, split

RATES, METHODS = "1e-3,2e-3,4e-3,8e-3,16e-3", "none,start:cs:0.7,cs:0.7,ls"
NETWORK = "network.yaml"

EXAMPLES = """\
  scalelong range photos/ --rates 1e-3,4e-3 --seeds 2 --steps 100
  scalelong range --recipe digits-tiny --methods none,cs:0.7
  scalelong range garments --set model_options.depth=24 batch_size=8
"""


def range_parser() -> Parser:
    made = Parser("range", __doc__ or "", EXAMPLES, "[IMAGES] [OPTIONS]")
    made.flag("images", "a folder of images, a file or the name of a data set", nargs="?", metavar="IMAGES")
    shared.add_run_flags(made)
    text = "other fields of the configuration, for example model_options.depth=24 batch_size=8"
    made.flag("--set", text, [], kind=str, nargs="+", metavar="FIELD=VALUE")
    made.flag("--rates", "comma-separated", RATES)
    made.flag("--methods", "the first is the baseline", METHODS)
    text = "besides methods: networks with other options, for example 'unit gain: model_options.init_std=unit'"
    made.flag("--variants", text, [], kind=str, nargs="*", metavar="'NAME: FIELD=VALUE ...'")
    made.flag("--seeds", "runs of each method at each rate", 8)
    made.flag("--first-seed", "the first of them", 0)
    made.flag("--steps --max-train-steps", "of each run", 300)
    made.flag("--warmup --lr-warmup-steps", "steps (default: a sixth of the steps)", kind=int)
    shared.add_out_flag(made, "folder of the results (default: runs/range-NAME)")
    shared.add_device_flag(made)
    shared.add_engine_flags(made)
    shared.add_output_flags(made, "the range")
    return made


def run_range(options: argparse.Namespace) -> int:
    from ..errors import UnfinishedError
    from ..experiments import LocalEngine, config_range
    from ..files import make_folder, write_text

    methods = [*split(options.methods), *options.variants]
    rates = numbers(options.rates, float, "`rates`")
    if not methods:
        raise InvalidConfigError("`methods` must name at least one method, for example none,cs")
    shared.require_seeds(options.seeds)
    shared.require_seeds(options.first_seed + 1)
    data = options.images or options.data
    out = options.out or Path("runs") / f"range-{options.recipe or (Path(data).name if data else 'digits-tiny')}"
    make_folder(out)
    config = configuration(options, out)
    engine = shared.engine_of(options)
    engine.check()
    # Processes that are forked share the data and start at once, but cannot have a GPU each.
    forked = isinstance(engine, LocalEngine) and len(engine.devices) < 2
    title = f"{shared.network_line(config)}; {options.steps} steps at constant rates"
    with shared.progress_aside(options.quiet):
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
            return shared.left_to_do(engine)
    write_text(out / "command.txt", f"scalelong range {shlex.join(shared.without_out_flag(options.arguments))}\n")
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
        config = shared.config_file(options, recipe(options.recipe or "digits-tiny"))
        config = replace(config, data=data) if data else config
    elif (out / NETWORK).exists():
        config = replace(load_config(out / NETWORK), data=data)
    else:
        config = shared.sized_config(data)
        write_text(out / NETWORK, dump_config(config))
    return as_variant(f"given: {' '.join(options.set)}").apply(config) if options.set else config


# scalelong demo

DEMO = """\
Train a deep U-ViT on photographs of garments at a learning rate where it breaks, and count the survivors.

The same network is trained without scaling, with constant scaling (CS) of its long skips as a start, and with a
unit-gain start, in under three minutes on two cores. The same command continues an interrupted demo."""


def demo_parser() -> Parser:
    made = Parser("demo", DEMO, "  scalelong demo\n  scalelong demo --depth 8      where nothing differs\n")
    shared.add_out_flag(made, "folder of the results", Path("demo-output"))
    made.flag("--seed", "base seed; n takes the seeds 100 n, 100 n + 1, ...", 0)
    made.flag("--seeds", "runs of each method (default: 8)", kind=int)
    made.flag("--steps", "steps of each run (default: 130)", kind=int)
    made.flag("--depth", "blocks of the U-ViT (default: 24)", kind=int)
    made.flag("--rates", "learning rates, with commas (default: 1.6e-2)")
    made.flag("--jobs", "runs at a time (default: one per core)", kind=int)
    shared.add_quiet_flag(made)
    return made


def run_demo(options: argparse.Namespace) -> int:
    from ..experiments import demo
    from ..files import require_folder_place
    from ..report import write_report
    from ..stability import rate_text

    require_folder_place(options.out)
    began = time.monotonic()
    settings: dict[str, Any] = {"seeds": options.seeds or demo.SEEDS, "steps": options.steps or demo.STEPS}
    settings |= {"depth": options.depth or demo.DEPTH, "seed": options.seed, "jobs": options.jobs}
    rates = numbers(options.rates, float, "`rates`") if options.rates else [demo.RATE]
    names = [method.partition(": ")[0] for method in demo.METHODS]
    say = silent if options.quiet else print
    say(
        f"The same U-ViT of depth {settings['depth']}, trained at a rate of {', '.join(map(rate_text, rates))} "
        f"for {settings['steps']} steps: {settings['seeds']} seeds each of {', '.join(names)}. Runs that collapse are "
        f"ended."
    )
    with shared.progress_aside(options.quiet):
        found = demo.run_demo(options.out, rates=rates, **settings)
    report = write_report([options.out], options.out / "report.html")
    print(f"\n{found}\n")
    print(f"runs as marks and curves: {options.out / 'range.png'}; noisy images, cleaned: {options.out / 'samples'}")
    print("how this was chosen, and where nothing differs: docs/range.md, and scalelong demo --depth 8")
    print(f"done in {time.monotonic() - began:.0f} s; open the report: {report.resolve()}")
    return 0
