"""How the layer behind a concatenation starts: W [f_main · main ⊕ f_skip · skip], before the first step of training."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InvalidConfigError
from .base import UNSCALED, Constants

MERGE_STARTS = ("authors", "identity", "additive", "normalised")
"""- "authors": random weights, as everywhere in the network.
- "identity": [I | random]: the main path goes through as it is.
- "additive": [I | I]: the merge begins as Eq. (3)'s addition, main + κ skip, with the κ of the scaling.
- "normalised": the same divided by √(f_main² + f_skip²), which keeps the size of operands that have nothing in common.
"""


def require_merge_start(start: str, known: Sequence[str] = MERGE_STARTS) -> None:
    if start not in known:
        raise InvalidConfigError(f"merge_start must be one of {', '.join(known)}, got {start!r}")


@torch.no_grad()
def start_merge_(main: Tensor, skip: Tensor, start: str, factors: Constants = UNSCALED) -> None:
    """Set the weights of the two operands, (out, in, ...) each, in place. What `start` leaves random is not touched.

    `factors` are those by which the operands are multiplied before they get here.
    """
    if start == "authors":
        return
    _identity_(main)
    if start == "identity":
        return
    _identity_(skip)
    if start == "normalised":
        size = math.hypot(*factors)
        main.div_(size)
        skip.div_(size)


def _identity_(weight: Tensor) -> None:
    """The identity; for a convolution, in the middle of its kernel."""
    middle = tuple(size // 2 for size in weight.shape[2:])
    weight.zero_()
    weight[(..., *middle)].fill_diagonal_(1.0)
