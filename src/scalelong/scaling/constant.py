from dataclasses import dataclass

from .base import require, require_kappa
from .fixed import FixedScaling
from .registry import register_scaling


@register_scaling
@dataclass(frozen=True)
class ConstantScaling(FixedScaling):
    """CS, κ_i = κ^(i-1) (Eq. 8): the outermost skip is kept, inner ones fade. The paper suggests κ in [0.5, 0.95].

    `reverse=True` is the paper's ablation κ_i = κ^(N-i+1) (Table 4), which it found clearly worse.
    """

    kappa: float = 0.7
    reverse: bool = False

    name = "cs"

    def validate(self) -> None:
        require_kappa(self.kappa)
        require(isinstance(self.reverse, bool), f"reverse must be true or false, got {self.reverse!r}")

    def curve(self, count: int) -> tuple[float, ...]:
        exponents = range(count, 0, -1) if self.reverse else range(count)
        return tuple(self.kappa**exponent for exponent in exponents)
