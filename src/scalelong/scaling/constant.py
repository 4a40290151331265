from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .base import SkipSite, require, require_kappa
from .fixed import FixedScaling, FixedSkipScaling
from .registry import register_scaling

AUTO = "auto"


@register_scaling
@dataclass(frozen=True)
class ConstantScaling(FixedScaling):
    """CS, κ_i = κ^(i-1) (Eq. 8): the outermost skip is kept, inner ones fade. The paper suggests κ in [0.5, 0.95].

    `kappa="auto"` takes κ from the number of skips, by `scalelong.kappa` at the paper's assumptions about the data; use
    `choose_kappa(..., data=...)` where there is data. A built scaling holds the number that was chosen.
    `reverse=True` is the paper's ablation κ_i = κ^(N-i+1) (Table 4), which it found clearly worse.
    `behind_norms=True` multiplies the skip where the convolutions read it, behind a normalisation that would divide κ
    out again; where none comes right behind the merge, it changes nothing.
    """

    kappa: float | Literal["auto"] = 0.7
    reverse: bool = False
    behind_norms: bool = False

    name = "cs"

    def validate(self) -> None:
        if self.kappa != AUTO:
            require_kappa(self.kappa)
        for name in ("reverse", "behind_norms"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")

    def resolved(self, count: int) -> "ConstantScaling":
        """This configuration for N skips, with a number in place of "auto"."""
        if self.kappa != AUTO:
            return self
        from ..kappa import choose_kappa

        return self.replace(kappa=choose_kappa(skips=count).kappa)

    def curve(self, count: int) -> tuple[float, ...]:
        kappa = self.resolved(count).kappa
        exponents = range(count, 0, -1) if self.reverse else range(count)
        return tuple(float(kappa) ** exponent for exponent in exponents)

    def build(self, sites: Sequence[SkipSite]) -> FixedSkipScaling:
        # What is saved with a model is the number, not the way that it was found.
        return FixedScaling.build(self.resolved(len(sites)), sites)
