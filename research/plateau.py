"""Where a U-ViT errs, by noise level and by frequency: `python -m research.plateau RUN...`."""

import sys
from pathlib import Path

import torch
from torch import nn

from scalelong.console import text_table
from scalelong.errors import InvalidConfigError
from scalelong.experiments.runs import exit_code
from scalelong.noise import even_fractions
from scalelong.runs.load import load_run
from scalelong.runs.model import load_run_data

from .starts import kernel_gains

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
    """Of the logarithms over frequencies, at high noise; for one channel, where a frequency has one gain.

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


def main(folders: list[str]) -> int:
    return exit_code(lambda: print(text_table([error_row(Path(folder)) for folder in folders])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
