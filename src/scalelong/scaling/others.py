"""Methods of others: FreeU, and the paper's baselines: scaled residual branches (Table 3), starts of the merges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, require
from .base import UNSCALED, Constants, Scaling, SkipScaling, SkipSite, register_scaling, require_number

# FreeU (Si et al., CVPR 2024): at the innermost merges the main path is raised, and the skips lose low frequencies.
#
# At the two lowest resolutions l = 1, 2, with the FFT F over the positions and r the distance from the zero frequency:
#
#     main[:, : C/2]  ->  b_l · main[:, : C/2]
#     skip            ->  F⁻¹( F(skip) ⊙ (s_l where r is low, else 1) )
#
# It needs no training. This is the version that diffusers has (`unet.enable_freeu`), for any model.

THRESHOLD = 1
"""How many frequencies on either side of zero count as low."""


@register_scaling
@dataclass(frozen=True)
class FreeUScaling(Scaling):
    """FreeU: s_1, b_1 at the lowest resolution, s_2, b_2 at the next. The defaults are for Stable Diffusion 1.5."""

    s1: float = 0.9
    s2: float = 0.2
    b1: float = 1.5
    b2: float = 1.6

    name = "freeu"

    def validate(self) -> None:
        for name in ("s1", "s2", "b1", "b2"):
            require_number(name, getattr(self, name), -1e-300, float("inf"), "[0, inf)")

    def build(self, sites: Sequence[SkipSite]) -> "FreeUSkipScaling":
        return FreeUSkipScaling(self, sites)


class FreeUSkipScaling(SkipScaling):
    def __init__(self, config: FreeUScaling, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        levels = [(config.b1, config.s1), (config.b2, config.s2)]
        for site in sites:
            if site.level is None or site.channel_axis != 1:
                raise InvalidConfigError(
                    f"FreeU filters features of images, (B, C, H, W); long skip {site.index} has channels on axis "
                    f"{site.channel_axis} and {'no' if site.level is None else 'some'} rows and columns"
                )
        self._factors = [levels[site.level] if site.level is not None and site.level < 2 else None for site in sites]

    def constants(self, index: int) -> Constants | None:
        return UNSCALED if self._factors[index - 1] is None else None

    def scale(self, skip: Tensor, index: int) -> Tensor:
        factors = self._factors[index - 1]
        return skip if factors is None else scale_low_frequencies(skip, factors[1])

    def scales_main(self, index: int) -> bool:
        return self._factors[index - 1] is not None

    def scale_main(self, main: Tensor, index: int) -> Tensor:
        factors = self._factors[index - 1]
        if factors is None:
            return main
        first, second = main.split([main.shape[1] // 2, main.shape[1] - main.shape[1] // 2], 1)
        return torch.cat([first * factors[0], second], 1)

    def coefficient(self, index: int) -> float:
        """s, the factor of the low frequencies; the others keep 1."""
        factors = self._factors[index - 1]
        return 1.0 if factors is None else factors[1]


def scale_low_frequencies(x: Tensor, factor: float) -> Tensor:
    """Multiply the frequencies around zero, in both directions, of (B, C, H, W) features."""
    # The FFT knows half precision for powers of two only, and bf16 not at all.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    height, width = x.shape[-2:]
    frequencies = torch.fft.fft2(wide)
    rows, columns = (_is_low(size, x.device) for size in (height, width))
    low = rows[:, None] & columns[None, :]
    return torch.fft.ifft2(torch.where(low, frequencies * factor, frequencies)).real.to(x.dtype)


def _is_low(size: int, device: torch.device) -> Tensor:
    """The frequencies in [-THRESHOLD, THRESHOLD): a window around the middle of the shifted spectrum."""
    middle = size // 2
    shifted = torch.zeros(size, dtype=torch.bool, device=device)
    shifted[max(middle - THRESHOLD, 0) : middle + THRESHOLD] = True
    return torch.fft.ifftshift(shifted)


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


# How the layer after a concatenation starts: W [f_main · main ⊕ f_skip · skip], before the first step of training.

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
