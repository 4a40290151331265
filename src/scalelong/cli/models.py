"""List the trained networks that come with the package, and the paper's networks with their sizes.

`scalelong models make NAME` trains one of the former again, as its card says, and packs it into --out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from .options import SHIPPED, add_quiet_option
from .parser import Parser


def parser() -> Parser:
    made = Parser("models", __doc__ or "", usage="[list|make NAME] [OPTIONS]")
    made.add_argument("action", nargs="?", choices=["list", "make"], default="list", help="default: list")
    made.add_argument("name", nargs="?", choices=SHIPPED, help="which network to make", metavar="NAME")
    made.add_argument("--trained", action="store_true", help="list the trained networks alone")
    made.add_argument("--json", action="store_true", help="print the list as JSON, and nothing else")
    made.add_argument(
        "--out", type=Path, metavar="PLACE", help="list: also write it to this file, as JSON; make: folder for NAME"
    )
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..console import show_table
    from ..files import require_file_place, write_text

    if options.action == "make":
        make(options)
        return
    if options.out is not None:
        require_file_place(options.out)
    rows = trained_rows() if options.trained else model_rows()
    written = json.dumps(rows, indent=1, ensure_ascii=False)
    if options.out is not None:
        write_text(options.out, written)
    if options.json:
        print(written)
        return
    print("Trained, ready to use (scalelong sample --model NAME PROMPT; eval and export take --model, too):")
    show_table(trained_rows(), left=("name", "data", "condition", "try"), rule=False)
    if options.trained:
        return
    print("\nThe paper's networks (scalelong train --model NETWORK/PRESET):")
    for row in rows:
        row["parameters"] = "needs scalelong[train]" if row["parameters"] is None else f"{row['parameters']:,}"
        row["difference"] = "" if row["difference"] is None else f"{row['difference']:+.1%}"
        row["published"] = f"{row['published']}M" if row["published"] else ""
    show_table(rows, left=("network", "preset", "note"), rule=False)


def trained_rows() -> list[dict[str, Any]]:
    from ..runs import EXAMPLES, NETWORKS, WEIGHTS, packed_folder, shipped_names

    rows = []
    for name, config in NETWORKS.items():
        made, there = config(), name in shipped_names()
        size = (packed_folder(name) / WEIGHTS).stat().st_size if there else None
        rows.append(
            {
                "name": name,
                "data": made.data,
                "condition": made.diffusion.condition,
                "KB": round(size / 1000) if size else "not in this installation: scalelong models make",
                "try": f'scalelong sample --model {name} "{EXAMPLES[name]}"',
            }
        )
    return rows


def model_rows() -> list[dict[str, Any]]:
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
        rows.append(
            {"network": family, "preset": name, "parameters": parameters, "published": published}
            | {"difference": difference, "note": note}
        )
    return rows


def make(options: argparse.Namespace) -> None:
    """Train, score and pack a network."""
    from ..evaluation import score_run
    from ..export import shipped_card
    from ..files import write_text
    from ..runs import CARD, NETWORKS, SCORES, load_run, pack
    from ..training import train

    if options.name is None:
        parser().error(f"say which network to make: {', '.join(NETWORKS)}")
    out = options.out or Path("runs") / "made"
    work = out / f"{options.name}-run"
    train(NETWORKS[options.name](), work)
    scores = score_run(load_run(work), n=1000)
    folder = pack(work, out / options.name)
    # Without places on the machine where it was made.
    line = scores.to_dict() | {"subject": {"run": options.name, "step": scores.subject["step"], "seed": 0}}
    write_text(folder / SCORES, json.dumps(line, ensure_ascii=False) + "\n")
    write_text(folder / CARD, shipped_card(options.name, load_run(work), scores))
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.2f} MB")
