import math
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Constants, Scaling, SkipSite, require
from .fixed import FixedSkipScaling
from .registry import register_scaling


@register_scaling
@dataclass(frozen=True)
class MagnitudePreserving(Scaling):
    """Weights the main path by 1-t and the skip by t such that the merge keeps their magnitude (EDM2).

    For a concatenation of N_a main and N_b skip channels, EDM2's Eq. 103:

        MP-Cat(a, b, t) = √((N_a + N_b) / ((1-t)² + t²)) · [ (1-t)/√N_a · a  ⊕  t/√N_b · b ]

    and for an addition its Eq. 88: MP-Sum(a, b, t) = ((1-t) a + t b) / √((1-t)² + t²).
    """

    t: float = 0.5

    name = "mp"

    def validate(self) -> None:
        number = isinstance(self.t, int | float) and not isinstance(self.t, bool)
        require(number and 0 <= self.t <= 1, f"t must be a number in [0, 1], got {self.t!r}")

    def build(self, sites: Sequence[SkipSite]) -> FixedSkipScaling:
        return FixedSkipScaling(self, sites, [self._constants(site) for site in sites])

    def _constants(self, site: SkipSite) -> Constants:
        main, skip = 1 - self.t, self.t
        size = math.hypot(main, skip)
        if site.main_channels is None:
            return Constants(main / size, skip / size)
        width = site.main_channels + site.channels
        return Constants(
            main / size * math.sqrt(width / site.main_channels),
            skip / size * math.sqrt(width / site.channels),
        )
