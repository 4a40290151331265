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
from . import shared
from .parser import Parser, numbers, split

EXAMPLES = """\
  scalelong compare --methods none,cs:0.7,ls --seeds 5
  scalelong compare --recipe fashion-tiny --rates 2e-3,4e-3,8e-3
  scalelong compare --status                            how far the runs are
"""

AXES = {"depth": ("depths", int), "width": ("widths", int), "batch": ("batch_sizes", int), "rate": ("rates", float)}
"""What a comparison can be repeated over: the axis, its flag, and the kind of its values."""


def compare_parser() -> Parser:
    made = Parser("compare", __doc__ or "", EXAMPLES)
    made.flag("--methods", "comma-separated", "none,uniform,cs:0.7,ls")
    text = "besides methods: what differs in other fields of the configuration as well, for example 'fast: "
    text += "scaling=cs:0.7 lr=2e-3 model_options.merge_start=additive'"
    made.flag("--variants", text, [], kind=str, nargs="*", metavar="'NAME: FIELD=VALUE ...'")
    made.flag("--seeds", "number of seeds: 0, 1, ...", 3)
    shared.add_run_flags(made)
    made.flag("--steps --max-train-steps", "training steps of each run", kind=int)
    text = "folder of the results (default: runs/compare-RECIPE; with other data, steps or --config a short hash of "
    text += "the configuration is added, so that the same command finds its runs)"
    shared.add_out_flag(made, text)
    made.flag("--status", "train nothing: show how far the runs of the folder are", False)
    made.flag("--rates", "compare at several learning rates, and best rate with best rate: 2e-3,4e-3,8e-3")
    made.flag("--depths", "compare at several depths of the network, for example 4,8,12")
    made.flag("--widths", "at several widths, for example 64,128; with --rates, every rate at every width")
    made.flag("--batch-sizes", "compare at several batch sizes, for example 8,64")
    text = "what attention keeps over --widths: the size of a head (default with a base width, for μP) or the number "
    text += "of heads (default otherwise)"
    made.flag("--hold", text, kind=("head-size", "heads"), rare=True)
    text = "train by μP: the rate was tuned at this width (docs/mup.md); the variant 'standard: base_width=null' "
    text += "is the standard parametrisation next to it"
    made.flag("--base-width", text, kind=int, rare=True)
    made.flag("--every", "steps between readings of features (default: about 250 per run)", kind=int, rare=True)
    made.flag("--scores", "samples for the Fréchet distance at the end (default: none)", 0)
    shared.add_device_flag(made)
    shared.add_engine_flags(made)
    shared.add_quiet_flag(made)
    return made


def run_compare(options: argparse.Namespace) -> int:
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
    engine = shared.engine_of(options)
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
    with shared.progress_aside(options.quiet):
        comparison = compare(**plan)
    if comparison is None:
        return shared.left_to_do(engine)
    print(f"\n{comparison}\n")
    print(f"table, figure and runs: {out}; for a report: scalelong report {out}")
    return 0


def _sweep(over: dict[str, list[Any]], plan: dict[str, Any], hold: Any, quiet: bool) -> int:
    """The comparison over depths, widths, batch sizes or rates; widths and rates together are a grid."""
    from ..experiments import best_rate_rows, rate_grid, sweep, sweep_rows

    engine, unfinished = plan["engine"], False
    if "width" in over and "rate" in over:
        widths, rates = over.pop("width"), over.pop("rate")
        with shared.progress_aside(quiet):
            grid = rate_grid(**plan, widths=widths, rates=rates, hold=hold)
        if grid is None and not engine.detach:
            return shared.left_to_do(engine)
        if grid is not None:
            print(f"\n{grid}\n\ntable, figure and runs: {plan['out']}")
        unfinished = grid is None
    for axis, values in over.items():
        with shared.progress_aside(quiet):
            found = sweep(**plan, axis=axis, values=values, hold=hold)
        if found is None and not engine.detach:
            return shared.left_to_do(engine)
        if found is None:  # the jobs of the other axes are submitted as well
            unfinished = True
            continue
        _show(sweep_rows(axis, found))
        if axis == "rate":
            _show(best_rate_rows(found))
    return shared.left_to_do(engine) if unfinished else 0


def _show(rows: list[dict[str, str]]) -> None:
    from ..console import show_table

    print()
    show_table(rows)
    print()


def configuration(options: argparse.Namespace) -> TrainConfig:
    config = shared.run_config(options)
    shared.require_seeds(options.seeds)
    if options.base_width is not None:
        config = replace(config, optimizer=replace(config.optimizer, base_width=options.base_width))
    if options.device is not None:
        config = replace(config, hardware=replace(config.hardware, cpu=shared.is_cpu(options.device)))
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
    plain = configuration(compare_parser().parse_args(["--recipe", name]))
    folder = f"compare-{'custom' if options.config and not options.recipe else name}"
    return Path("runs") / (folder if key(config) == key(plain) and not options.config else f"{folder}-{key(config)}")


def remember(arguments: list[str], out: Path) -> None:
    """Add the command to those that made the runs of the folder."""
    from ..experiments import COMMANDS
    from ..files import exclusive, make_folder, read_text, write_text

    path = make_folder(out) / COMMANDS
    command = f"scalelong compare {shlex.join(shared.without_out_flag(arguments))}"
    with exclusive(out):
        made = read_text(path).splitlines() if path.exists() else []
        if command not in made:
            write_text(path, "\n".join([*made, command]) + "\n")
