"""Train the same recipe under several methods of scaling, with equal seeds, and compare.

All methods share data order, noise and initial weights. Finished runs are not repeated: the same command continues an
interrupted comparison, and --status shows how far it is.
"""

import argparse
from pathlib import Path

from ..config import TrainConfig, with_values
from ..errors import require
from . import shared
from .parser import Parser, floats, integers, split

EXAMPLES = """\
  scalelong compare --methods none,cs:0.7,ls --seeds 5
  scalelong compare --recipe fashion-tiny --rates 2e-3,4e-3,8e-3
  scalelong compare --variants 'fast: scaling=cs:0.7 lr=2e-3' 'deep: model_options.depth=12'
  scalelong compare --status                            how far the runs are
"""


def compare_parser() -> Parser:
    made = Parser("compare", __doc__ or "", EXAMPLES)
    made.flag("--methods", "comma-separated", "none,merge_norm,cs:0.7,ls")
    shared.add_variants_flag(made)
    made.flag("--seeds", "number of seeds: 0, 1, ...", 3)
    shared.add_run_flags(made)
    made.flag("--steps --max-train-steps", "training steps of each run", kind=int)
    shared.add_out_flag(made, "folder of the results (default: runs/compare-RECIPE, with a hash of other values)")
    made.flag("--status", "train nothing: show how far the runs of the folder are", False)
    made.flag("--rates", "compare at several learning rates, and best rate with best rate: 2e-3,4e-3", kind=floats)
    made.flag("--widths", "compare at several widths of the network: 64,128", kind=integers)
    made.flag("--base-width", "train by μP: the width where the rate was tuned", kind=int, rare=True)
    shared.add_set_flag(made)
    made.flag("--every", "steps between readings of features (default: about 250 per run)", kind=int, rare=True)
    made.flag("--scores", "samples for the Fréchet distance at the end (default: none)", 0)
    shared.add_device_flag(made)
    shared.add_engine_flags(made)
    shared.add_quiet_flag(made)
    return made


def run_compare(options: argparse.Namespace) -> int:
    from ..console import show_table
    from ..experiments import best_rate_rows, status_text, sweep

    config = compare_config(options)
    methods = [*split(options.methods), *options.variants]
    require(bool(methods), "`methods` must name at least one method, for example none,cs")
    out = options.out or default_out(options, config)
    if options.status:
        print(status_text(out))
        return 0
    engine = shared.engine_of(options)
    widths, rates = options.widths or (), options.rates or ()
    found = sweep(config, methods, range(options.seeds), out, widths=widths, rates=rates, engine=engine)
    if found is None:
        return shared.left_to_do()
    for (width, rate), results in found.items():
        named = [f"{name} {value:g}" for name, value in {"width": width, "rate": rate}.items() if value is not None]
        print("\n".join(["", *([", ".join(named)] if named else []), str(results)]))
    if rates:
        print()
        show_table(best_rate_rows(found))
    print(f"\ntables, figures and runs: {out}; for a report: scalelong report {out}")
    return 0


def compare_config(options: argparse.Namespace) -> TrainConfig:
    config = shared.with_set(shared.run_config(options), options)
    shared.require_seeds(options.seeds)
    steps, logging = options.steps or config.steps, config.logging
    # Curves need more points than a long run's log, and every method is judged at the same steps.
    values = {
        "steps": steps,
        "logging.held_out_every": logging.held_out_every or max(1, steps // 30),
        "logging.samples_every": max(1, steps // 4) if logging.samples_every is None else logging.samples_every,
        "logging.trackers": (),
    }
    if options.every:
        values["logging.monitor_every"] = options.every
    if options.scores:
        values |= {"logging.scores_every": steps, "logging.scores_images": options.scores}
    if options.base_width is not None:
        values["optimizer.base_width"] = options.base_width
    if options.device is not None:
        values["hardware.cpu"] = shared.is_cpu(options.device)
    return with_values(config, values)


def default_out(options: argparse.Namespace, config: TrainConfig) -> Path:
    """runs/compare-RECIPE, with a short hash where the configuration is not the recipe's own: other data, other steps,
    a file. So the same command finds its runs, and another one does not find them."""
    from ..experiments import recorded_values
    from ..files import key_of

    folder = f"compare-{'custom' if options.config and not options.recipe else options.recipe or 'digits-tiny'}"
    own = (options.config, options.data, options.steps, options.scores, options.base_width, options.set)
    if any(own):
        folder += f"-{key_of(recorded_values(config))[:6]}"
    return Path("runs") / folder
