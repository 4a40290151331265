"""What the paper compares with: scaled residual branches (Table 3), and other starts of the merges."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from .base import UNSCALED, Constants, require

# The block-output baselines of the paper's Table 3: they scale residual branches, not long skips.
#
# x + τ f(x)        "stable τ": a fixed number, as in `residual_scaling=0.3`
# x + α f(x)        ReZero: α is learned, one for each branch, and starts at 0

ResidualSpec = str | float
"""`"none"`, `"rezero"`, or τ in (0, 1]."""


class ResidualBranch(nn.Module):
    """Adds a branch to the stream, scaled."""

    def __init__(self, spec: ResidualSpec = "none") -> None:
        super().__init__()
        validate_residual(spec)
        self.alpha = nn.Parameter(torch.zeros(())) if spec == "rezero" else None
        self.tau = float(spec) if not isinstance(spec, str) else 1.0

    def scale(self, branch: Tensor) -> Tensor:
        """The branch as it is added."""
        if self.alpha is not None:
            return branch * self.alpha.to(branch.dtype)
        return branch if self.tau == 1.0 else branch * self.tau

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        if self.alpha is not None:
            return x + self.scale(branch)
        return torch.add(x, branch, alpha=self.tau)


def validate_residual(spec: ResidualSpec) -> None:
    number = isinstance(spec, int | float) and not isinstance(spec, bool) and 0 < spec <= 1
    require(
        number or spec in ("none", "rezero"),
        f"residual_scaling must be 'none', 'rezero' or a number in (0, 1], got {spec!r}",
    )


# How the layer behind a concatenation starts: W [f_main · main ⊕ f_skip · skip], before the first step of training.

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
