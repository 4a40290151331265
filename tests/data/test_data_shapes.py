"""The drawn shapes: what a caption says is what the picture shows."""

import pytest
import torch

from scalelong.data import load_data
from scalelong.data.builtin import BACKGROUND, CLASSES, COLOURS, PLACES, SHAPES, caption, shape_mask
from scalelong.errors import UnknownSplitError


@pytest.fixture(scope="module")
def shapes():
    return load_data("shapes", limit=3000)


def what_it_shows(image: torch.Tensor) -> str:
    """A judge by rules that share nothing with the drawing but the tables: colour, place and best mask."""
    pixels = image.float()
    ink = (pixels - torch.tensor(BACKGROUND).view(3, 1, 1)).abs().amax(0)
    inside = ink > 0.8 * ink.max()
    mean = pixels[:, inside].mean(1)
    colour = min(COLOURS, key=lambda name: float((mean - torch.tensor(COLOURS[name])).norm()))
    rows, columns = torch.nonzero(ink > 0.3 * ink.max()).float().unbind(1)
    height, width = ink.shape
    row, column = float(rows.min() + rows.max() + 1) / 2, float(columns.min() + columns.max() + 1) / 2
    place = min(PLACES, key=lambda n: (PLACES[n][0] - row / height) ** 2 + (PLACES[n][1] - column / width) ** 2)
    cover = ink / ink.max()
    errors = {}
    for shape in SHAPES:
        for radius in (5.5, 6.0, 6.5, 7.0, 7.5):
            for down in (-1.0, -0.5, 0.0, 0.5, 1.0):
                mask = shape_mask(shape, height, width, row + down, column, radius)[0]
                errors[shape] = min(errors.get(shape, 1e9), float((mask - cover).abs().sum()))
    return caption(colour, min(errors, key=lambda shape: errors[shape]), place)


def test_captions_and_classes_are_true(shapes):
    batch = shapes.fetch(range(80))
    assert shapes.has_captions
    assert shapes.classes == CLASSES
    assert batch.images.shape == (80, 3, 32, 32)
    for image, label, text in zip(batch.images, batch.labels.tolist(), batch.captions, strict=True):
        assert what_it_shows(image) == text
        assert CLASSES[label] in text


def test_every_combination_occurs_about_equally_often(shapes):
    captions = shapes.fetch(range(3000)).captions
    assert len(set(captions)) == len(COLOURS) * len(SHAPES) * len(PLACES)
    for words in (COLOURS, SHAPES):
        counts = torch.tensor([sum(f" {word} " in text for text in captions) for word in words]).float()
        expected = 3000 / len(words)
        assert float(((counts - expected) ** 2 / expected).sum()) < 20


def test_an_image_is_a_function_of_its_number_alone(shapes):
    assert torch.equal(load_data("shapes", limit=10).fetch([7]).images, shapes.fetch([7]).images)


def test_parts_differ(shapes):
    test = load_data("shapes", split="test", limit=500)
    assert test.fetch(range(500)).captions != shapes.fetch(range(500)).captions
    assert load_data("shapes", split="val", limit=5).fetch([0, 1, 2, 3]).captions != test.fetch([0, 1, 2, 3]).captions
    with pytest.raises(UnknownSplitError, match="train, test, validation"):
        load_data("shapes", split="extra")


def test_default_length_size_and_channels():
    assert len(load_data("shapes")) == 10_000
    assert load_data("shapes", limit=12_345).fetch([12_344]).images.shape == (1, 3, 32, 32)
    assert load_data("shapes", limit=3, size=(16, 24), channels=1).fetch([0]).images.shape == (1, 1, 16, 24)
