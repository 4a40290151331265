"""scalelong compare: methods side by side, with equal data order, noise and initial weights."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidConfigError
from .options import (
    add_engine_options,
    add_quiet_option,
    add_run_options,
    add_seed_options,
    engine_of,
    left_to_do,
    listed,
    progress_aside,
    run_config,
    seed_count,
    whole_number,
)

if TYPE_CHECKING:
    from ..experiments.runs import PlannedRun
    from ..runs.config import TrainConfig


def run(options: argparse.Namespace) -> int:
    from ..console import show_table
    from ..experiments.compare import (
        best_rate_rows,
        compare,
        control_text,
        default_hold,
        noise_rows,
        sweep,
        sweep_rows,
    )
    from ..experiments.cost import cost_of, parse_step_time
    from ..experiments.grid import rate_grid
    from ..files import require_folder_place

    config = configuration(options)
    methods, seeds = [*listed(options.methods, str, "--methods"), *options.variants], list(range(options.seeds))
    if not methods:
        raise InvalidConfigError("--methods must name at least one method, for example none,cs")
    noise = listed(options.noise, float, "--noise") if options.noise else []
    out = options.out or default_out(options, config)
    require_folder_place(out)
    engine, step_time = engine_of(options), parse_step_time(options.step_time)
    hold = options.hold or default_hold(config, methods)
    if hold != "head-size" and default_hold(config, methods) == "head-size":
        raise InvalidConfigError("μP holds the size of attention heads over the widths: leave out --hold heads")

    def on_start(runs: "list[PlannedRun]") -> None:
        remember(options.arguments, out)
        if not all(run.finished for run in runs):
            print(cost_of(runs, engine, step_time), flush=True)

    def unfinished() -> int:
        return left_to_do(engine, out, ["compare", *options.arguments])

    pace = {"every": options.every, "engine": engine, "runs_per_job": options.runs_per_job or 1, "on_start": on_start}
    given = {
        axis: listed(text, kind, flag)
        for axis, kind, flag, text in (
            ("depth", int, "--depths", options.depths),
            ("width", int, "--widths", options.widths),
            ("batch", int, "--batch-sizes", options.batch_sizes),
            ("rate", float, "--rates", options.rates),
        )
        if text
    }
    swept = bool(given)
    if "width" in given and "rate" in given:
        widths, rates = [int(width) for width in given.pop("width")], given.pop("rate")
        with progress_aside(options.quiet):
            grid = rate_grid(config, methods, seeds, out, widths, rates, hold=hold, **pace)
        if grid is not None:
            print(f"\n{grid}\n\ntable, figure and runs: {out}")
        elif not engine.detach:
            return unfinished()
    for axis, values in given.items():
        with progress_aside(options.quiet):
            found = sweep(config, methods, seeds, out, axis, values, hold=hold, **pace)
        if found is None:
            if engine.detach:  # the jobs of the other axes are submitted as well
                continue
            return unfinished()
        print()
        show_table(sweep_rows(axis, found))
        print()
        if axis == "rate":
            show_table(best_rate_rows(found))
            print()
    if swept:
        return unfinished() if engine.detach else 0
    with progress_aside(options.quiet):
        comparison = compare(config, methods, seeds, out, **pace)
    if comparison is None:
        return unfinished()
    print(f"\n{comparison}\n")
    if options.control:
        with progress_aside(options.quiet):
            control = control_text(config, out, options.every, engine=engine)
        print(control)
    if options.noise:
        print()
        show_table(noise_rows(comparison.runs, noise))
        print()
    print(f"table, figure and runs: {out}; for a report: scalelong report {out}")
    return 0


def default_out(options: argparse.Namespace, config: "TrainConfig") -> Path:
    """runs/compare-RECIPE, with a short hash where the configuration is not the recipe's own: other data, other steps,
    a file. So the same command finds its runs, and another one does not find them."""
    from ..experiments.runs import SAME_RESULT
    from ..files import key_of
    from ..runs.config import flatten, to_dict

    def what(made: "TrainConfig") -> str:
        values = {name: value for name, value in flatten(to_dict(made)).items() if not name.startswith(SAME_RESULT)}
        return key_of(values)[:6]

    recipe = options.recipe or options.default_recipe
    plain = configuration(parser().parse_args(["--recipe", recipe]))
    name = f"compare-{'custom' if options.config and not options.recipe else recipe}"
    return Path("runs") / (name if what(config) == what(plain) and not options.config else f"{name}-{what(config)}")


def remember(arguments: list[str], out: Path) -> None:
    """Add the command to those that made the runs of the folder, for whoever wants to repeat them."""
    from ..experiments.compare import COMMANDS
    from ..files import exclusive, make_folder, read_text, write_text

    path = make_folder(out) / COMMANDS
    command = f"scalelong compare {shlex.join(without_out_flag(arguments))}"
    with exclusive(out):
        made = read_text(path).splitlines() if path.exists() else []
        if command not in made:
            write_text(path, "\n".join([*made, command]) + "\n")


def without_out_flag(arguments: list[str]) -> list[str]:
    """The output folder is not part of the command: it names a place of this machine."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--out":
            skip = True
        elif not argument.startswith("--out="):
            kept.append(argument)
    return kept


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong compare",
        description="Train the same recipe under several methods of scaling, with equal seeds, and compare. Runs that "
        "are finished are not repeated: the same command continues an interrupted comparison.",
    )
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
    made.add_argument("--steps", type=whole_number, help="training steps of each run")
    made.add_argument(
        "--out",
        type=Path,
        help="folder of the results (default: runs/compare-RECIPE; with other data, steps or --config a short hash "
        "of the configuration is added, so that the same command finds its runs)",
    )
    made.add_argument(
        "--every", type=whole_number, help="steps between readings of features (default: about 250 per run)"
    )
    made.add_argument("--depths", help="compare at several depths of the network, for example 4,8,12")
    made.add_argument(
        "--widths", help="compare at several widths, for example 64,128; with --rates, every rate at every width"
    )
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
        "is the standard parametrisation beside it",
    )
    made.add_argument(
        "--scores", type=whole_number, default=500, help="samples for the Fréchet distance at the end; 0 for none"
    )
    made.add_argument("--noise", help="gain of extra noise on the input of the trained networks, for example 0.05,0.2")
    made.add_argument(
        "--control", action="store_true", help="add a run with a rate of zero: its features must stand still"
    )
    add_engine_options(made)
    add_quiet_option(made)
    return made


def configuration(options: argparse.Namespace) -> "TrainConfig":
    config = run_config(options)
    seed_count(options)
    if options.base_width is not None:
        config = replace(config, optimizer=replace(config.optimizer, base_width=options.base_width))
    # Curves need more points than a long run's log, and every method is judged at the same steps.
    steps = options.steps or config.steps
    looks = max(1, steps // 30)
    logging = replace(
        config.logging,
        held_out_every=config.logging.held_out_every or looks,
        samples_every=max(1, steps // 4) if config.logging.samples_every is None else config.logging.samples_every,
        trackers=(),
    )
    if options.scores:
        logging = replace(logging, scores_every=steps, scores_images=options.scores)
    return replace(config, steps=steps, logging=logging)
