"""Classifier-free guidance (Ho & Salimans, 2022)."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InvalidConfigError
from .objective import Predict

Conditional = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A network that takes x_t, the times and the condition."""


def guided(network: Conditional, condition: Tensor | None, null: Tensor | None, scale: float) -> Predict:
    """F(x, ∅) + w (F(x, c) - F(x, ∅)). With w = 1 the condition alone is used, with w = 0 it is ignored.

    The U-ViT authors count from there: their scale s is w = 1 + s.
    """
    if condition is None or scale == 1:
        return lambda x, t: network(x, t, condition)
    if null is None:
        raise InvalidConfigError(
            f"guidance {scale:g} needs a model that also knows the hidden condition; this one was trained with "
            f"condition_dropout 0, so only guidance 1 is possible"
        )
    hidden = null.to(condition.device).expand_as(condition)

    def predict(x: Tensor, t: Tensor) -> Tensor:
        both = network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([condition, hidden]))
        told, untold = both.chunk(2)
        return untold + scale * (told - untold)

    return predict
