"""Make images with a trained model. The same command continues where it was interrupted.

Image i has the seed SEED + i and is the same at any batch size and with any number of processes
(`torchrun --nproc-per-node 2 -m scalelong sample RUN -n 64 ...`; write -n there, since torchrun takes --n for its own).
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ..config import Precision
from .options import (
    add_model_option,
    add_out_option,
    add_quiet_option,
    add_sampling_options,
    model_folder,
    sample_settings,
    trained_run,
)
from .parser import Parser, whole_number

EXAMPLES = """\
  scalelong sample --model digits-class 7              with a network that comes with the package
  scalelong sample runs/mine -n 16 --out pictures
  scalelong sample runs/flowers rose tulip --guidance 2
"""


def parser() -> Parser:
    made = Parser("sample", __doc__ or "", EXAMPLES, "RUN [PROMPT ...] [OPTIONS]")
    made.add_argument(
        "targets",
        nargs="*",
        metavar="RUN|PROMPT",
        help="the run folder, then classes or texts to draw, which take turns; with --model, these alone",
    )
    add_model_option(made)
    made.add_argument("-n", "--n", "--num-images", type=whole_number, default=64, help="number of images (default: 64)")
    prompts = made.add_mutually_exclusive_group()
    prompts.add_argument("--class", dest="prompts", action="append", metavar="NAME", help="may be repeated")
    prompts.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help="may be repeated")
    add_sampling_options(made, steps=25)  # as good as 250 of DDPM: `scalelong lab bench sampling/sweep`
    made.add_argument(
        "--precision",
        "--mixed-precision",
        default="no",
        choices=get_args(Precision),
        help="multiply in bf16 or fp16: faster where the device has instructions for it; not quite the same images "
        "(default: no, which is float32)",
    )
    add_out_option(made, "folder for the images (default: a name that says how, in the run)")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..console import Progress, silent
    from ..diffusion import requests
    from ..files import require_folder_place
    from ..runs import fill_folder, folder_name, process_state

    if options.out:
        require_folder_place(options.out)
    if not options.targets and options.model is None:
        parser().error("give a run folder, or --model NAME for a network that comes with the package")
    asked = options.targets if options.model else options.targets[1:]
    if asked and options.prompts:
        parser().error("give prompts after RUN, or with --class or --prompt, not both")
    prompts = asked or options.prompts or ()
    trained = trained_run(model_folder(options.model) if options.model else Path(options.targets[0]), options)
    trained.conditions.check(prompts)  # before the folder is looked at
    wanted = requests(options.n, options.seed, prompts or trained.default_prompts)
    settings = replace(sample_settings(options), precision=options.precision)
    folder = options.out or trained.folder / "images" / folder_name(trained, settings)
    progress = Progress("images", enabled=False if options.quiet else None)
    log = silent if options.quiet else print
    fill_folder(trained, folder, wanted, settings, options.batch_size, options.device, log=log, progress=progress)
    if options.quiet and process_state().is_main_process:
        print(folder)
