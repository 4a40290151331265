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
from torch import Tensor, nn

from ..errors import UnsupportedModelError, require
from .base import (
    UNSCALED,
    Constants,
    Scaling,
    SkipScaling,
    SkipSite,
    register_scaling,
    require_choice,
    require_kappa,
)
from .constant import ConstantScaling
from .dynamic import FullPrecisionModule, recent_coefficient

logger = logging.getLogger(__name__)

EPSILON = 1e-5
"""As nn.LayerNorm has it."""
UNFOLDABLE = "a norm cannot be folded into weights"


@register_scaling
@dataclass(frozen=True)
class MergeNorm(Scaling):
    """The main path is normalised over its channels as it enters each merge, at every position, without parameters.

    `on`: "main", "both" (each operand by itself) or "concatenation" (both by common statistics).
    `norm`: "layer", or "rms", which divides by the root mean square only. Statistics are computed in fp32.
    `kappa`: a CS curve κ^(i-1) on the skips besides, after their norm if they have one. `gain`: a learned factor for
    each channel that was normalised, 1 at first.

    Where a norm reads the concatenation already, as in DDPM's UNets, HunyuanDiT and Skip-DiT, nothing is done; where
    operands are added it is refused, because it was not shown to help. `everywhere=True` normalises these, too.
    """

    on: str = "main"
    norm: str = "layer"
    kappa: float | None = None
    gain: bool = False
    everywhere: bool = False

    name = "merge_norm"
    behind_norms = True
    """κ where a norm reads the concatenation already: after that norm."""
    unfoldable = UNFOLDABLE

    def validate(self) -> None:
        require_choice("on", self.on, ("main", "both", "concatenation"))
        require_choice("norm", self.norm, ("layer", "rms"))
        if self.kappa is not None:
            require_kappa(self.kappa)
        for name in ("gain", "everywhere"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")

    def build(self, sites: Sequence[SkipSite]) -> "MergeNormScaling":
        added = [site.index for site in sites if site.main_channels is None]
        if added and (self.on == "concatenation" or not self.everywhere):
            forced = "" if self.on == "concatenation" else "; MergeNorm(everywhere=True) tries it all the same"
            raise UnsupportedModelError(
                f"merge_norm is for merges that concatenate; long skips {', '.join(map(str, added))} are added to the "
                f"main path, where it was not shown to help. Train with a lower learning rate, or with Muon{forced}"
            )
        scaling = MergeNormScaling(self, sites)
        norms = scaling.own_norms()
        if norms:
            every = "every merge of this network, so nothing is attached"
            which = (
                every if len(norms) == len(sites) else f"{len(norms)} of {len(sites)} merges, which stay as they are"
            )
            listed = "; ".join(f"long skip {index}: {norm}" for index, norm in norms.items())
            logger.warning("merge_norm: a norm follows %s (%s)", which, listed)
        return scaling


class MergeNormScaling(FullPrecisionModule, SkipScaling):
    config: MergeNorm

    def __init__(self, config: MergeNorm, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        self.scales_merged = config.on == "concatenation"
        self._curve = ConstantScaling(1.0 if config.kappa is None else config.kappa).curve(len(sites))
        normed = [site for site in sites if self.normalises(site.index)] if config.gain else []
        self.main_gains = _ones({site.index: site.main_channels or site.channels for site in normed})
        self.skip_gains = _ones({site.index: site.channels for site in normed if config.on != "main"})

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
            skip = self._normalised(skip, index, _gain(self.skip_gains, index))
        return skip if kappa == 1.0 else skip * kappa

    def scale_main(self, main: Tensor, index: int) -> Tensor:
        return self._normalised(main, index, _gain(self.main_gains, index)) if self.normalises(index) else main

    def scale_merged(self, merged: Tensor, index: int, skip_start: int) -> Tensor:
        site, kappa = self.sites[index - 1], self._curve[index - 1]
        gain = None
        if self.config.gain:
            gains = [self.main_gains[str(index)], self.skip_gains[str(index)]]
            gain = torch.cat(gains if skip_start else gains[::-1])
        normed = self._normalised(merged, index, gain)
        if kappa == 1.0:
            return normed
        axis = site.channel_axis
        widths = (skip_start, site.channels, merged.shape[axis] - skip_start - site.channels)
        before, skip, after = normed.split(widths, axis)
        return torch.cat([before, skip * kappa, after], axis)

    def operands(self, main: Tensor, skip: Tensor, index: int) -> tuple[Tensor, Tensor, Constants, Tensor | None]:
        if not (self.scales_merged and self.normalises(index)):
            return super().operands(main, skip, index)
        axis = self.sites[index - 1].channel_axis
        merged = self.scale_merged(torch.cat([main, skip], axis), index, main.shape[axis])
        main, skip = merged.split((main.shape[axis], skip.shape[axis]), axis)
        return main, skip, UNSCALED, None

    def prepare(self, skip: Tensor, index: int) -> tuple[Tensor, Constants, Tensor | None]:
        if self.config.on == "both" and self.normalises(index):
            return self.scale(skip, index), UNSCALED, None
        return skip, Constants(1.0, self._curve[index - 1]), None

    def coefficient(self, index: int) -> float:
        """κ_i of the curve; what a norm divides by is not in it."""
        return self._curve[index - 1]

    def _normalised(self, x: Tensor, index: int, gain: Tensor | None) -> Tensor:
        return normalised(x, self.sites[index - 1].channel_axis, self.config.norm, gain)


def _ones(widths: dict[int, int]) -> nn.ParameterDict:
    return nn.ParameterDict({str(index): nn.Parameter(torch.ones(width)) for index, width in widths.items()})


def _gain(gains: nn.ParameterDict, index: int) -> Tensor | None:
    return gains.get(str(index))


def normalised(x: Tensor, axis: int, norm: str = "layer", gain: Tensor | None = None) -> Tensor:
    """x with mean 0 and variance 1 ("layer"), or mean square 1 ("rms"), along an axis, times a gain for each channel.

    Statistics are computed in fp32, because the square of a half-precision feature overflows beyond 256.
    """
    dtype, axis = x.dtype, axis % x.dim()
    if norm == "layer" and axis == x.dim() - 1:
        # One kernel, whose statistics are in fp32 for any type.
        weight = None if gain is None else gain.to(dtype)
        return F.layer_norm(x, (x.shape[axis],), weight, None, EPSILON).to(dtype)
    wide = x.float() if dtype in (torch.float16, torch.bfloat16) else x
    if norm == "layer":
        variance, mean = torch.var_mean(wide, axis, correction=0, keepdim=True)
        wide = (wide - mean) * torch.rsqrt(variance + EPSILON)
    else:
        wide = wide * torch.rsqrt(wide.square().mean(axis, keepdim=True) + EPSILON)
    if gain is not None:
        wide = wide * gain.to(wide.dtype).view(-1, *[1] * (x.dim() - 1 - axis))
    return wide.to(dtype)


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
