"""Make images with a trained model. The same command continues where it was interrupted.

Image i has the seed SEED + i and is the same at any batch size and with any number of processes
(`torchrun --nproc-per-node 2 -m scalelong sample RUN -n 64 ...`; write -n there, since torchrun takes --n for its own).
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from . import shared
from .parser import Parser

logger = logging.getLogger(__name__)

EXAMPLES = """\
  scalelong sample                                     faces, by a network that comes with the package
  scalelong sample --model digits-class 7              with another one
  scalelong sample runs/mine -n 16 --out pictures
  scalelong sample runs/flowers rose tulip --guidance 2
"""


def sample_parser() -> Parser:
    made = Parser("sample", __doc__ or "", EXAMPLES, "[RUN [PROMPT ...]] [OPTIONS]")
    made.flag(
        "targets", "a run folder (default: --model portraits), then classes or texts", nargs="*", metavar="RUN|PROMPT"
    )
    shared.add_model_flag(made)
    made.flag("-n --n --num-images", "number of images", 64)
    made.flag("--class --prompt", "the same as after RUN; may be repeated", dest="prompts", action="append")
    shared.add_sampling_flags(made, steps=25)  # as good as 250 of DDPM: `scalelong lab bench sampling/sweep`
    text = "of products; bf16 and fp16 are faster on some devices"
    made.flag("--precision --mixed-precision", text, "fp32", kind=("fp32", "bf16", "fp16", "no"))
    shared.add_out_flag(made, "folder for the images (default: a name that says how, in the run)")
    shared.add_quiet_flag(made)
    return made


def run_sample(options: argparse.Namespace) -> None:
    from ..console import Progress
    from ..diffusion import requests
    from ..files import require_folder_place
    from ..runs import fill_folder, folder_name, process_state

    if not options.targets and options.model is None:
        options.model = shared.SHIPPED[0]
        logger.info(f"no run was given: drawing with {options.model!r}, a network that comes with the package")
    if options.out:
        require_folder_place(options.out)  # before the model is loaded
    prompts = [*options.targets[0 if options.model else 1 :], *(options.prompts or ())]
    trained = shared.trained_run(None if options.model else Path(options.targets[0]), options)
    trained.conditions.check(prompts)  # before the folder is looked at
    wanted = requests(options.n, options.seed, prompts or trained.default_prompts)
    settings = replace(shared.sample_settings(options), precision=options.precision.replace("fp32", "no"))
    folder = options.out or trained.folder / "images" / folder_name(trained, settings)
    fill_folder(trained, folder, wanted, settings, options.batch_size, options.device, Progress("images"))
    if process_state().is_main_process:
        print(folder)
