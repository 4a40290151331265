"""The block-output baselines of the paper's Table 3: they scale residual branches, not long skips.

x + τ f(x)        "stable τ": a fixed number, as in `residual_scaling=0.3`
x + α f(x)        ReZero: α is learned, one for each branch, and starts at 0
"""

import torch
from torch import Tensor, nn

from .base import require

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
