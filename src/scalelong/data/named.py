"""MNIST, Fashion-MNIST and CIFAR-10 by name: the places where they usually are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataNotFoundError
from .cifar import CLASSES as CIFAR10_CLASSES

VARIABLE = "SCALELONG_DATA"  # folders to search first, separated as in PATH


@dataclass(frozen=True)
class Known:
    folders: tuple[str, ...]  # below a place where data sets are kept
    classes: tuple[str, ...]
    where_from: str


KNOWN = {
    "mnist": Known(
        ("mnist", "MNIST/raw", "MNIST"),
        tuple("0123456789"),
        "download its four IDX files (train-images-idx3-ubyte.gz, ...)",
    ),
    "fashion-mnist": Known(
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist"),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        "on Debian and Ubuntu: apt-get install dataset-fashion-mnist; elsewhere download its four IDX files",
    ),
    "cifar10": Known(
        ("cifar10", "cifar-10-batches-py", "CIFAR10", "cifar-10"),
        CIFAR10_CLASSES,
        "download its Python version (the folder cifar-10-batches-py) or its parquet files",
    ),
}


def find_known(name: str) -> Path:
    """The folder of a data set that is known by name."""
    known = KNOWN[name]
    candidates = [root / folder for root in _roots() for folder in known.folders]
    candidates += [root for root in _roots() if root.name in known.folders]
    for folder in candidates:
        if folder.is_dir() and any(folder.iterdir()):
            return folder
    raise DataNotFoundError(
        f"{name} is not on this machine. Looked for {' or '.join(known.folders)} in "
        f"{', '.join(map(str, _roots()))}. To get it, {known.where_from}; "
        f"put it in one of these places, name its parent folder in {VARIABLE}, or give its path instead of {name!r}"
    )


def _roots() -> list[Path]:
    listed = [Path(place).expanduser() for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    beside = [Path("data"), Path.home() / "data"]
    return [*listed, *beside, Path("/usr/share/datasets")]
