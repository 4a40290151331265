"""`scalelong theory`: the paper's statements against measurements, as tables and figures."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import show_table
from ..errors import InvalidConfigError
from ..theory import checks, checks as figures, counterexample, noisy_batch


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scalelong theory",
        description="Check every theorem of the paper on the network of Eq. (3), and on a small U-ViT.",
    )
    parser.add_argument("--output", type=Path, help="folder for the figures (none are drawn without it)")
    parser.add_argument(
        "--data", action="append", default=[], metavar="DATA", help="also look at this data; repeatable"
    )
    parser.add_argument("--seeds", type=int, default=300, help="networks per measurement (default 300)")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        raise InvalidConfigError(f"--seeds must be at least 2, so that there is a standard error, got {options.seeds}")

    from ..models import UViT

    torch.manual_seed(0)
    data = {"uniform": torch.rand(2000, 1, 16, 16) * 2 - 1, **{spec: load_images(spec) for spec in options.data}}
    sizes: Any = {"image_size": 16, "patch_size": 4, "channels": 1, "dim": 128, "depth": 12, "heads": 4}
    model = UViT(**sizes, init_std=0.02, final_start="authors")
    batch = noisy_batch(torch.rand(4, 1, 16, 16) * 2 - 1)

    _show(
        "Theorem 3.1, hidden features: measured / exact theory is 1, the paper's form fits unit gain only",
        checks.feature_rows(options.seeds),
    )
    _show("Lemma 3.2 and Figure 3 a, b: the size of x_t, and of ε beside it", checks.input_rows(data))
    _show(
        "Theorem 3.3, gradients: measured / theory over all matrices is 1 for independent residuals only",
        checks.gradient_rows(options.seeds),
    )
    found = counterexample()
    print(
        "Theorem 3.4 as printed is false: N = 2, a_1 = diag(10, 0.1), b_1 = diag(0.1, 10), a_2 = I, b_2 swaps, f_2 = 0"
    )
    print(f"stated bound {found.stated:g}, true norm {found.actual:g}, corrected bound {found.corrected:g}\n")
    _show("Theorem 3.4, corrected: it always holds, and it is loose", checks.robustness_rows())
    _show(
        "The same quantities of a U-ViT (width 128, depth 12) at the start",
        checks.model_rows(model, batch.inputs, batch.steps),
    )
    if options.output is not None:
        drawn = {
            "features": figures.draw_features(seeds=options.seeds),
            "inputs": figures.draw_inputs(data),
            "gradients": figures.draw_gradients(seeds=options.seeds),
            "robustness": figures.draw_robustness(),
            "noise": figures.draw_noise(model, batch.inputs, batch.steps),
        }
        for name, figure in drawn.items():
            print(figures.save(figure, options.output / f"{name}.png"))
    return 0


def load_images(
    spec: str, limit: int = 4096, size: int | tuple[int, int] | None = None, channels: int | None = None
) -> Tensor:
    """Images of a data set, evenly chosen, in [-1, 1]."""
    from ..data import load_data

    data = load_data(spec, limit=limit, size=size, channels=channels)
    return data.fetch(range(len(data))).images.float() / 127.5 - 1


def _show(title: str, rows: list[checks.Row]) -> None:
    show_table(rows, title)
    print()
