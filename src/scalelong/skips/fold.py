"""Bake constant coefficients into the weights behind the merges."""

from dataclasses import dataclass, field

from torch import nn

from ..errors import NotScaledError
from ..scaling.base import Constants
from .api import _host, is_scaled, unscale_


@dataclass(frozen=True)
class FoldReport:
    """Which long skips (i) are in the weights now, and which could not be folded, with the reason."""

    folded: tuple[int, ...] = ()
    kept: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"folded: {', '.join(map(str, self.folded)) or 'none'}"]
        lines += [f"kept: {index}: {reason}" for index, reason in self.kept.items()]
        return "\n".join(lines)


def fold_(model: nn.Module, *, inverse: bool = False) -> FoldReport:
    """Bake constant coefficients into the weights, in place: same function, no scaling left. Twice is harmless.

    `inverse=True` divides the weights instead and keeps the scaling, so that scaling can be attached to a trained
    model without changing its function.
    """
    host = _host(model)
    scaling = host.skip_scaling
    if not is_scaled(model):
        if inverse:
            raise NotScaledError("scale the long skips first; then fold_(model, inverse=True) compensates for it")
        return FoldReport()
    indices = [site.index for site in scaling.sites]
    factors = {index: scaling.constants(index) for index in indices}
    kept = {index: "its coefficients depend on the data" for index in indices if factors[index] is None}
    if kept:
        return FoldReport(kept=kept)
    for index, constants in factors.items():
        assert constants is not None
        host.fold_skip(index, Constants(1 / constants.main, 1 / constants.skip) if inverse else constants)
    if not inverse:
        unscale_(model)
    return FoldReport(folded=tuple(indices))
