"""What a user may ask of any source, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidConfigError, MissingDependencyError

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, kw_only=True)
class Options:
    size: int | tuple[int, int] | None = None  # side, or (height, width)
    channels: int | None = None
    split: str = "train"
    memory_limit: int = 2 * 1024**3
    max_broken: int | float = 0.01  # a number, or a share if a float
    limit: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        sides = tuple(self.size) if isinstance(self.size, Sequence) else () if self.size is None else (self.size,)
        if not all(_whole(side, 1) for side in sides) or (isinstance(self.size, Sequence) and len(sides) != 2):
            raise InvalidConfigError(f"size must be a side or (height, width) in pixels, got {self.size!r}")
        for field, least in (("channels", 1), ("limit", 1), ("memory_limit", 0)):
            value = getattr(self, field)
            if value is not None and not _whole(value, least):
                raise InvalidConfigError(f"{field} must be a whole number of at least {least}, got {value!r}")
        share = isinstance(self.max_broken, float) and 0 <= self.max_broken <= 1
        if not share and not _whole(self.max_broken, 0):
            raise InvalidConfigError(f"max_broken must be a number or a share from 0.0 to 1.0, got {self.max_broken!r}")
        if not isinstance(self.split, str) or not self.split:
            raise InvalidConfigError(f"split must be a name such as 'train' or 'test', got {self.split!r}")

    @property
    def shape(self) -> tuple[int, int] | None:
        """(height, width), or None if the images decide."""
        if self.size is None:
            return None
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        return height, width

    def allowed_broken(self, total: int) -> int:
        """A share is rounded up, so that one damaged file does not stop a small folder."""
        return math.ceil(self.max_broken * total) if isinstance(self.max_broken, float) else self.max_broken

    def fits(self, count: int, channels: int, height: int, width: int) -> bool:
        return count * channels * height * width <= self.memory_limit

    def chosen(self, total: int) -> Tensor:
        """`limit` rows, evenly spread: the first rows of a sorted set would all be of one class."""
        if self.limit is None or self.limit >= total:
            return torch.arange(total)
        return torch.arange(self.limit) * total // self.limit


@cache
def needs(package: str, purpose: str) -> Any:
    """An optional package, imported when it is used."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependencyError(package.partition(".")[0], "train", purpose) from error


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
