"""scalelong demo: a deep network that breaks, and what keeps it alive, on real images in under three minutes."""

import argparse
import time
from functools import partial
from pathlib import Path

from ..console import silent
from .options import (
    add_job_options,
    add_quiet_option,
    add_stack_option,
    constant_in,
    listed,
    progress_aside,
    seed_number,
    whole_number,
)


def run(options: argparse.Namespace) -> int:
    from ..experiments.demo import METHODS, run_demo
    from ..files import require_folder_place
    from ..report import write_report
    from ..stability.survival import rate_text

    require_folder_place(options.out)
    began = time.monotonic()
    rates = listed(options.rates, float, "--rates")
    names = [method.partition(": ")[0] for method in METHODS]
    say = silent if options.quiet else print
    say(
        f"The same U-ViT of depth {options.depth}, trained at a learning rate of {', '.join(map(rate_text, rates))} "
        f"for {options.steps} steps: {options.seeds} seeds each of {', '.join(names)}. Runs that collapse are ended."
    )
    with progress_aside(options.quiet):
        found = run_demo(
            options.out,
            seed=options.seed,
            seeds=options.seeds,
            steps=options.steps,
            depth=options.depth,
            rates=rates,
            jobs=options.jobs,
            stack=options.stack,
        )
    report = write_report([options.out], options.out / "report.html")
    print(f"\n{found}\n")
    print(
        f"runs as marks and curves: {options.out / 'range.png'}; what each makes of noisy images: "
        f"{options.out / 'samples'}"
    )
    print("how this was chosen, and where nothing differs: docs/range.md, and scalelong demo --depth 8")
    print(f"done in {time.monotonic() - began:.0f} s; open the report: {report.resolve()}")
    return 0


def parser() -> argparse.ArgumentParser:
    demo = partial(constant_in, "experiments.demo")
    made = argparse.ArgumentParser(
        prog="scalelong demo",
        description="Train a deep U-ViT on photographs of garments at a rate where it breaks: without scaling, "
        "with constant scaling (CS) of its long skips as a start, and with a unit-gain start. Count the survivors. The "
        "same command continues an interrupted demo.",
    )
    made.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the results")
    made.add_argument("--seed", type=seed_number, default=0, help="base seed; n takes the seeds 100 n, 100 n + 1, ...")
    made.add_argument(
        "--seeds", type=whole_number, default=demo("SEEDS"), help="runs of each method (default: %(default)s)"
    )
    made.add_argument(
        "--steps", type=whole_number, default=demo("STEPS"), help="steps of each run (default: %(default)s)"
    )
    made.add_argument(
        "--depth", type=whole_number, default=demo("DEPTH"), help="blocks of the U-ViT (default: %(default)s)"
    )
    made.add_argument("--rates", default=str(demo("RATE")), help="learning rates, with commas (default: %(default)s)")
    add_job_options(made)
    add_stack_option(made, demo("STACK"))
    add_quiet_option(made)
    return made
