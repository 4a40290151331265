"""How networks start, and where trained ones err.

    python -m research.starts                  sensitivities to skips before the first step, and gains of the last layer
    python -m research.starts errors RUN ...   errors of trained U-ViTs by noise level and by frequency

The first needs no data: images are standard normal, which is what x_t is at the highest noise.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from scalelong.console import text_table
from scalelong.errors import CancelledScalingWarning, InvalidConfigError
from scalelong.experiments.runs import exit_code
from scalelong.models import UViT
from scalelong.noise import even_fractions
from scalelong.runs.load import load_run
from scalelong.runs.model import load_run_data
from scalelong.skips import start_merges_
from scalelong.theory import skip_sensitivities

# Before the first step

SEEDS = range(3)
BATCH, SIZE = 8, 16

AUTHORS = {"init_std": 0.02, "final_start": "authors"}
UVIT_STARTS: dict[str, dict[str, Any]] = {
    "authors, width 64": {"dim": 64},
    "authors, width 512": {"dim": 512, "heads": 8},
    "init_std 0.0566, width 64": {"dim": 64, "init_std": 0.0566},
    'init_std "unit", width 64': {"dim": 64, "init_std": "unit", "final_start": "identity"},
    "identity, width 64": {"dim": 64, "merge_start": "identity"},
    "additive, width 64": {"dim": 64, "merge_start": "additive"},
    "additive and unit, width 64": {
        "dim": 64,
        "merge_start": "additive",
        "init_std": "unit",
        "final_start": "identity",
    },
}


def uvit(channels: int = 1, **options: Any) -> UViT:
    """Starts differ from the authors' in what the options say alone."""
    sizes = {"image_size": SIZE, "patch_size": 4, "channels": channels, "depth": 8, "heads": 4}
    return UViT(**{**sizes, **AUTHORS, **options})


def unet(start: str) -> nn.Module:
    """Blocks as in DDPM: GroupNorm takes the concatenation, and only the shortcut sees it as it is."""
    from diffusers import UNet2DModel  # pyright: ignore[reportPrivateImportUsage]

    model = UNet2DModel(
        sample_size=SIZE,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    if start != "authors":
        start_merges_(model, start)
    return model


def sensitivities(build: Callable[[], nn.Module]) -> list[float]:
    """√w_i / ‖out‖ of every skip: the relative change of the output for a relative change of the skip."""
    found: list[list[float]] = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = build()
        x, t = torch.randn(BATCH, 1, SIZE, SIZE), torch.full((BATCH,), 900.0)
        with torch.no_grad():
            output = model(x, t)
            size = float(getattr(output, "sample", output).square().sum()) / BATCH
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CancelledScalingWarning)
            found.append([math.sqrt(weight / size) for weight in skip_sensitivities(model, x, t)])
    return [fmean(values) for values in zip(*found, strict=True)]


def sensitivity_rows() -> list[dict[str, str]]:
    rows: list[tuple[str, Callable[[], nn.Module]]] = [
        (name, lambda options=options: uvit(**options)) for name, options in UVIT_STARTS.items()
    ]
    rows += [(f"UNet, {start}", lambda start=start: unet(start)) for start in ("authors", "additive")]
    return [
        {"start": name, **{f"skip {i}": f"{value:.2g}" for i, value in enumerate(sensitivities(build), start=1)}}
        for name, build in rows
    ]


@torch.no_grad()
def kernel_gains(weight: Tensor, size: int = SIZE) -> Tensor:
    """What a convolution multiplies each frequency of an image by: singular values, smallest first."""
    response = torch.fft.fft2(weight, s=(size, size)).permute(2, 3, 0, 1)
    return torch.linalg.svdvals(response).flatten().sort().values


def kernel_rows() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for channels in (1, 3):
        for seed in range(5):
            torch.manual_seed(seed)
            layer = uvit(channels, dim=64).final_conv
            assert isinstance(layer, nn.Conv2d)
            gains = kernel_gains(layer.weight)
            weak = float((gains < gains[-1] / 4).float().mean())
            rows.append(
                {
                    "channels": str(channels),
                    "seed": str(seed),
                    "smallest": f"{float(gains[0]):.3f}",
                    "median": f"{float(gains.median()):.2f}",
                    "largest": f"{float(gains[-1]):.2f}",
                    "below a quarter of the largest": f"{weak:.0%}",
                }
            )
    return rows


# Where a trained U-ViT errs, by noise level and by frequency

IMAGES = 256
EQUAL = 1e-4
"""Gains that are no further apart differ by rounding."""


@torch.no_grad()
def error_row(folder: Path) -> dict[str, str]:
    """Errors in ε of the averaged weights by quarter of the times, and how they follow the last convolution."""
    run = load_run(folder)
    convolution = getattr(run.model, "final_conv", None)
    if not isinstance(convolution, nn.Conv2d) or run.config.diffusion.prediction != "epsilon":
        raise InvalidConfigError(f"{folder} is not a U-ViT that predicts ε and ends in a convolution")
    data = load_run_data(run.config)
    x0 = data.inputs().clean(data.held_out or data.train, IMAGES)
    t = run.process.times(even_fractions(len(x0)))
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    error = noise - run.model(run.process.add_noise(x0, noise, t), t)
    by_image = error.square().mean((1, 2, 3))
    quarters = [float(part.mean()) for part in by_image.chunk(4)]
    gains = kernel_gains(convolution.weight, x0.shape[-1])
    return {
        "run": folder.name,
        **{f"error, quarter {i} of the times": f"{value:.4f}" for i, value in enumerate(quarters, start=1)},
        "gains of the last convolution": f"{float(gains[0]):.2f} to {float(gains[-1]):.2f}",
        "correlation of gain and error": _correlation(error[len(error) // 2 :], convolution.weight),
    }


def _correlation(error: torch.Tensor, weight: torch.Tensor) -> str:
    """Correlation of the logarithms over frequencies, at high noise; for one channel, where a frequency has one gain.

    The identity has the same gain for all, and there is nothing to correlate.
    """
    if weight.shape[:2] != (1, 1):
        return "-"
    spectrum = torch.fft.fft2(error).abs().square().mean((0, 1))
    response = torch.fft.fft2(weight[0, 0], s=error.shape[2:]).abs()
    if float(response.max() - response.min()) < EQUAL:
        return "-"
    found = float(torch.corrcoef(torch.stack([spectrum.flatten().log(), response.flatten().log()]))[0, 1])
    return f"{found:.2f}"


# The command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m research.starts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command_name")
    errors = commands.add_parser("errors", help="errors of trained U-ViTs by noise level and by frequency")
    errors.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    options = parser.parse_args(arguments)
    if options.command_name == "errors":
        return exit_code(lambda: print(text_table([error_row(folder) for folder in options.runs])))
    print("Relative change of the output for a relative change of each skip (outermost first), mean of 3 seeds:\n")
    print(text_table(sensitivity_rows()))
    print(
        "\nWhat the authors' last convolution multiplies the frequencies of its image by; the identity has 1 for all:\n"
    )
    print(text_table(kernel_rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
