from dataclasses import dataclass

from .base import require_kappa
from .fixed import FixedScaling
from .registry import register_scaling


@register_scaling
@dataclass(frozen=True)
class UniformScaling(FixedScaling):
    """κ_i = κ for every skip; with κ = 1/√2 the "1/√2-CS" of Imagen, SR3, score-SDE and StyleGAN (Section 1)."""

    kappa: float = 2**-0.5

    name = "uniform"

    def validate(self) -> None:
        require_kappa(self.kappa)

    def curve(self, count: int) -> tuple[float, ...]:
        return (self.kappa,) * count
