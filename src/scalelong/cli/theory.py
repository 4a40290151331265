"""Check every theorem of the paper by measurement, on the network of Eq. (3) and on a small U-ViT."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from .options import add_quiet_option, load_images, seed_count
from .parser import Parser, whole_number


def parser() -> Parser:
    made = Parser("lab theory", __doc__ or "", "  scalelong lab theory --data garments\n")
    made.add_argument("--json", action="store_true", help="print the tables as JSON by their titles, and nothing else")
    made.add_argument("--data", action="append", default=[], metavar="DATA", help="also look at this data; repeatable")
    made.add_argument("--seeds", type=whole_number, default=300, help="networks per measurement (default: %(default)s)")
    add_quiet_option(made)
    return made


def run(options: argparse.Namespace) -> int:
    import torch

    from ..models import UViT
    from ..theory import checks, counterexample, noisy_batch

    seed_count(options, 2, ", so that there is a standard error")
    torch.manual_seed(0)
    data = {"uniform": torch.rand(2000, 1, 16, 16) * 2 - 1, **{spec: load_images(spec) for spec in options.data}}
    sizes: Any = {"image_size": 16, "patch_size": 4, "channels": 1, "dim": 128, "depth": 12, "heads": 4}
    model = UViT(**sizes, init_std=0.02, final_start="authors")
    batch = noisy_batch(torch.rand(4, 1, 16, 16) * 2 - 1)

    tables: dict[str, Sequence[dict[str, Any]]] = {}
    show = tables.__setitem__ if options.json else _show
    show(
        "Theorem 3.1, hidden features: measured / exact theory is 1, the paper's form fits unit gain only",
        checks.feature_rows(options.seeds),
    )
    show("Lemma 3.2 and Figure 3 a, b: the size of x_t, and of ε next to it", checks.input_rows(data))
    show(
        "Theorem 3.3, gradients: measured / theory over all matrices is 1 for independent residuals only",
        checks.gradient_rows(options.seeds),
    )
    found = counterexample()
    false = (
        "Theorem 3.4 as printed is false: N = 2, a_1 = diag(10, 0.1), b_1 = diag(0.1, 10), a_2 = I, b_2 swaps, f_2 = 0"
    )
    numbers = {"stated bound": found.stated, "true norm": found.actual, "corrected bound": found.corrected}
    if options.json:
        tables[false] = [numbers]
    else:
        print(f"{false}\n{', '.join(f'{name} {value:g}' for name, value in numbers.items())}\n")
    show("Theorem 3.4, corrected: it always holds, and it is loose", checks.robustness_rows())
    show(
        "The same quantities of a U-ViT (width 128, depth 12) at the start",
        checks.model_rows(model, batch.inputs, batch.steps),
    )
    if options.json:
        print(json.dumps(tables, ensure_ascii=False))
    return 0


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    from ..console import show_table

    show_table(rows, title)
    print()
