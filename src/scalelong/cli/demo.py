"""Train a deep U-ViT on photographs of garments at a learning rate where it breaks, and count the survivors.

The same network is trained without scaling, with constant scaling (CS) of its long skips as a start, and with a
unit-gain start, in under three minutes on two cores. The same command continues an interrupted demo.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from ..console import silent
from .options import add_quiet_option, progress_aside
from .parser import Parser, numbers, whole_number


def parser() -> Parser:
    made = Parser("demo", __doc__ or "", "  scalelong demo\n  scalelong demo --depth 8      where nothing differs\n")
    made.add_argument("--out", "--output-dir", type=Path, default=Path("demo-output"), help="folder of the results")
    made.add_argument("--seed", type=whole_number, default=0, help="base seed; n takes the seeds 100 n, 100 n + 1, ...")
    made.add_argument("--seeds", type=whole_number, help="runs of each method (default: 8)")
    made.add_argument("--steps", type=whole_number, help="steps of each run (default: 130)")
    made.add_argument("--depth", type=whole_number, help="blocks of the U-ViT (default: 24)")
    made.add_argument("--rates", help="learning rates, with commas (default: 1.6e-2)")
    made.add_argument("--jobs", type=whole_number, help="runs at a time (default: one per core)")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> int:
    from ..experiments import DEPTH, METHODS, RATE, SEEDS, STEPS, run_demo
    from ..files import require_folder_place
    from ..report import write_report
    from ..stability import rate_text

    require_folder_place(options.out)
    began = time.monotonic()
    settings: dict[str, Any] = {"seeds": options.seeds or SEEDS, "steps": options.steps or STEPS}
    settings |= {"depth": options.depth or DEPTH, "seed": options.seed, "jobs": options.jobs}
    rates = numbers(options.rates, float, "`rates`") if options.rates else [RATE]
    names = [method.partition(": ")[0] for method in METHODS]
    say = silent if options.quiet else print
    say(
        f"The same U-ViT of depth {settings['depth']}, trained at a rate of {', '.join(map(rate_text, rates))} "
        f"for {settings['steps']} steps: {settings['seeds']} seeds each of {', '.join(names)}. Runs that collapse are "
        f"ended."
    )
    with progress_aside(options.quiet):
        found = run_demo(options.out, rates=rates, **settings)
    report = write_report([options.out], options.out / "report.html")
    print(f"\n{found}\n")
    print(f"runs as marks and curves: {options.out / 'range.png'}; noisy images, cleaned: {options.out / 'samples'}")
    print("how this was chosen, and where nothing differs: docs/range.md, and scalelong demo --depth 8")
    print(f"done in {time.monotonic() - began:.0f} s; open the report: {report.resolve()}")
    return 0
