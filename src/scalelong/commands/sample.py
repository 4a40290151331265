"""`scalelong sample RUN`: images from a trained model. The same command continues where it was interrupted.

Image i has the seed SEED + i and is the same at any batch size and with any number of processes
(`torchrun --nproc-per-node 2 -m scalelong sample RUN -n 64 ...`; write -n there, since torchrun takes --n for its own).
"""

import argparse
from dataclasses import replace
from pathlib import Path

from .options import add_quiet_option, add_sampling_options, sample_settings, trained_run, whole_number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("run", type=Path, help="the run folder")
    made.add_argument("-n", "--n", type=whole_number, default=64, help="number of images (default: %(default)s)")
    prompts = made.add_mutually_exclusive_group()
    prompts.add_argument(
        "--class", dest="prompts", action="append", metavar="NAME", help="may be repeated; they take turns"
    )
    prompts.add_argument("--prompt", dest="prompts", action="append", metavar="TEXT", help="may be repeated")
    add_sampling_options(made)
    made.add_argument(
        "--cache",
        default="",
        metavar="every=3,depth=1",
        help="run what lies inside long skip `depth` at every third step only: faster, and not the same images; "
        "with centre=10,power=1.4 the full steps are closer around step 10",
    )
    made.add_argument("--out", type=Path, help="folder for the images (default: a name that says how, in the run)")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..console import Progress, silent
    from ..diffusion.images import requests
    from ..files import require_folder_place
    from ..runs.samples import fill_folder, folder_name, processes

    if options.out:
        require_folder_place(options.out)
    trained = trained_run(options.run, options)
    wanted = requests(options.n, options.seed, options.prompts or trained.default_prompts)
    settings = replace(sample_settings(options), cache=options.cache)
    folder = options.out or trained.folder / "images" / folder_name(trained, settings)
    progress = Progress("images", enabled=False if options.quiet else None)
    log = silent if options.quiet else print
    fill_folder(trained, folder, wanted, settings, options.batch_size, options.device, log=log, progress=progress)
    if options.quiet and processes().is_main_process:
        print(folder)
