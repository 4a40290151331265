"""Real handwritten digits that come with the package (see digits.md): something true to train on anywhere."""

from __future__ import annotations

from importlib.resources import files

import torch

from ..errors import UnknownSplitError
from .arrays import from_array
from .dataset import Annotations, ImageData
from .options import Options, needs

CLASSES = tuple("0123456789")


def load_digits(name: str, options: Options) -> ImageData:
    """1797 digits, 8×8, grayscale."""
    if options.split != "train":
        raise UnknownSplitError(
            f"{name!r} has no part {options.split!r}: all 1797 digits are 'train'. "
            "Use data.split(held_out=...) to keep some apart"
        )
    np = needs("numpy", "reading the embedded digits")
    with files("scalelong.data").joinpath("digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return from_array(name, images[:, None], Annotations(labels.to(torch.int64), CLASSES), options)
