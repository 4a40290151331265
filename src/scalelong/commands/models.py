"""`scalelong models`: the networks of the paper, their sizes, and the difference from the published ones."""

import argparse

import torch

from ..models import UNET_PRESETS, UVIT_PRESETS, UVIT_PUBLISHED, UViT, unet


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(prog="scalelong models", description=__doc__).parse_args(arguments)
    # On the meta device a network has shapes and no memory.
    with torch.device("meta"):
        rows = [("U-ViT", name, count(UViT.preset(name)), UVIT_PUBLISHED[name], "") for name in UVIT_PRESETS]
        rows += [
            ("UNet", name, count(unet(name)), preset.published, preset.note) for name, preset in UNET_PRESETS.items()
        ]
    print(f"{'network':8} {'preset':18} {'parameters':>12} {'published':>10} {'difference':>10}  note")
    for family, name, parameters, published, note in rows:
        difference = parameters / (published * 1e6) - 1
        print(f"{family:8} {name:18} {parameters:>12,} {published:>9}M {difference:>+10.1%}  {note}")
