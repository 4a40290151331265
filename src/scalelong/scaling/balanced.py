from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidConfigError
from .base import require, require_kappa, require_number
from .fixed import FixedScaling
from .registry import register_scaling


@register_scaling
@dataclass(frozen=True)
class BalancedScaling(FixedScaling):
    """κ_i = min(1, κ^(i-1) / √(w_i/w_1)): what Eq. 8 wants the skips to contribute, on the network at hand.

    Skip i contributes κ_i² w_i to the second moment of the output, where w_i = E‖∂out/∂κ_i‖². Eq. 8 was derived where
    all w_i are equal; here they are measured (`scalelong.kappa.balanced_scaling` does it), so that the contributions,
    not the coefficients, fall as κ^(2(i-1)). A skip that the network hardly listens to is left alone.
    """

    weights: tuple[float, ...]
    kappa: float = 0.7

    name = "balanced"

    def __post_init__(self) -> None:
        values = self.weights if isinstance(self.weights, Sequence) else (self.weights,)
        object.__setattr__(self, "weights", tuple(values))
        self.validate()

    def validate(self) -> None:
        require_kappa(self.kappa)
        require(len(self.weights) > 0, "weights must be the sensitivities w_1 ... w_N, got none")
        for weight in self.weights:
            require_number("each of weights", weight, -1e-300, float("inf"), "[0, inf)")
        require(self.weights[0] > 0, "the outermost skip must have a weight above 0")

    def curve(self, count: int) -> tuple[float, ...]:
        if len(self.weights) != count:
            raise InvalidConfigError(f"{len(self.weights)} weights were given for {count} long skips")
        # min(1, √(κ^(2(i-1)) w_1 / w_i)) without dividing by a w_i of zero.
        wanted = [self.kappa ** (2 * i) * self.weights[0] for i in range(count)]
        pairs = zip(wanted, self.weights, strict=True)
        return tuple(1.0 if have <= want else (want / have) ** 0.5 for want, have in pairs)
