"""A host: a model that knows its own long skips and scales them itself, without hooks."""

from typing import Protocol, runtime_checkable

from torch import nn

from ..scaling.base import Constants, SkipScaling, SkipSite


@runtime_checkable
class SkipHost(Protocol):
    skip_scaling: SkipScaling

    def skip_sites(self) -> tuple[SkipSite, ...]:
        """The long skips, outermost first."""
        ...

    def fold_skip(self, index: int, factors: Constants) -> None:
        """Bake the factors of merge i into the weights behind it."""
        ...


def unwrap(model: nn.Module) -> nn.Module:
    """The model behind torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)
