"""Any Dataset of torch or `datasets` as data."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

from scalelong.data import load_data
from scalelong.errors import DataNotFoundError, InvalidConfigError, MixedSizesError, UnreadableDataError

PIXELS = torch.randint(0, 256, (20, 3, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class Items:
    """A data set whose items are made by a function of the number."""

    classes = ("cat", "dog")

    def __init__(self, make, count=20):
        self.make, self.count, self.read = make, count, []

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        self.read.append(row)
        return self.make(row)


def picture(row):
    return Image.fromarray(PIXELS[row].permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    "make",
    [
        lambda row: PIXELS[row],
        lambda row: PIXELS[row].float() / 255,
        lambda row: PIXELS[row].float() / 127.5 - 1,
        lambda row: PIXELS[row].permute(1, 2, 0).numpy(),
        picture,
        lambda row: (PIXELS[row], row % 2),
        lambda row: {"image": picture(row), "label": np.int64(row % 2), "text": f"number {row}"},
    ],
    ids=["bytes", "0 to 1", "-1 to 1", "numpy", "Pillow", "pairs", "columns"],
)
@pytest.mark.parametrize("memory_limit", [10**6, 0], ids=["in memory", "streamed"])
def test_items(make, memory_limit):
    data = load_data(Items(make), memory_limit=memory_limit)
    assert data.in_memory == bool(memory_limit)
    batch = data.fetch([3, 0, 19])
    assert torch.equal(batch.images, PIXELS[[3, 0, 19]])
    if isinstance(make(0), tuple | dict):
        assert data.classes == ("cat", "dog")
        assert batch.labels is not None
        assert batch.labels.tolist() == [1, 0, 1]
    if isinstance(make(0), dict):
        assert batch.captions == ["number 3", "number 0", "number 19"]
    assert torch.equal(
        data.split(5)[1].fetch(range(5)).images, load_data(Items(make)).split(5)[1].fetch(range(5)).images
    )


def test_fingerprints_follow_the_content():
    data, other = Items(lambda row: PIXELS[row]), Items(lambda row: PIXELS[-row - 1])
    assert load_data(data).fingerprint() == load_data(data).fingerprint() != load_data(other).fingerprint()
    streams = [load_data(given, memory_limit=0).fingerprint() for given in (data, data, other)]
    assert streams[0] == streams[1] != streams[2]


def test_torchs_own_data_sets_and_options():
    data = load_data(TensorDataset(PIXELS, torch.arange(20) % 3), size=3, channels=1, limit=10)
    assert (len(data), data.channels, data.height) == (10, 1, 3)
    assert data.classes == ("0", "1", "2")


def test_an_open_data_set_is_taken_as_it_is():
    data = load_data("digits", limit=5)
    assert load_data(data) is data
    with pytest.raises(InvalidConfigError, match="open already"):
        load_data(data, size=4)


@pytest.mark.parametrize("streamed", [True, False])
def test_hugging_faces_data_sets(streamed):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [picture(row) for row in range(20)], "label": [row % 2 for row in range(20)]}
    table = datasets.Dataset.from_dict(rows, features=features)
    for given in (table, datasets.DatasetDict({"train": table})):
        data = load_data(given, memory_limit=0) if streamed else load_data(given)
        batch = data.fetch([4, 5])
        assert batch.labels is not None
        assert torch.equal(batch.images, PIXELS[[4, 5]])
        assert (data.classes, batch.labels.tolist()) == (("cat", "dog"), [0, 1])


class Endless(IterableDataset):
    def __iter__(self):
        yield PIXELS[0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (Endless(), InvalidConfigError, "by number"),
        (Items(lambda row: PIXELS[row], 0), DataNotFoundError, "empty"),
        (Items(lambda row: {"x": 1}), UnreadableDataError, "columns"),
        (Items(lambda row: "a text"), UnreadableDataError, "item 0"),
        (Items(lambda row: torch.zeros(2, 3, 4, 4)), UnreadableDataError, "shape"),
        (Items(lambda row: torch.full((3, 4, 4), 7.5)), UnreadableDataError, "7.5"),
        (Items(lambda row: 1 / (row - 9)), UnreadableDataError, "ZeroDivisionError|item"),
        (Items(lambda row: torch.zeros(1, 4 + row, 4)), MixedSizesError, "size"),
    ],
)
def test_what_cannot_be_used_is_named(given, error, message):
    with pytest.raises(error, match=message):
        load_data(given)
