import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidConfigError
from .base import require
from .fixed import FixedScaling
from .registry import register_scaling


@register_scaling
@dataclass(frozen=True)
class CustomScaling(FixedScaling):
    """The κ_i given one by one, outermost first: `CustomScaling((1.0, 0.5, 0.5))`. Zero cuts a skip."""

    kappas: tuple[float, ...]

    name = "custom"

    def __post_init__(self) -> None:
        values = self.kappas if isinstance(self.kappas, Sequence) else (self.kappas,)
        object.__setattr__(self, "kappas", tuple(values))
        self.validate()

    def validate(self) -> None:
        numbers = all(isinstance(k, int | float) and math.isfinite(k) and k >= 0 for k in self.kappas)
        require(numbers and len(self.kappas) > 0, f"kappas must be finite numbers >= 0, got {self.kappas!r}")

    def curve(self, count: int) -> tuple[float, ...]:
        if len(self.kappas) != count:
            raise InvalidConfigError(f"{len(self.kappas)} coefficients were given for {count} long skips")
        return self.kappas
