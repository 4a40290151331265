"""What the three estimators answer for a small U-ViT on real data.

python -m research.kappa_answers --data fashion-mnist --data cifar10 --results FILE.json
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalelong.commands.theory import load_images
from scalelong.console import text_table
from scalelong.kappa import choose_kappa
from scalelong.models import UViT

from .kappa_validation import widen_, write_records

SIZE, DEPTH = 16, 12


def small_uvit(channels: int) -> nn.Module:
    sizes: Any = {"image_size": SIZE, "patch_size": 4, "channels": channels, "dim": 32, "depth": DEPTH, "heads": 4}
    return widen_(UViT(**sizes, init_std=0.02, final_start="authors"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="a data set; repeatable")
    parser.add_argument("--results", type=Path, required=True, help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    answers = []
    for spec in options.data:
        images = load_images(spec, size=SIZE)

        def build(channels: int = images.shape[1]) -> nn.Module:
            return small_uvit(channels)

        torch.manual_seed(0)
        for method in ("data", "network", "pilot"):
            pilot = {"steps": 120, "seeds": 1, "learning_rate": 8e-3, "batch_size": 16} if method == "pilot" else {}
            choice = choose_kappa(build, images, method=method, **pilot)
            answers.append({"data": spec, **asdict(choice)})
            print(f"{spec}: {choice}\n", flush=True)
    write_records(options.results, answers)
    print(text_table([{key: answer[key] for key in ("data", "method", "kappa", "low", "high")} for answer in answers]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
