"""`scalelong models`: the networks of the paper, their sizes, and the difference from the published ones."""

import argparse
import json
from pathlib import Path
from typing import Any

from .options import add_quiet_option


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scalelong models", description=__doc__)
    made.add_argument("--json", action="store_true", help="print the list as JSON, and nothing else")
    made.add_argument("--out", type=Path, metavar="FILE", help="also write the list to this file, as JSON")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> None:
    from ..console import show_table
    from ..files import require_file_place, write_text

    if options.out is not None:
        require_file_place(options.out)
    rows = model_rows()
    if options.out is not None:
        write_text(options.out, json.dumps(rows, indent=1))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    shown = [
        row
        | {
            "parameters": f"{row['parameters']:,}",
            "published": f"{row['published']}M",
            "difference": f"{row['difference']:+.1%}",
        }
        for row in rows
    ]
    show_table(shown, left=("network", "preset", "note"), rule=False)


def model_rows() -> list[dict[str, Any]]:
    import torch

    from ..models import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UViT, count_parameters, unet

    # On the meta device a network has shapes and no memory.
    with torch.device("meta"):
        sizes = [("U-ViT", name, UViT.preset(name), UVIT_PUBLISHED[name], "") for name in UVIT_PRESETS]
        sizes += [("UNet", name, unet(name), preset.published, preset.note) for name, preset in UNET_PRESETS.items()]
    rows = []
    for family, name, model, published, note in sizes:
        parameters = count_parameters(model)
        difference = parameters / (published * 1e6) - 1
        rows.append(
            {"network": family, "preset": name, "parameters": parameters, "published": published}
            | {"difference": difference, "note": note}
        )
    return rows
