"""The methods that normalise: an operand of the merge over its channels, at each position."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Scaling, SkipScaling, SkipSite, register_scaling, require_choice, require_kappa
from .constant import ConstantScaling
from .dynamic import recent_coefficient

EPSILON = 1e-6


@register_scaling
@dataclass(frozen=True)
class NormScaling(Scaling):
    """The skip is normalised over its channels at every position, then scaled by a CS curve κ^(i-1).

    With `norm="layer"` and κ = 1 it is the LayerNorm on the skip that U-ViT users add by hand against instability;
    `norm="rms"` divides by the root mean square only. There are no learned parameters.
    """

    kappa: float = 1.0
    norm: str = "layer"

    name = "norm"

    def validate(self) -> None:
        require_kappa(self.kappa)
        require_choice("norm", self.norm, ("layer", "rms"))

    def build(self, sites: Sequence[SkipSite]) -> "NormSkipScaling":
        return NormSkipScaling(self, sites)


class NormSkipScaling(SkipScaling):
    def __init__(self, config: NormScaling, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        self._center = config.norm == "layer"
        self._curve = ConstantScaling(config.kappa).curve(len(sites))
        self._recent: list[Tensor | None] = [None] * len(sites)

    def scale(self, skip: Tensor, index: int) -> Tensor:
        axis = self.sites[index - 1].channel_axis
        # Statistics in fp32: the square of a half-precision feature overflows beyond 256.
        wide = skip.float() if skip.dtype in (torch.float16, torch.bfloat16) else skip
        if self._center:
            wide = wide - wide.mean(axis, keepdim=True)
        factor = self._curve[index - 1] * torch.rsqrt(wide.square().mean(axis, keepdim=True) + EPSILON)
        self._recent[index - 1] = factor.detach()
        return (wide * factor).to(skip.dtype)

    def coefficient(self, index: int) -> Tensor:
        return recent_coefficient(self._recent[index - 1])
