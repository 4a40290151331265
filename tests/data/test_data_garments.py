"""The photographs of garments that come with the package."""

from pathlib import Path

import pytest
import torch

from scalelong.data import load_data
from scalelong.errors import UnknownSplitError


def test_garments_are_photographs_that_can_be_told_apart():
    garments = load_data("garments")
    assert (len(garments), garments.channels, garments.height, garments.width) == (2000, 1, 16, 16)
    assert garments.classes is not None
    assert garments.classes[:2] == ("T-shirt/top", "Trouser")
    everything = garments.fetch(range(2000))
    assert everything.labels is not None
    # The labels of Fashion-MNIST's first training images.
    assert everything.labels[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    images = everything.images.flatten(1).float()
    nearest = torch.cdist(images[:400], images[400:]).argmin(1)
    assert (everything.labels[400:][nearest] == everything.labels[:400]).float().mean() > 0.7
    with pytest.raises(UnknownSplitError, match="all of it"):
        load_data("garments", split="test")


@pytest.mark.skipif(not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs dataset-fashion-mnist")
def test_garments_are_those_of_fashion_mnist():
    whole = load_data("fashion-mnist", size=16)
    assert torch.equal(load_data("garments").fetch(range(2000)).images, whole.fetch(range(2000)).images)
