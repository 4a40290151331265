"""Scaling by constants: the part that all constant methods share. Such scaling costs nothing and can be folded."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .base import Constants, Scaling, SkipScaling, SkipSite


class FixedSkipScaling(SkipScaling):
    """Multiplies the operands of each merge by constants. Has no parameters and adds nothing to a state_dict."""

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

    @abstractmethod
    def curve(self, count: int) -> tuple[float, ...]:
        """κ_1 ... κ_N."""

    def build(self, sites: Sequence[SkipSite]) -> FixedSkipScaling:
        return FixedSkipScaling(self, sites, [Constants(1.0, kappa) for kappa in self.curve(len(sites))])
