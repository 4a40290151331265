"""From what files call labels (numbers, names) to int64 numbers and the names of the classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import LabelError

Numbered = tuple[Tensor, tuple[str, ...]] | tuple[None, None]  # numbers and class names, or unlabelled
MOST_CLASSES = 1_000_000  # beyond this they are identifiers, not classes


def number_labels(values: Sequence[object], where: str, classes: Sequence[str] | None = None) -> Numbered:
    """Labels as numbers, and the class names: those given, or the distinct names sorted, or "0", "1", ...

    All labels -1 means unlabelled: it is how hidden test labels are published.
    """
    missing = [row for row, value in enumerate(values) if value is None]
    if missing:
        raise LabelError(f"{where}: {len(missing)} of {len(values)} labels are missing, the first in row {missing[0]}")
    if all(isinstance(value, str) for value in values):
        names = tuple(classes) if classes else tuple(sorted(set(map(str, values))))
        unknown = sorted(set(map(str, values)) - set(names))
        if unknown:
            raise LabelError(f"{where}: labels {unknown[:5]} are not among the classes {list(names)[:20]}")
        number = {name: index for index, name in enumerate(names)}
        return torch.tensor([number[str(value)] for value in values], dtype=torch.int64), names
    if not all(isinstance(value, int) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise LabelError(f"{where}: labels must be all whole numbers or all names, found {', '.join(kinds)}")
    return number_tensor(torch.tensor(list(values), dtype=torch.int64), where, classes)


def number_tensor(labels: Tensor, where: str, classes: Sequence[str] | None = None) -> Numbered:
    """The same for numbers that are a tensor already."""
    labels = labels.to(torch.int64)
    if len(labels) and bool((labels == -1).all()):
        return None, None
    least, most = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if least < 0 or most >= MOST_CLASSES:
        raise LabelError(f"{where}: labels must lie between 0 and {MOST_CLASSES - 1}, found {least} to {most}")
    if classes and most >= len(classes):
        raise LabelError(f"{where}: label {most} has no name; there are {len(classes)} classes: {list(classes)[:20]}")
    return labels, tuple(classes) if classes else tuple(str(label) for label in range(most + 1))
