"""The drawn shapes: what a caption says is what the picture shows."""

import pytest
import torch

from scalelong.data import load_data
from scalelong.data.builtin import BACKGROUND, CLASSES, COLOURS, PLACES
from scalelong.errors import DataNotFoundError


@pytest.fixture(scope="module")
def shapes():
    return load_data("shapes", limit=3000)


def colour_and_place(image: torch.Tensor) -> tuple[str, str]:
    """By rules that share nothing with the drawing but the tables."""
    pixels = image.float()
    ink = (pixels - torch.tensor(BACKGROUND).view(3, 1, 1)).abs().amax(0)
    mean = pixels[:, ink > 0.8 * ink.max()].mean(1)
    rows, columns = torch.nonzero(ink > 0.3 * ink.max()).float().unbind(1)
    row, column = (float(places.min() + places.max() + 1) / 2 / 32 for places in (rows, columns))
    return (
        min(COLOURS, key=lambda name: float((mean - torch.tensor(COLOURS[name])).norm())),
        min(PLACES, key=lambda name: (PLACES[name][0] - row) ** 2 + (PLACES[name][1] - column) ** 2),
    )


def test_captions_and_classes_are_true(shapes):
    batch = shapes.fetch(range(80))
    assert shapes.classes == CLASSES
    assert batch.images.shape == (80, 3, 32, 32)
    for image, label, text in zip(batch.images, batch.labels.tolist(), batch.captions, strict=True):
        colour, place = colour_and_place(image)
        assert text.startswith(f"a {colour} ")
        assert text.endswith(f" at the {place}")
        assert CLASSES[label] in text


def test_an_image_is_a_function_of_its_number_alone(shapes):
    assert torch.equal(load_data("shapes", limit=10).fetch([7]).images, shapes.fetch([7]).images)


def test_parts_differ(shapes):
    test = load_data("shapes", split="test", limit=500)
    assert test.fetch(range(500)).captions != shapes.fetch(range(500)).captions
    assert load_data("shapes", split="val", limit=5).fetch([0, 1, 2, 3]).captions != test.fetch([0, 1, 2, 3]).captions
    with pytest.raises(DataNotFoundError, match="train, test, validation"):
        load_data("shapes", split="extra")


def test_default_length_size_and_channels():
    assert len(load_data("shapes")) == 10_000
    assert load_data("shapes", limit=12_345).fetch([12_344]).images.shape == (1, 3, 32, 32)
    assert load_data("shapes", limit=3, size=(16, 24), channels=1).fetch([0]).images.shape == (1, 1, 16, 24)
