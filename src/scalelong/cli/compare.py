"""Train the same recipe under several methods of scaling, with equal seeds, and compare.

All methods share data order, noise and initial weights. Finished runs are not repeated: the same command continues an
interrupted comparison, and --status shows how far it is.
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..errors import InvalidConfigError
from .options import (
    add_device_option,
    add_engine_options,
    add_out_option,
    add_quiet_option,
    add_run_options,
    add_seed_options,
    engine_of,
    is_cpu,
    left_to_do,
    progress_aside,
    run_config,
    seed_count,
    without_out_flag,
)
from .parser import Parser, numbers, split, whole_number

EXAMPLES = """\
  scalelong compare --methods none,cs:0.7,ls --seeds 5
  scalelong compare --recipe fashion-tiny --rates 2e-3,4e-3,8e-3
  scalelong compare --status                            how far the runs are
"""

AXES = {"depth": ("depths", int), "width": ("widths", int), "batch": ("batch_sizes", int), "rate": ("rates", float)}
"""What a comparison can be repeated over: the axis, its flag, and the kind of its values."""


def parser() -> Parser:
    made = Parser("compare", __doc__ or "", EXAMPLES)
    made.add_argument("--methods", default="none,uniform,cs:0.7,ls", help="comma-separated (default: %(default)s)")
    made.add_argument(
        "--variants",
        nargs="*",
        default=[],
        metavar="'NAME: FIELD=VALUE ...'",
        help="besides methods: what differs in other fields of the configuration as well, for example 'fast: "
        "scaling=cs:0.7 lr=2e-3 model_options.merge_start=additive'",
    )
    add_seed_options(made, 3)
    add_run_options(made)
    made.add_argument("--steps", "--max-train-steps", type=whole_number, help="training steps of each run")
    add_out_option(
        made,
        "folder of the results (default: runs/compare-RECIPE; with other data, steps or --config a short hash of the "
        "configuration is added, so that the same command finds its runs)",
    )
    made.add_argument("--status", action="store_true", help="train nothing: show how far the runs of the folder are")
    made.add_argument(
        "--every", type=whole_number, help="steps between readings of features (default: about 250 per run)"
    )
    made.add_argument("--depths", help="compare at several depths of the network, for example 4,8,12")
    made.add_argument("--widths", help="at several widths, for example 64,128; with --rates, every rate at every width")
    made.add_argument(
        "--hold",
        choices=("head-size", "heads"),
        help="what attention keeps over --widths: the size of a head (default with a base width, for μP) or the number "
        "of heads (default otherwise)",
    )
    made.add_argument("--batch-sizes", help="compare at several batch sizes, for example 8,64")
    made.add_argument("--rates", help="compare at several learning rates, and best rate with best rate: 2e-3,4e-3,8e-3")
    made.add_argument(
        "--base-width",
        type=whole_number,
        help="train by μP: the rate was tuned at this width (docs/mup.md); the variant 'standard: base_width=null' "
        "is the standard parametrisation next to it",
    )
    made.add_argument(
        "--scores", type=whole_number, default=0, help="samples for the Fréchet distance at the end (default: none)"
    )
    add_device_option(made)
    add_engine_options(made)
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> int:
    from ..experiments import compare, default_hold, status_text
    from ..files import require_folder_place

    config = configuration(options)
    methods = [*split(options.methods), *options.variants]
    if not methods:
        raise InvalidConfigError("`methods` must name at least one method, for example none,cs")
    out = options.out or default_out(options, config)
    if options.status:
        print(status_text(out))
        return 0
    require_folder_place(out)
    engine = engine_of(options)
    hold = options.hold or default_hold(config, methods)
    if hold != "head-size" and default_hold(config, methods) == "head-size":
        raise InvalidConfigError("μP holds the size of attention heads over the widths: leave out `hold` heads")
    over = {
        axis: numbers(getattr(options, flag), kind, f"`{flag}`")
        for axis, (flag, kind) in AXES.items()
        if getattr(options, flag)
    }
    plan: dict[str, Any] = {"config": config, "methods": methods, "seeds": list(range(options.seeds)), "out": out}
    plan |= {"every": options.every, "engine": engine, "on_start": lambda _: remember(options.arguments, out)}
    if over:
        return _sweep(over, plan, hold, options.quiet)
    with progress_aside(options.quiet):
        comparison = compare(**plan)
    if comparison is None:
        return left_to_do(engine)
    print(f"\n{comparison}\n")
    print(f"table, figure and runs: {out}; for a report: scalelong report {out}")
    return 0


def _sweep(over: dict[str, list[Any]], plan: dict[str, Any], hold: Any, quiet: bool) -> int:
    """The comparison over depths, widths, batch sizes or rates; widths and rates together are a grid."""
    from ..experiments import best_rate_rows, rate_grid, sweep, sweep_rows

    engine, unfinished = plan["engine"], False
    if "width" in over and "rate" in over:
        widths, rates = over.pop("width"), over.pop("rate")
        with progress_aside(quiet):
            grid = rate_grid(**plan, widths=widths, rates=rates, hold=hold)
        if grid is None and not engine.detach:
            return left_to_do(engine)
        if grid is not None:
            print(f"\n{grid}\n\ntable, figure and runs: {plan['out']}")
        unfinished = grid is None
    for axis, values in over.items():
        with progress_aside(quiet):
            found = sweep(**plan, axis=axis, values=values, hold=hold)
        if found is None and not engine.detach:
            return left_to_do(engine)
        if found is None:  # the jobs of the other axes are submitted as well
            unfinished = True
            continue
        _show(sweep_rows(axis, found))
        if axis == "rate":
            _show(best_rate_rows(found))
    return left_to_do(engine) if unfinished else 0


def _show(rows: list[dict[str, str]]) -> None:
    from ..console import show_table

    print()
    show_table(rows)
    print()


def configuration(options: argparse.Namespace) -> TrainConfig:
    config = run_config(options)
    seed_count(options)
    if options.base_width is not None:
        config = replace(config, optimizer=replace(config.optimizer, base_width=options.base_width))
    if options.device is not None:
        config = replace(config, hardware=replace(config.hardware, cpu=is_cpu(options)))
    # Curves need more points than a long run's log, and every method is judged at the same steps.
    steps = options.steps or config.steps
    logging = replace(
        config.logging,
        held_out_every=config.logging.held_out_every or max(1, steps // 30),
        samples_every=max(1, steps // 4) if config.logging.samples_every is None else config.logging.samples_every,
        trackers=(),
    )
    if options.scores:
        logging = replace(logging, scores_every=steps, scores_images=options.scores)
    return replace(config, steps=steps, logging=logging)


def default_out(options: argparse.Namespace, config: TrainConfig) -> Path:
    """runs/compare-RECIPE, with a short hash where the configuration is not the recipe's own: other data, other steps,
    a file. So the same command finds its runs, and another one does not find them."""
    from ..experiments import recorded_values
    from ..files import key_of

    def key(made: TrainConfig) -> str:
        return key_of(recorded_values(made))[:6]

    name = options.recipe or options.default_recipe
    plain = configuration(parser().parse_args(["--recipe", name]))
    folder = f"compare-{'custom' if options.config and not options.recipe else name}"
    return Path("runs") / (folder if key(config) == key(plain) and not options.config else f"{folder}-{key(config)}")


def remember(arguments: list[str], out: Path) -> None:
    """Add the command to those that made the runs of the folder."""
    from ..experiments import COMMANDS
    from ..files import exclusive, make_folder, read_text, write_text

    path = make_folder(out) / COMMANDS
    command = f"scalelong compare {shlex.join(without_out_flag(arguments))}"
    with exclusive(out):
        made = read_text(path).splitlines() if path.exists() else []
        if command not in made:
            write_text(path, "\n".join([*made, command]) + "\n")
