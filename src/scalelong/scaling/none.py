from dataclasses import dataclass

from .fixed import FixedScaling
from .registry import register_scaling


@register_scaling
@dataclass(frozen=True)
class NoScaling(FixedScaling):
    """The baseline, κ_i = 1 (Eq. 3 with its standard coefficients)."""

    name = "none"

    def curve(self, count: int) -> tuple[float, ...]:
        return (1.0,) * count
