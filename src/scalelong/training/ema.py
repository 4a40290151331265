"""The exponential moving average of the weights, in float32."""
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..runs.config import OptimizerConfig
from ..runs.processes import whole


class Ema:
    """w̄ ← w̄ + (1 - rate) (w - w̄), after every step. Frozen parameters are averaged too, which keeps them."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.names = [name for name, _ in model.named_parameters()]
        self.weights: list[Tensor] = [parameter for _, parameter in model.named_parameters()]
        self.averages: list[Tensor] = [
            weight.detach().clone(memory_format=torch.preserve_format).float() for weight in self.weights
        ]

    def rate(self, step: int) -> float:
        if self.config.ema_warmup:
            return min(self.config.ema_rate, (1 + step) / (10 + step))
        return self.config.ema_rate

    @torch.no_grad()
    def update(self, step: int) -> None:
        torch._foreach_lerp_(self.averages, self._float_weights(), 1.0 - self.rate(step))

    @torch.no_grad()
    def distance(self) -> Tensor:
        """‖w̄ - w‖ / ‖w‖. It stays 0 if the average is not updated, and grows if the weights run away."""
        weights = self._float_weights()
        difference = _norm(torch._foreach_sub(self.averages, weights))
        return difference / _norm(weights).clamp_min(torch.finfo(torch.float32).tiny)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with averaged weights, within a `with` block."""
        with torch.no_grad():
            kept = [weight.detach().clone(memory_format=torch.preserve_format) for weight in self.weights]
            _copy(self.weights, self.averages)
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(self.weights, kept)

    def _float_weights(self) -> list[Tensor]:
        return [weight.detach().float() for weight in self.weights]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    # One by one: torch._foreach_copy_ does not know sharded tensors.
    for to, source in zip(targets, sources, strict=True):
        to.copy_(source)


def _norm(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return whole(torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(list(tensors))))))
