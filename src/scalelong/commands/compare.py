"""scalelong compare: methods side by side, with equal data order, noise and initial weights."""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..console import text_table
from ..errors import InvalidConfigError
from ..experiments.compare import COMMANDS, best_rate_rows, compare, control_text, noise_rows, sweep, sweep_rows
from ..files import write_text
from ..runs.config import TrainConfig, load_config
from ..runs.recipes import RECIPES, recipe

Value = TypeVar("Value", int, float, str)


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    config = configuration(options)
    methods, seeds = [*listed(options.methods, str, "--methods"), *options.variants], list(range(options.seeds))
    out = options.out or Path("runs") / f"compare-{options.recipe or 'custom'}"
    remember(arguments, out)
    pace = {"every": options.every, "jobs": options.jobs}
    axes = (("depth", options.depths), ("width", options.widths), ("batch", options.batch_sizes))
    for axis, text in axes:
        if text:
            found = sweep(config, methods, seeds, out, axis, listed(text, int, f"--{axis}"), **pace)
            if found is None:
                return interrupted()
            print(f"\n{text_table(sweep_rows(axis, found))}\n")
    if options.rates:
        rates = sweep(config, methods, seeds, out, "rate", listed(options.rates, float, "--rates"), **pace)
        if rates is None:
            return interrupted()
        print(f"\n{text_table(sweep_rows('rate', rates))}\n\n{text_table(best_rate_rows(rates))}\n")
    if options.rates or any(text for _, text in axes):
        return 0
    comparison = compare(config, methods, seeds, out, **pace)
    if comparison is None:
        return interrupted()
    print(f"\n{comparison}\n")
    if options.control:
        print(control_text(config, out, **pace))
    if options.noise:
        print(f"\n{text_table(noise_rows(comparison.runs, listed(options.noise, float, '--noise')))}\n")
    print(f"table, figure and runs: {out}; for a report: scalelong report {out}")
    return 0


def remember(arguments: list[str], out: Path) -> None:
    """Add the command to those that made the runs of the folder, for whoever wants to repeat them."""
    path = out / COMMANDS
    made = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    command = f"scalelong compare {shlex.join(without_place(arguments))}"
    if command not in made:
        out.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n".join([*made, command]) + "\n")


def without_place(arguments: list[str]) -> list[str]:
    """Where the results went is nobody's business but this machine's."""
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
    made.add_argument("--seeds", type=int, default=3, help="number of seeds: 0, 1, ... (default: %(default)s)")
    made.add_argument("--recipe", choices=list(RECIPES), help="the run to repeat (default: digits-tiny)")
    made.add_argument("--config", type=Path, help="a YAML file with other values, such as a run's config.yaml")
    made.add_argument("--data", help="other images than the recipe's: a folder, a file or the name of a data set")
    made.add_argument("--steps", type=int, help="training steps of each run")
    made.add_argument("--out", type=Path, help="folder of the results (default: runs/compare-RECIPE)")
    made.add_argument("--every", type=int, help="steps between readings of features (default: about 300 per run)")
    made.add_argument("--jobs", type=int, help="runs at a time (default: one per core, or one on an accelerator)")
    made.add_argument("--depths", help="compare at several depths of the network, for example 4,8,12")
    made.add_argument("--widths", help="compare at several widths of a U-ViT, for example 64,128")
    made.add_argument("--batch-sizes", help="compare at several batch sizes, for example 8,64")
    made.add_argument("--rates", help="compare at several learning rates, and best rate with best rate: 2e-3,4e-3,8e-3")
    made.add_argument("--scores", type=int, default=500, help="samples for the Fréchet distance at the end; 0 for none")
    made.add_argument("--noise", help="gain of extra noise on the input of the trained networks, for example 0.05,0.2")
    made.add_argument(
        "--control", action="store_true", help="add a run with a rate of zero: its features must stand still"
    )
    return made


def configuration(options: argparse.Namespace) -> TrainConfig:
    base = recipe(options.recipe or "digits-tiny")
    config = load_config(options.config, base) if options.config else base
    if options.seeds < 1:
        raise InvalidConfigError(f"--seeds must be at least 1, got {options.seeds}")
    # Curves need more points than a long run's log, and every method is judged at the same steps.
    steps = options.steps or config.steps
    looks = max(1, steps // 30)
    logging = replace(
        config.logging,
        held_out_every=config.logging.held_out_every or looks,
        samples_every=max(1, steps // 4) if config.logging.samples_every is None else config.logging.samples_every,
        trackers=(),
    )
    if options.scores and hasattr(logging, "scores_every"):
        scoring = {"scores_every": steps, "scores_images": options.scores}
        logging = replace(logging, **scoring)
    return replace(config, steps=steps, data=options.data or config.data, logging=logging)


def listed(text: str, kind: Callable[[str], Value], name: str) -> list[Value]:
    try:
        return [kind(part) for part in split(text)]
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


def interrupted() -> int:
    print("interrupted; the same command continues the comparison")
    return 130
