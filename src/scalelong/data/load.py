"""One function for every source: a name, a path, or "hf:NAME"."""

from __future__ import annotations

from .dataset import ImageData
from .digits import load_digits
from .errors import DataNotFoundError
from .options import Options, Progress

DATASETS = ("digits", "shapes", "mnist", "fashion-mnist", "cifar10")


def load_data(
    spec: str,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    split: str = "train",
    memory_limit: int = 2 * 1024**3,
    max_broken: int | float = 0.01,
    limit: int | None = None,
    progress: Progress | None = None,
) -> ImageData:
    options = Options(
        size=size,
        channels=channels,
        split=split,
        memory_limit=memory_limit,
        max_broken=max_broken,
        limit=limit,
        progress=progress,
    )
    if spec == "digits":
        return load_digits(spec, options)
    raise DataNotFoundError(f"no data set {spec!r}; known names: {', '.join(DATASETS)}")
