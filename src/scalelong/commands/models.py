"""`scalelong models`: the networks of the paper, their sizes, and the difference from the published ones."""

import argparse

import torch

from ..models import UNET_PRESETS, UVIT_PRESETS, UViT, unet

# Millions, as published. The text-to-image networks of the paper's Table 1 (252M, 265M, 260M) are counted there with
# a text encoder of 123M and an autoencoder of 84M.
PUBLISHED = {
    "cifar10-s2": 44,
    "celeba64-s4": 44,
    "imagenet64-m4": 131,
    "imagenet64-l4": 287,
    "imagenet256-l2": 287,
    "imagenet256-h2": 501,
    "imagenet512-l4": 287,
    "imagenet512-h4": 501,
    "mscoco256-s2": 45,
    "mscoco256-s2-deep": 58,
}


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(prog="scalelong models", description=__doc__).parse_args(arguments)
    # On the meta device a network has shapes and no memory.
    with torch.device("meta"):
        rows = [("U-ViT", name, count(UViT.preset(name)), PUBLISHED[name], "") for name in UVIT_PRESETS]
        rows += [
            ("UNet", name, count(unet(name)), preset.published, preset.note) for name, preset in UNET_PRESETS.items()
        ]
    print(f"{'network':8} {'preset':18} {'parameters':>12} {'published':>10} {'difference':>10}  note")
    for family, name, parameters, published, note in rows:
        difference = parameters / (published * 1e6) - 1
        print(f"{family:8} {name:18} {parameters:>12,} {published:>9}M {difference:>+10.1%}  {note}")
