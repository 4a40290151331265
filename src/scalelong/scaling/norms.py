"""The methods that normalise: an operand of each merge over its channels, at every position.

merge_norm   W [norm(main) ⊕ κ_i skip]    holds: the main path of a U has no identity around its merges
norm         W [main ⊕ κ_i norm(skip)]    does not hold
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedModelError, require
from .base import (
    Constants,
    Scaling,
    SkipScaling,
    SkipSite,
    register_scaling,
    require_choice,
    require_kappa,
)
from .constant import ConstantScaling
from .dynamic import recent_coefficient

logger = logging.getLogger(__name__)

EPSILON = 1e-5
"""As nn.LayerNorm has it."""
UNFOLDABLE = "a norm cannot be folded into weights"


@register_scaling
@dataclass(frozen=True)
class MergeNorm(Scaling):
    """The main path is normalised over its channels as it enters each merge, at every position, without parameters.

    `on`: "main", or "both" operands, each by itself. `norm`: "layer", or "rms", which divides by the root mean square
    only. Statistics are computed in fp32. `kappa`: a CS curve κ^(i-1) on the skips besides, after their norm.

    Where a norm reads the concatenation already, as in DDPM's UNets, HunyuanDiT and Skip-DiT, nothing is done; where
    operands are added it is refused, because it was not shown to help. `everywhere=True` normalises these, too.
    """

    on: str = "main"
    norm: str = "layer"
    kappa: float | None = None
    everywhere: bool = False

    name = "merge_norm"
    behind_norms = True
    """κ where a norm reads the concatenation already: after that norm."""
    unfoldable = UNFOLDABLE

    def validate(self) -> None:
        require_choice("on", self.on, ("main", "both"))
        require_choice("norm", self.norm, ("layer", "rms"))
        if self.kappa is not None:
            require_kappa(self.kappa)
        require(isinstance(self.everywhere, bool), f"everywhere must be true or false, got {self.everywhere!r}")

    def build(self, sites: Sequence[SkipSite]) -> "MergeNormScaling":
        added = [site.index for site in sites if site.main_channels is None]
        if added and not self.everywhere:
            raise UnsupportedModelError(
                f"merge_norm is for merges that concatenate; long skips {', '.join(map(str, added))} are added to the "
                f"main path, where it was not shown to help. Train with a lower learning rate, or with Muon; "
                f"MergeNorm(everywhere=True) tries it all the same"
            )
        scaling = MergeNormScaling(self, sites)
        norms = scaling.own_norms()
        if norms:
            listed = "; ".join(f"long skip {index}: {norm}" for index, norm in norms.items())
            logger.warning(
                "merge_norm: a norm follows %d of %d merges, which stay as they are (%s)",
                len(norms),
                len(sites),
                listed,
            )
        return scaling


class MergeNormScaling(SkipScaling):
    config: MergeNorm

    def __init__(self, config: MergeNorm, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        self._curve = ConstantScaling(1.0 if config.kappa is None else config.kappa).curve(len(sites))

    def normalises(self, index: int) -> bool:
        """Whether a norm is put at merge i: not where the network has one already."""
        return self.config.everywhere or not self.sites[index - 1].norm

    def own_norms(self) -> dict[int, str]:
        return {site.index: site.norm for site in self.sites if not self.normalises(site.index)}

    def constants(self, index: int) -> Constants | None:
        return None if self.normalises(index) else Constants(1.0, self._curve[index - 1])

    def scales_skip(self, index: int) -> bool:
        return self.config.on == "both" or self._curve[index - 1] != 1.0

    def scales_main(self, index: int) -> bool:
        return self.normalises(index)

    def scale(self, skip: Tensor, index: int) -> Tensor:
        kappa = self._curve[index - 1]
        if self.config.on == "both" and self.normalises(index):
            skip = self._normalised(skip, index)
        return skip if kappa == 1.0 else skip * kappa

    def scale_main(self, main: Tensor, index: int) -> Tensor:
        return self._normalised(main, index) if self.normalises(index) else main

    def coefficient(self, index: int) -> float:
        """κ_i of the curve; what a norm divides by is not in it."""
        return self._curve[index - 1]

    def _normalised(self, x: Tensor, index: int) -> Tensor:
        axis = self.sites[index - 1].channel_axis % x.dim()
        if self.config.norm == "layer" and axis == x.dim() - 1:
            # One kernel, whose statistics are in fp32 for any type.
            return F.layer_norm(x, (x.shape[axis],), eps=EPSILON).to(x.dtype)
        # The square of a half-precision feature overflows beyond 256.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.config.norm == "layer":
            wide = wide - wide.mean(axis, keepdim=True)
        return (wide * torch.rsqrt(wide.square().mean(axis, keepdim=True) + EPSILON)).to(x.dtype)


@register_scaling
@dataclass(frozen=True)
class NormScaling(Scaling):
    """The skip alone is normalised over its channels at every position, then scaled by a CS curve κ^(i-1).

    It does not stabilise: at a rate at which U-ViT collapses, 0 of 4 runs survived with it, and 4 of 4 with the norm on
    the main path (`MergeNorm`). `norm="rms"` divides by the root mean square only.
    """

    kappa: float = 1.0
    norm: str = "layer"

    name = "norm"
    unfoldable = UNFOLDABLE

    def validate(self) -> None:
        require_kappa(self.kappa)
        require_choice("norm", self.norm, ("layer", "rms"))

    def build(self, sites: Sequence[SkipSite]) -> "NormSkipScaling":
        warnings.warn(
            "a norm on the skip alone does not stabilise: 0 of 4 runs survived with it, and 4 of 4 with the norm on "
            'the main path, which is the scaling "merge_norm"',
            UserWarning,
            stacklevel=3,
        )
        return NormSkipScaling(self, sites)


class NormSkipScaling(SkipScaling):
    def __init__(self, config: NormScaling, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        self._center = config.norm == "layer"
        self._curve = ConstantScaling(config.kappa).curve(len(sites))
        self._recent: list[Tensor | None] = [None] * len(sites)

    def scale(self, skip: Tensor, index: int) -> Tensor:
        axis = self.sites[index - 1].channel_axis
        wide = skip.float() if skip.dtype in (torch.float16, torch.bfloat16) else skip
        if self._center:
            wide = wide - wide.mean(axis, keepdim=True)
        factor = self._curve[index - 1] * torch.rsqrt(wide.square().mean(axis, keepdim=True) + 1e-6)
        self._recent[index - 1] = factor.detach()
        return (wide * factor).to(skip.dtype)

    def coefficient(self, index: int) -> Tensor:
        return recent_coefficient(self._recent[index - 1])
