"""scalelong demo: see what scaling the long skips does, on real data, in under three minutes on two cores."""

import argparse
import time
from pathlib import Path

from .options import INTERRUPTED, constant_in


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong demo",
        description="Train a tiny U-ViT on handwritten digits under none, CS and LS, with equal seeds, and compare. "
        "The same command continues an interrupted demo.",
    )
    made.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of the runs and the results")
    made.add_argument(
        "--steps", type=int, default=constant_in("experiments.demo", "STEPS"), help="training steps of each method"
    )
    made.add_argument("--seed", type=int, default=0)
    return made


def run(options: argparse.Namespace) -> int:
    from ..experiments.demo import METHODS, run_demo
    from ..report import write_report

    began = time.monotonic()
    print(f"Training a U-ViT with {', '.join(METHODS)} on 8x8 digits, {options.steps} steps each, equal seeds.")
    comparison = run_demo(options.out, options.steps, options.seed)
    if comparison is None:
        print("interrupted; the same command continues the demo")
        return INTERRUPTED
    print(f"\n{comparison}\n")
    report = write_report([options.out], options.out / "report.html")
    print("steps to none's loss: the share of steps after which a method reaches the loss where none ends.")
    print("O1 to O3: how much features oscillate. One seed and a short run: docs/compare.md shows how to know more.")
    print(f"curves and samples: {options.out / 'comparison.png'}")
    print(f"done in {time.monotonic() - began:.0f} s; open the report: {report.resolve()}")
    return 0
