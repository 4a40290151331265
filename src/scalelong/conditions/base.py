"""The one view that training and sampling have of conditions: tensors with one row per image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..data import Batch
from ..errors import ScaleLongError


class ConditionError(ScaleLongError, ValueError):
    """A class or a text was asked for that the model cannot be told."""


class Conditions(ABC):
    """Whole numbers (B,) are labels, floating-point tensors (B, length, dim) are the tokens of a text."""

    @abstractmethod
    def of(self, batch: Batch) -> Tensor | None:
        """The conditions of the images of a batch."""

    @abstractmethod
    def ask(self, requests: Sequence[str]) -> Tensor | None:
        """The conditions that a person names: classes or texts."""

    def check(self, requests: Sequence[str]) -> None:
        """Raises ConditionError if one of them cannot be asked for."""
        self.ask(requests)

    @abstractmethod
    def null(self) -> Tensor | None:
        """The hidden condition, which broadcasts over the batch; None if the model does not know one."""

    def hide(self, values: Tensor | None, hidden: Tensor) -> Tensor | None:
        """The null condition where `hidden` (B,) says so."""
        null = self.null()
        if values is None or null is None:
            return values
        return torch.where(hidden.view(-1, *[1] * (values.dim() - 1)), null, values)


class Unconditional(Conditions):
    def of(self, batch: Batch) -> None:  # noqa: ARG002
        return None

    def ask(self, requests: Sequence[str]) -> None:
        if requests:
            raise ConditionError(
                f"{requests[0]!r} was asked for, but this model was trained without conditions; leave the request "
                f"out, or train with --condition class or text"
            )

    def null(self) -> None:
        return None
