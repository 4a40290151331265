"""Write a trained model for others, with a model card: a diffusers folder, or safetensors."""

import argparse
from pathlib import Path

from .options import (
    add_checkpoint_options,
    add_model_option,
    add_out_option,
    add_quiet_option,
    model_folder,
    trained_run,
)
from .parser import Parser

EXAMPLES = """\
  scalelong export runs/mine                            a folder for DiffusionPipeline.from_pretrained
  scalelong export runs/mine --format safetensors --ema 10%
"""


def parser() -> Parser:
    made = Parser("export", __doc__ or "", EXAMPLES, "RUN [OPTIONS]")
    made.add_argument("run", type=Path, nargs="?", help="the run folder")
    add_model_option(made)
    made.add_argument(
        "--format",
        choices=["diffusers", "safetensors"],
        default="diffusers",
        help="diffusers: a folder for DiffusionPipeline.from_pretrained (default); safetensors: weights with metadata",
    )
    made.add_argument(
        "--ema",
        metavar="LENGTH",
        help="an average of this length, such as 10%%, of a run that kept two (train --ema-lengths 5%% 10%%); the same "
        "as --weights ema:LENGTH. `scalelong eval RUN --ema-lengths` compares lengths",
    )
    add_checkpoint_options(made)
    add_out_option(made, "folder (default: export-FORMAT in the run), or a file that ends in .safetensors")
    made.add_argument("--push-to-hub", metavar="OWNER/NAME", help="then upload it to the Hugging Face hub")
    made.add_argument("--public", action="store_true", help="make the repository on the hub public")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..config import AverageLength
    from ..export import export_diffusers, export_safetensors, push_to_hub
    from ..files import require_file_place, require_folder_place

    if options.out:
        (require_file_place if options.out.suffix == ".safetensors" else require_folder_place)(options.out)
    if (options.run is None) == (options.model is None):
        parser().error("give a run folder, or --model NAME for a network that comes with the package")
    if options.ema is not None:
        if options.weights is not None:
            parser().error("give --ema or --weights, not both")
        options.weights = f"ema:{AverageLength.parse(options.ema, '`ema`')}"
    trained = trained_run(model_folder(options.model) if options.model else options.run, options)
    place = options.out or trained.folder / f"export-{options.format}"
    (export_diffusers if options.format == "diffusers" else export_safetensors)(trained, place)
    print(f"{trained.weights.replace('ema', 'EMA')} weights of step {trained.step}: {place}")
    if options.push_to_hub:
        print(push_to_hub(place, options.push_to_hub, private=not options.public))
