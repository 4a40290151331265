"""`scalelong export RUN`: a trained model for others, with a model card."""

import argparse
from pathlib import Path

from ..export import export_diffusers, export_safetensors, model_card, push_to_hub
from ..files import write_text
from ..runs.load import load_run


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scalelong export", description=__doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument(
        "--format",
        choices=["diffusers", "safetensors"],
        default="diffusers",
        help="diffusers: a folder for DiffusionPipeline.from_pretrained (default); safetensors: weights with metadata",
    )
    parser.add_argument("--weights", default="ema", choices=["ema", "raw"], help="averaged weights (default) or raw")
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="checkpoint (default: the newest)")
    parser.add_argument("--out", type=Path, help="folder (default: export-FORMAT in the run)")
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME", help="then upload it to the Hugging Face hub")
    parser.add_argument("--public", action="store_true", help="make the repository on the hub public")
    options = parser.parse_args(arguments)
    run = load_run(options.run, weights=options.weights, step=options.checkpoint)
    folder = options.out or run.folder / f"export-{options.format}"
    if options.format == "diffusers":
        export_diffusers(run, folder)
    else:
        export_safetensors(run, folder)
        write_text(folder / "README.md", model_card(run, "safetensors"))
    print(f"{'EMA' if run.weights == 'ema' else 'raw'} weights of step {run.step}: {folder}")
    if options.push_to_hub:
        print(push_to_hub(folder, options.push_to_hub, private=not options.public))
    return 0
