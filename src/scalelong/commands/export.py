"""`scalelong export RUN`: a trained model for others, with a model card."""

import argparse
from pathlib import Path

from .options import add_checkpoint_options, add_model_option, add_quiet_option, model_folder, trained_run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scalelong export", description=__doc__)
    made.add_argument("run", type=Path, nargs="?", help="the run folder")
    add_model_option(made)
    made.add_argument(
        "--format",
        choices=["diffusers", "safetensors"],
        default="diffusers",
        help="diffusers: a folder for DiffusionPipeline.from_pretrained (default); safetensors: weights with metadata",
    )
    add_checkpoint_options(made)
    made.add_argument("--out", type=Path, help="folder (default: export-FORMAT in the run)")
    made.add_argument("--push-to-hub", metavar="OWNER/NAME", help="then upload it to the Hugging Face hub")
    made.add_argument("--public", action="store_true", help="make the repository on the hub public")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..export import export_diffusers, export_safetensors, push_to_hub
    from ..files import require_folder_place

    if options.out and options.out.suffix != ".safetensors":
        require_folder_place(options.out)
    if (options.run is None) == (options.model is None):
        parser().error("give a run folder, or --model NAME for a network that comes with the package")
    trained = trained_run(model_folder(options.model) if options.model else options.run, options)
    folder = options.out or trained.folder / f"export-{options.format}"
    if options.format == "diffusers":
        export_diffusers(trained, folder)
    else:
        export_safetensors(trained, folder)
    print(f"{trained.weights.replace('ema', 'EMA')} weights of step {trained.step}: {folder}")
    if options.push_to_hub:
        print(push_to_hub(folder, options.push_to_hub, private=not options.public))
