"""The constant methods, whose κ_i are numbers. They cost nothing and can be folded into weights."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import InvalidConfigError, require
from .base import Constants, Scaling, SkipScaling, SkipSite, register_scaling, require_kappa


class FixedSkipScaling(SkipScaling):
    """Multiplies the operands of each merge by constants. Has no parameters."""

    def __init__(self, config: Scaling, sites: Sequence[SkipSite], constants: Sequence[Constants]) -> None:
        super().__init__(config, sites)
        self._constants = tuple(constants)

    def constants(self, index: int) -> Constants:
        return self._constants[index - 1]

    def scale(self, skip: Tensor, index: int) -> Tensor:
        kappa = self._constants[index - 1].skip
        return skip if kappa == 1.0 else skip * kappa

    def coefficient(self, index: int) -> float:
        return self._constants[index - 1].skip


@dataclass(frozen=True)
class FixedScaling(Scaling):
    """Base of the methods whose κ_i are numbers: a subclass only says its curve."""

    looks_at_data = False

    @abstractmethod
    def curve(self, count: int) -> tuple[float, ...]:
        """κ_1 ... κ_N."""

    def build(self, sites: Sequence[SkipSite]) -> FixedSkipScaling:
        return FixedSkipScaling(self, sites, [Constants(1.0, kappa) for kappa in self.curve(len(sites))])


@register_scaling
@dataclass(frozen=True)
class NoScaling(FixedScaling):
    """The baseline, κ_i = 1 (Eq. 3 with its standard coefficients)."""

    name = "none"

    def curve(self, count: int) -> tuple[float, ...]:
        return (1.0,) * count


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


@register_scaling
@dataclass(frozen=True)
class ConstantScaling(FixedScaling):
    """CS, κ_i = κ^(i-1) (Eq. 8): the outermost skip is kept, inner ones fade. The paper suggests κ in [0.5, 0.95].

    `reverse=True` is the paper's ablation κ_i = κ^(N-i+1) (Table 4), which it found clearly worse.
    `behind_norms=True` multiplies the skip where the convolutions read it, after a normalisation that would divide κ
    out again; where none follows the merge, it changes nothing.
    """

    kappa: float = 0.7
    reverse: bool = False
    behind_norms: bool = False

    name = "cs"

    def validate(self) -> None:
        require_kappa(self.kappa)
        for name in ("reverse", "behind_norms"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")

    def curve(self, count: int) -> tuple[float, ...]:
        exponents = range(count, 0, -1) if self.reverse else range(count)
        return tuple(float(self.kappa) ** exponent for exponent in exponents)


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
            raise InvalidConfigError(
                f"{len(self.kappas)} coefficients were given for {count} long skips: give one for each"
            )
        return self.kappas


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
    looks_at_data = False

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
