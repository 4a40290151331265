"""Train a network at several constant learning rates, with and without each cure, and count the runs that survive.

On a folder of images it is the network that `scalelong train` would train there. A first verdict, on one rate and few
seeds, comes within about a minute; what takes more than ten is asked for first. Finished runs are not repeated: the
same command continues an interrupted range, and more rates, methods or seeds add to it.
"""

import argparse
import os
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import TrainConfig, dump_config, load_config, recipe
from ..console import is_terminal, listed, silent
from ..errors import InvalidConfigError, ScaleLongError
from . import shared
from .parser import Parser, numbers, split

NETWORK = "network.yaml"
TIMES = (1, 2, 4, 8, 16)
"""The rates that are tried: so many times that of the configuration."""
FIRST_SEEDS, FIRST_SECONDS, MOST_UNASKED = 4, 60.0, 600.0
SMALL = 1000
"""Steps of all runs together that need no first verdict and no estimate."""

EXAMPLES = """\
  scalelong range photos/                               a first verdict, then all rates and seeds
  scalelong range photos/ --rates 1e-3,4e-3 --seeds 2
  scalelong range --recipe digits-tiny --methods none,cs:0.7
  scalelong range garments --set model_options.depth=24 batch_size=8
"""


def range_parser() -> Parser:
    made = Parser("range", __doc__ or "", EXAMPLES, "[IMAGES] [OPTIONS]")
    made.flag("images", "a folder of images, a file or the name of a data set", nargs="?", metavar="IMAGES")
    shared.add_run_flags(made)
    text = "other fields of the configuration, for example model_options.depth=24 batch_size=8"
    made.flag("--set", text, [], kind=str, nargs="+", metavar="FIELD=VALUE")
    made.flag("--rates", "comma-separated (default: 1, 2, 4, 8 and 16 times the rate of training)")
    text = "comma-separated; the first is the baseline (default: none and the cures, see docs/range.md)"
    made.flag("--methods", text)
    text = "besides methods: networks with other options, for example 'unit gain: model_options.init_std=unit'"
    made.flag("--variants", text, [], kind=str, nargs="*", metavar="'NAME: FIELD=VALUE ...'")
    made.flag("--seeds", "runs of each method at each rate", 8)
    made.flag("--first-seed", "the first of them", 0)
    made.flag("--steps --max-train-steps", "of each run", 100)
    made.flag("--warmup --lr-warmup-steps", "steps (default: a sixth of the steps)", kind=int)
    made.flag("--yes", "do not ask before what takes more than ten minutes", False)
    shared.add_out_flag(made, "folder of the results (default: runs/range-NAME)")
    shared.add_device_flag(made)
    shared.add_engine_flags(made)
    shared.add_output_flags(made, "the range")
    return made


def run_range(options: argparse.Namespace) -> int:
    from ..errors import UnfinishedError
    from ..experiments import LocalEngine, config_range
    from ..files import make_folder, write_text

    methods = None if options.methods is None else split(options.methods)
    rates = None if options.rates is None else numbers(options.rates, float, "`rates`")
    if methods == [] and not options.variants:
        raise InvalidConfigError("`methods` must name at least one method, for example none,cs")
    if options.seeds < 1 or options.first_seed < 0:
        raise InvalidConfigError(f"`seeds` must be at least 1 and `first_seed` at least 0, got {options.seeds}")
    data = options.images or options.data
    out = options.out or Path("runs") / f"range-{options.recipe or (Path(data).name if data else 'digits-tiny')}"
    make_folder(out)
    config = configuration(options, out)
    engine = shared.engine_of(options)
    engine.check()
    rates = rates or [round(config.optimizer.lr * times, 10) for times in TIMES]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    title = f"{shared.network_line(config)}; {options.steps} steps at constant rates"
    run: Any = partial(config_range, config, steps=options.steps, warmup=options.warmup, out=out, title=title)
    # Processes that are forked share the data and start at once, but cannot have a GPU each.
    forked = isinstance(engine, LocalEngine) and len(engine.devices) < 2
    with shared.progress_aside(options.quiet):
        print(title, flush=True)
        methods = [*(methods_for(config) if methods is None else methods), *options.variants]
        try:
            if forked and len(rates) * len(methods) * len(seeds) * options.steps > SMALL:
                first_verdict(partial(run, jobs=options.jobs), config, options, rates, methods, seeds)
            engine_given = None if forked else engine
            found = run(rates=rates, methods=methods, seeds=seeds, jobs=options.jobs, engine=engine_given)
        except UnfinishedError:
            return shared.left_to_do(engine)
    write_text(out / "command.txt", f"scalelong range {shlex.join(shared.without_out_flag(options.arguments))}\n")
    if options.json:
        print(found.to_json())
        return 0
    print(f"\n{found}\n")
    print(f"picture, table and runs: {out}; for a report: scalelong report {out}")
    return 0


def methods_for(config: TrainConfig) -> list[str]:
    """The usual methods that this network takes; those that it refuses are named."""
    from ..attaching import scale_skips_, start_skips_
    from ..experiments import RecipeTask
    from ..runs import example_forward
    from ..stability import METHODS

    task, found = RecipeTask(config), []
    for method in METHODS:
        model = task.build(0)
        change = start_skips_ if method.startswith("start:") else scale_skips_
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the range says them again
                if method != "none":
                    change(model, method.removeprefix("start:"), example_forward(model, config, task.shape))
            found.append(method)
        except ScaleLongError as error:
            print(f"without {method}, which this network refuses ({type(error).__name__})")
    return found


def first_verdict(
    run: Any,
    config: TrainConfig,
    options: argparse.Namespace,
    rates: Sequence[float],
    methods: Sequence[str],
    seeds: Sequence[int],
) -> None:
    """Say what one rate and few seeds show, and what the rest costs; ask before it takes long."""
    from ..console import duration
    from ..stability import rate_text

    seconds = options.steps * seconds_of_a_step(config, options.jobs)
    rate, tried = rates[len(rates) // 2], methods[:2]
    few = seeds[: max(1, min(FIRST_SEEDS, int(FIRST_SECONDS / (len(tried) * seconds))))]
    runs = len(rates) * len(methods) * len(seeds)
    rest = (runs - len(few) * len(tried)) * seconds
    print(
        f"first at {rate_text(rate)}, {listed(tried)} with {_seeds(len(few))}: about "
        f"{duration(len(few) * len(tried) * seconds)}; then the rest of {runs} runs: about {duration(rest)}",
        flush=True,
    )
    found = run(rates=[rate], methods=tried, seeds=few)
    counts = [(method, *found.survivors(method.partition(": ")[0], rate)) for method in tried]
    others = "".join(f"; with {method} {survived} of {count}" for method, survived, count in counts[1:])
    print(f"at {rate_text(rate)} {counts[0][1]} of {counts[0][2]} survive {options.steps} steps{others}", flush=True)
    if rest <= MOST_UNASKED or options.yes:
        return
    if is_terminal(sys.stdin) and input(f"the rest takes about {duration(rest)}. Go on? [y/N] ").lower()[:1] == "y":
        return
    raise InvalidConfigError(
        f"the rest takes about {duration(rest)} on this machine: give --yes, or fewer `rates`, `methods` or `seeds`. "
        f"What was trained is kept, and the same command continues"
    )


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def seconds_of_a_step(config: TrainConfig, jobs: int | None) -> float:
    """Seconds between two steps when runs share the cores: each has one, and they are timed together."""
    import torch

    from ..runs import make_accelerator
    from ..training import glance, step_seconds

    pictures, threads = glance(config), torch.get_num_threads()
    together = step_seconds(config, pictures.shape(config), make_accelerator(config, "."))
    return together * threads / min(jobs or os.cpu_count() or 1, os.cpu_count() or 1)


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

The same network is trained without a cure, with small long skips (CS), which is lost later, and with a norm in its
merges (merge_norm), which lasts: in at most four minutes on two cores. The same command continues an interrupted
demo."""


def demo_parser() -> Parser:
    made = Parser("demo", DEMO, "  scalelong demo\n  scalelong demo --seed 3       other seeds\n")
    shared.add_out_flag(made, "folder of the results", Path("demo-output"))
    made.flag("--seed", "base seed; n takes the seeds 100 n, 100 n + 1, ...", 0)
    made.flag("--seeds", "runs of each method (default: 4)", kind=int)
    made.flag("--steps", "steps of each run (default: 400)", kind=int)
    made.flag("--depth", "blocks of the U-ViT (default: 24)", kind=int)
    made.flag("--rates", "learning rates, with commas (default: 2.4e-2)")
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
    print(f"collapsed against alive, in one picture: {options.out / 'demo.png'}")
    print("how this was chosen: docs/range.md")
    print(f"done in {time.monotonic() - began:.0f} s; open the report: {report.resolve()}")
    return 0
