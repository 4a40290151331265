"""How much each long skip of a network matters: w_j = E‖∂out/∂κ_j‖².

What it tells a user: which skips the output listens to. Theory (Eq. 3 with unit gain) says: to all equally. Real
networks differ, and scaling a skip with a small w_j changes little.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..scaling.base import Scaling, SkipScaling, SkipSite
from ..scaling.constant import FixedScaling, NoScaling
from .derivative import directional_derivative
from .jacobian import as_tensor, evaluating


class ProbeSkipScaling(SkipScaling):
    """Multiplies each skip by an entry of `kappas`, a tensor that a derivative can be taken with respect to."""

    kappas: Tensor

    def __init__(self, config: Scaling, sites: Sequence[SkipSite], kappas: Sequence[float]) -> None:
        super().__init__(config, sites)
        self.register_buffer("kappas", torch.tensor(kappas, dtype=torch.float64), persistent=False)

    def scale(self, skip: Tensor, index: int) -> Tensor:
        return skip * self.kappas[index - 1].to(skip.dtype)

    def coefficient(self, index: int) -> float:
        return float(self.kappas[index - 1])


@dataclass(frozen=True)
class ProbeScaling(Scaling):
    """A constant method whose coefficients can be differentiated. For measuring; it is not a method to train with."""

    base: FixedScaling
    built: list[ProbeSkipScaling] = field(default_factory=list, compare=False)

    name = "probe"

    def build(self, sites: Sequence[SkipSite]) -> ProbeSkipScaling:
        self.built.append(ProbeSkipScaling(self, sites, self.base.curve(len(sites))))
        return self.built[-1]


@contextmanager
def probing(model: nn.Module, base: FixedScaling, inputs: tuple[Any, ...]) -> Iterator[ProbeSkipScaling]:
    """The model with probes on its long skips; afterwards it is as it was, scaled or not."""
    from ..skips import is_scaled, scale_skips_, unscale_, unscaled

    config = ProbeScaling(base)
    with unscaled(model) if is_scaled(model) else nullcontext():
        scale_skips_(model, config, example_inputs=inputs)
        try:
            yield config.built[-1]
        finally:
            unscale_(model)


def count_skips(model: nn.Module, inputs: tuple[Any, ...] = ()) -> int:
    """N, the number of long skips. A model that does not know its own skips needs inputs to find them with."""
    with probing(model, NoScaling(), inputs) as probe:
        return len(probe.sites)


def skip_sensitivities(
    model: nn.Module,
    *inputs: Any,
    scaling: FixedScaling | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> list[float]:
    """w_1 ... w_N, outermost first, of model(*inputs) with its long skips scaled by `scaling` (none unless told).

    w_j is averaged over the batch: the squared norm of the derivative of one output. Costs N forwards, and leaves the
    model as it was.
    """
    with probing(model, scaling or NoScaling(), inputs) as probe, evaluating(model):

        def response(kappas: Tensor) -> Tensor:
            probe.kappas = kappas
            return as_tensor(model(*inputs), output)

        point = probe.kappas
        directions = torch.eye(len(point), dtype=point.dtype, device=point.device)
        tangents = [directional_derivative(response, point, direction) for direction in directions]
    return [float(tangent.double().square().sum()) / len(tangent) for tangent in tangents]
