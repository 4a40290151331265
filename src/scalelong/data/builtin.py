"""Data sets that come with the package: real digits and photographs of garments, also with captions."""

from __future__ import annotations

from importlib.resources import files

import torch

from ..errors import UnknownSplitError
from ..optional import needs
from .arrays import from_array
from .dataset import Annotations, ImageData, Options

DIGITS = tuple("0123456789")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load_digits(name: str, options: Options) -> ImageData:
    """1797 handwritten digits, 8×8, grayscale (see digits.md)."""
    return _embedded(name, "digits.npz", DIGITS, options)


def load_garments(name: str, options: Options) -> ImageData:
    """2000 images of Fashion-MNIST, 16×16, grayscale (see garments.md): large enough for deep networks to break on."""
    return _embedded(name, "garments.npz", GARMENTS, options)


def _embedded(name: str, file_name: str, classes: tuple[str, ...], options: Options) -> ImageData:
    if options.split != "train":
        raise UnknownSplitError(
            f"{name!r} has no part {options.split!r}: all of it is 'train'. Use data.split(held_out=...) to keep some "
            "images apart"
        )
    np = needs("numpy", "train", "reading the embedded images")
    with files("scalelong.data").joinpath(file_name).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return from_array(name, images[:, None], Annotations(labels.to(torch.int64), classes), options)


# The same with captions, several wordings of each class, for networks that draw from a text.

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
GARMENT_WORDS = (
    *("a t-shirt", "trousers", "a pullover", "a dress", "a coat"),
    *("a sandal", "a shirt", "a sneaker", "a bag", "an ankle boot"),
)


def load_captioned(name: str, options: Options) -> ImageData:
    """The embedded digits or garments with captions; image i has wording i of its class, in turn."""
    if name == "captioned-digits":
        data = load_digits(name, options)
        wordings = [(word, f"the digit {number}", f"a handwritten {word}") for number, word in enumerate(NUMBER_WORDS)]
    else:
        data = load_garments(name, options)
        bare = [phrase.removeprefix("a ").removeprefix("an ") for phrase in GARMENT_WORDS]
        wordings = [
            (word, phrase, f"a photograph of {phrase}") for word, phrase in zip(bare, GARMENT_WORDS, strict=True)
        ]
    about = data.annotations
    assert about.labels is not None
    captions = [wordings[label][row % 3] for row, label in enumerate(about.labels.tolist())]
    data.annotations = Annotations(about.labels, about.classes, captions)
    return data
