"""Conditions that are classes, by name or by number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data import Batch
from .base import ConditionError, Conditions


class ClassCondition(Conditions):
    def __init__(self, classes: Sequence[str], guided: bool) -> None:
        """`guided`: some labels were hidden in training, so that there is a null label, the last one."""
        self.classes, self.guided = tuple(classes), guided

    def of(self, batch: Batch) -> Tensor:
        if batch.labels is None:
            raise ConditionError("condition 'class' needs labels, and these images have none")
        return batch.labels

    def ask(self, requests: Sequence[str]) -> Tensor:
        return torch.tensor([self._number(request) for request in requests], dtype=torch.long)

    def null(self) -> Tensor | None:
        return torch.tensor(len(self.classes)) if self.guided else None

    def _number(self, request: str) -> int:
        if request in self.classes:
            return self.classes.index(request)
        if request.isdecimal() and int(request) < len(self.classes):
            return int(request)
        shown = ", ".join(self.classes[:20]) + (", ..." if len(self.classes) > 20 else "")
        raise ConditionError(
            f"there is no class {request!r}; there are {len(self.classes)}: {shown} (or numbers from 0)"
        )
