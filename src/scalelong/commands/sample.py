"""`scalelong sample RUN`: images from a trained model. The same command continues where it was interrupted.

Image i has the seed SEED + i and is the same at any batch size and with any number of processes
(`torchrun --nproc-per-node 2 -m scalelong sample RUN -n 64 ...`; torchrun itself stumbles over `--n`).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ..diffusion import SAMPLERS
from ..diffusion.images import requests
from ..diffusion.solvers import SampleSettings
from ..runs.load import load_run
from ..runs.samples import fill_folder, folder_name


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scalelong sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("-n", "--n", type=int, default=64, help="number of images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first image (default: %(default)s)")
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument(
        "--class", dest="wishes", action="append", metavar="NAME", help="may be repeated; they take turns"
    )
    wish.add_argument("--prompt", dest="wishes", action="append", metavar="TEXT", help="may be repeated")
    add_sampling_options(parser)
    parser.add_argument("--out", type=Path, help="folder for the images (default: a name that says how, in the run)")
    return parser


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Those that `scalelong eval` has as well."""
    parser.add_argument("--sampler", default="dpm++", choices=list(SAMPLERS), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="steps of the sampler (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=1.0, help="classifier-free guidance (default: 1, none)")
    parser.add_argument("--weights", default="ema", choices=["ema", "raw"], help="averaged weights (default) or raw")
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="checkpoint (default: the newest)")
    parser.add_argument("--batch-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--device", default=None, help="default: an accelerator if there is one")


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    run = load_run(options.run, weights=options.weights, step=options.checkpoint)
    wanted = requests(options.n, options.seed, options.wishes or run.default_wishes)
    settings = SampleSettings(sampler=options.sampler, steps=options.steps, guidance=options.guidance)
    folder = options.out or run.folder / "images" / folder_name(run, settings)
    fill_folder(run, folder, wanted, settings, options.batch_size, options.device, log=partial(print, flush=True))
    return 0
