"""Train a network at several constant learning rates, with and without each cure, and count the runs that survive.

On a folder of images it is the network that `scalelong train` would train there. Rates that are not given are found:
the highest that the network survives, and two and four times that. A first verdict, on one rate and few seeds, comes
within about a minute; what takes more than ten is asked for first. Finished runs are not repeated: the same command
continues an interrupted range, and more rates, methods or seeds add to it.
"""

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config import TrainConfig, dump_config, field_paths, load_config, recipe, with_values
from ..console import counted, duration, is_terminal
from ..errors import InvalidConfigError
from . import shared
from .parser import Parser, floats, split

logger = logging.getLogger(__name__)

NETWORK = "network.yaml"
SEARCH = 5
"""Runs that it takes to find rates, more or less."""
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
    shared.add_set_flag(made)
    made.flag("--rates", "comma-separated (default: three around the highest that the network survives)", kind=floats)
    made.flag("--methods", "comma-separated; the first is the baseline (default: none and the cures)", kind=split)
    shared.add_variants_flag(made)
    made.flag("--seeds", "runs of each method at each rate", 8)
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
    from ..experiments import config_range
    from ..files import results_folder, write_text
    from ..stability import METHODS

    began = time.monotonic()
    shared.require_seeds(options.seeds)
    data = options.images or options.data
    out = options.out or Path("runs") / f"range-{options.recipe or (Path(data).name if data else 'digits-tiny')}"
    results_folder(out)
    config = range_config(options, out)
    engine = shared.engine_of(options)
    engine.check()
    if (engine.gpus or 0) > 1:
        raise InvalidConfigError("a run of a range uses one GPU: leave out `gpus`, or give 1")
    title = f"{shared.network_line(config)}; {options.steps} steps at constant rates"
    logger.info(title)
    device = None if options.device is None else shared.device_of(options.device)
    run: Any = partial(
        config_range,
        config,
        steps=options.steps,
        warmup=options.warmup,
        out=out,
        title=title,
        jobs=options.jobs,
        device=device,
    )
    methods = [*(options.methods or ()), *options.variants] or None
    rates, seeds = options.rates, range(options.seeds)
    # Processes that are forked share the data and start at once, but cannot have a GPU each.
    forked = engine.name == "local" and len(engine.devices) < 2
    runs = len(rates or range(3)) * len(methods or METHODS) * len(seeds)
    try:
        if forked and runs * options.steps > SMALL:
            seconds = options.steps * seconds_of_a_step(config, options)
            rates = rates or find_rates(run, methods or METHODS, seconds, config.optimizer.lr, options.yes)
            at_first = partial(run, rates=[rates[len(rates) // 2]], methods=methods)
            left = FIRST_SECONDS - (time.monotonic() - began)
            methods = first_verdict(at_first, seconds, left, options, seeds, runs)
        found = run(rates=rates, methods=methods, seeds=seeds, engine=None if forked else engine)
    except UnfinishedError:
        return shared.left_to_do()
    write_text(out / "command.txt", f"scalelong range {shlex.join(options.arguments)}\n")
    if options.json:
        print(found.to_json())
        return 0
    print(f"\n{found}\n")
    print(f"picture, table and runs: {out}; for a report: scalelong report {out}")
    return 0


def find_rates(run: Any, methods: Sequence[str], seconds: float, usual: float, yes: bool) -> Sequence[float]:
    """Three rates around the highest that the baseline survives, by one seed."""
    from ..stability import rate_text

    ask(SEARCH * seconds, f"a run takes about {duration(seconds)}; to find the rates", yes)
    found = run(rates=None, methods=methods[:1], seeds=range(1))
    alive = [rate for rate in found.rates if found.survivors(found.methods[0], rate)[0]]
    seen = f"survives {rate_text(alive[-1])}" if alive else f"survives less than {rate_text(found.rates[0])}"
    logger.info(f"with one seed it {seen}; `scalelong train` would use {rate_text(usual)}")
    return found.rates


def first_verdict(
    run: Any, seconds: float, left: float, options: argparse.Namespace, seeds: Sequence[int], runs: int
) -> Sequence[str]:
    """Say what one rate and few seeds show, and what the rest costs; ask before it takes long. The methods.

    `left` are the seconds of the first minute that are not over. There is always one seed.
    """
    from ..stability import METHODS, rate_text

    (rate,), methods = run.keywords["rates"], run.keywords["methods"] or METHODS
    few = seeds[: max(1, min(FIRST_SEEDS, round(left / (len(methods) * seconds))))]
    many = counted(len(few), "seed")
    ask(len(few) * len(methods) * seconds, f"a first verdict at {rate_text(rate)} with {many}", options.yes)
    found = run(seeds=few)
    counts = [(method, *found.survivors(method, rate)) for method in found.methods]
    others = "".join(f"; with {method} {survived} of {count}" for method, survived, count in counts[1:])
    slow = sum(run.outcome == "not learned" for run in found.runs)
    others += f"; {slow} of {len(found.runs)} learned next to nothing: give more --steps" if slow else ""
    logger.info(f"at {rate_text(rate)} {counts[0][1]} of {counts[0][2]} survive {options.steps} steps{others}")
    runs = runs * len(found.methods) // len(methods)
    ask((runs - len(found.runs)) * seconds, f"the rest of {runs} runs", options.yes)
    return run.keywords["methods"] or found.methods


def ask(seconds: float, what: str, yes: bool) -> None:
    """Say how long something takes, and ask above ten minutes."""
    words = f"{what}: about {duration(seconds)}"
    if seconds <= MOST_UNASKED or yes:
        logger.info(words)
    elif not is_terminal(sys.stdin) or input(f"{words}. Go on? [y/N] ").lower()[:1] != "y":
        raise InvalidConfigError(
            f"{words} on this machine: give --yes, or fewer `rates`, `methods`, `seeds` or `steps`. What was trained "
            f"is kept, and the same command continues"
        )


def seconds_of_a_step(config: TrainConfig, options: argparse.Namespace) -> float:
    """Seconds between two steps while runs share the cores, one thread each."""
    import torch

    from ..runs import load_images
    from ..training import lengthen_run

    on_cpu = shared.device_of(options.device) == "cpu"
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    torch.set_num_threads(1)
    try:
        data, _ = load_images(config)
        timed = lengthen_run(with_values(config, {"hardware.cpu": on_cpu}), field_paths(), data)
    finally:
        torch.set_num_threads(threads)
    return timed.seconds_per_step / (min(options.jobs or cores, cores) if on_cpu else 1)


def range_config(options: argparse.Namespace, out: Path) -> TrainConfig:
    """A recipe or a file, or the network that `scalelong train` would take for the images; then --set.

    A network that was chosen by timing is written down, so that the same command finds the same one.
    """
    from ..files import write_text

    data = options.images or options.data
    if options.recipe or options.config or data is None:
        config = shared.config_file(options, recipe(options.recipe or "digits-tiny"))
        config = replace(config, data=data) if data else config
    elif (out / NETWORK).exists():
        config = replace(load_config(out / NETWORK), data=data)
    else:
        config = shared.with_set(TrainConfig(data=data), options)
        config = shared.sized_config(config, {"data", *(word.partition("=")[0] for word in options.set)})
        write_text(out / NETWORK, dump_config(config))
    return shared.with_set(config, options)


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
    made.flag("--seeds", "runs of each method", 4)
    made.flag("--steps", "steps of each run", 400)
    made.flag("--jobs", "runs at a time (default: one per core)", kind=int)
    shared.add_device_flag(made)
    shared.add_quiet_flag(made)
    return made


def run_demo(options: argparse.Namespace) -> int:
    from ..experiments import demo
    from ..report import write_report
    from ..stability import rate_text

    began = time.monotonic()
    logger.info(
        f"The same U-ViT of depth {demo.DEPTH}, trained at a rate of {rate_text(demo.RATE)} for {options.steps} steps: "
        f"{options.seeds} seeds each of {', '.join(demo.METHODS)}. Runs that collapse are ended."
    )
    device = None if options.device is None else shared.device_of(options.device)
    found = shared.call(demo.run_demo, options, device=device)
    report = write_report([options.out], options.out / "report.html")
    print(f"\n{found}\n")
    print(f"collapsed against alive, in one picture: {options.out / 'demo.png'}")
    print("how this was chosen: docs/range.md")
    print(f"done in {time.monotonic() - began:.0f} s; open the report: {report.resolve()}")
    return 0
