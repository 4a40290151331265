"""What leaves a run: `scalelong report`, `export`, and the list of trained networks, `models`."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import InvalidConfigError
from . import shared
from .parser import Parser

# scalelong report

REPORT = "Write one self-contained HTML file about runs: verdict, samples, curves, tables; or show it live (--serve)."
REPORT_EXAMPLES = """\
  scalelong report runs/mine
  scalelong report runs/compare-digits-tiny --out comparison.html
  scalelong report runs/mine --serve                    watch a run in a browser
"""


def report_parser() -> Parser:
    made = Parser("report", REPORT, REPORT_EXAMPLES, "RUN ... [OPTIONS]")
    made.flag("folders", "run folders, or folders that hold runs", nargs="+", metavar="RUN")
    made.flag("--out", "the file (default: report.html in the first folder)", kind=Path)
    made.flag("--serve", "show the page live while a run goes on, on http://127.0.0.1 until Ctrl-C", False)
    made.flag("--port", "of --serve; 0 takes a free one", 8765)
    shared.add_quiet_flag(made)
    made.set_defaults(out_is_file=True)
    return made


def run_report(options: argparse.Namespace) -> None:
    from ..report import find_runs, serve, write_report, write_timelapse

    if options.serve:
        if len(options.folders) > 1 or options.out:
            raise InvalidConfigError("`serve` takes one folder and no `out`: give the folder that holds the runs")
        serve(options.folders[0], options.port)
        return
    print(f"report: {write_report(options.folders, options.out)}")
    runs = find_runs(map(Path, options.folders), may_be_empty=True)
    made = write_timelapse(runs[0], options.out and options.out.with_suffix(".gif")) if len(runs) == 1 else None
    if made:
        print(f"its samples over time: {made}")


# scalelong export

EXPORT = "Write a trained model for others, with a model card: a diffusers folder, or safetensors."
EXPORT_EXAMPLES = """\
  scalelong export runs/mine                            a folder for DiffusionPipeline.from_pretrained
  scalelong export runs/mine --format safetensors --ema 10%
"""


def export_parser() -> Parser:
    made = Parser("export", EXPORT, EXPORT_EXAMPLES, "RUN [OPTIONS]")
    made.flag("run", "the run folder", kind=Path, nargs="?")
    shared.add_model_flag(made)
    made.flag("--format", "of diffusers, or weights with metadata", "diffusers", kind=("diffusers", "safetensors"))
    made.flag("--ema", "an average of this length, such as 10%, as --weights ema:10%", metavar="LENGTH")
    shared.add_checkpoint_flags(made)
    shared.add_out_flag(made, "folder (default: export-FORMAT in the run), or a file that ends in .safetensors")
    made.flag("--push-to-hub", "then upload it to the Hugging Face hub", metavar="OWNER/NAME")
    made.flag("--public", "make the repository on the hub public", False)
    shared.add_quiet_flag(made)
    return made


def run_export(options: argparse.Namespace) -> None:
    from ..config import AverageLength
    from ..export import export_run, push_to_hub

    if (options.run is None) == (options.model is None):
        export_parser().error("give a run folder, or --model NAME for a network that comes with the package")
    if options.ema is not None:
        if options.weights is not None:
            export_parser().error("give --ema or --weights, not both")
        options.weights = f"ema:{AverageLength.parse(options.ema, '`ema`')}"
    trained = shared.trained_run(options.run, options)
    place = options.out or trained.folder / f"export-{options.format}"
    export_run(trained, place, options.format)
    print(f"{trained.weights.replace('ema', 'EMA')} weights of step {trained.step}: {place}")
    if options.push_to_hub:
        print(push_to_hub(place, options.push_to_hub, private=not options.public))


# scalelong models

MODELS = "List the trained networks that come with the package, and the paper's networks with their sizes."


def models_parser() -> Parser:
    made = Parser("models", MODELS)
    made.flag("--trained", "list the trained networks alone", False)
    shared.add_output_flags(made, "the list")
    return made


def run_models(options: argparse.Namespace) -> None:
    from ..console import show_table

    rows = _trained_rows() if options.trained else _paper_rows()
    if options.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    print("Trained, ready to use (scalelong sample --model NAME PROMPT; eval and export take --model, too):")
    show_table(_trained_rows(), left=("name", "try"), rule=False)
    if options.trained:
        return
    print("\nThe paper's networks (scalelong train --model NETWORK/PRESET):")
    for row in rows:
        row["parameters"] = "needs scalelong[train]" if row["parameters"] is None else f"{row['parameters']:,}"
        row["difference"] = "" if row["difference"] is None else f"{row['difference']:+.1%}"
        row["published"] = f"{row['published']}M" if row["published"] else ""
    show_table(rows, left=("network", "preset", "note"), rule=False)


def _trained_rows() -> list[dict[str, Any]]:
    from ..runs import NETWORKS, WEIGHTS, packed_folder

    return [
        {
            "name": name,
            "KB": round((packed_folder(name) / WEIGHTS).stat().st_size / 1000),
            "try": f'scalelong sample --model {name} "{prompt}"',
        }
        for name, prompt in NETWORKS.items()
    ]


def _paper_rows() -> list[dict[str, Any]]:
    """The networks of the paper. The UNets are those of diffusers, and are not counted where that is not installed."""
    import torch

    from ..errors import MissingDependencyError
    from ..models import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UViT, count_parameters, unet

    sizes = [("U-ViT", name, UViT.preset, UVIT_PUBLISHED[name], "") for name in UVIT_PRESETS]
    sizes += [("UNet", name, unet, preset.published, preset.note) for name, preset in UNET_PRESETS.items()]
    rows = []
    for family, name, build, published, note in sizes:
        try:
            with torch.device("meta"):  # shapes and no memory
                parameters = count_parameters(build(name))
        except MissingDependencyError:
            parameters = None
        difference = parameters / (published * 1e6) - 1 if published and parameters else None
        row = {"network": family, "preset": name, "parameters": parameters, "published": published}
        rows.append({**row, "difference": difference, "note": note})
    return rows
