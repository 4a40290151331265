"""The image cache: decoded once, mapped, bounded, made again if it was changed or cut."""

import logging
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import MappedData, batches, load_data, mapped, stream
from scalelong.errors import CannotWriteError

COUNT, SIDE = 24, 8
BYTES = COUNT * 3 * SIDE * SIDE


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "images"
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        (place / str(number % 2)).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / str(number % 2) / f"{number:02}.png")
    return place


@pytest.fixture
def decodes(monkeypatch):
    """Counts decoded images."""
    counted = []
    before = stream.decode
    monkeypatch.setattr(stream, "decode", lambda *given: counted.append(1) or before(*given))
    return counted


def opened(folder, tmp_path, **options) -> MappedData:
    data = load_data(folder, memory_limit=0, image_cache=tmp_path / "cache", **options)
    assert isinstance(data, MappedData)
    return data


def assert_same(ours, expected):
    rows = torch.arange(len(expected))
    assert torch.equal(ours.fetch(rows).images, expected.fetch(rows).images)
    assert torch.equal(ours.fetch(rows).labels, expected.fetch(rows).labels)
    assert ours.fingerprint() == expected.fingerprint()


def test_batches_and_fingerprint_are_those_of_the_stream(folder, tmp_path, decodes):
    stream, ours = load_data(folder, memory_limit=0), opened(folder, tmp_path)
    assert isinstance(ours, MappedData)
    assert len(decodes) == COUNT
    again = opened(folder, tmp_path)
    again.fetch([1, 2])
    assert len(decodes) == COUNT, "a second start decodes nothing"
    assert_same(again, stream)
    for part, expected in zip(again.split(5), stream.split(5), strict=True):
        assert_same(part, expected)
        assert_same(pickle.loads(pickle.dumps(part)), expected)


def test_a_set_in_memory_is_decoded_once_per_process(folder, decodes):
    first = load_data(folder)
    assert load_data(folder) is first
    load_data(folder).split(5)
    assert len(decodes) == COUNT
    os.utime(folder / "0" / "00.png", ns=(1, 1))
    assert load_data(folder) is not first
    assert load_data(folder, size=4).height == 4


def test_workers_read_mapped_images(folder, tmp_path, monkeypatch):
    made = []
    loader = torch.utils.data.DataLoader
    monkeypatch.setattr(
        torch.utils.data, "DataLoader", lambda *a, **k: made.append(k["num_workers"]) or loader(*a, **k)
    )
    ours = opened(folder, tmp_path)
    order = [[3, 1], [0, 0, 17]]
    for batch, indices in zip(batches(ours, order, workers=1), order, strict=True):
        assert torch.equal(batch.images, ours.fetch(indices).images)
    assert made == [1]


def test_pinned_batches(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    data = load_data("digits", limit=8)
    assert len(next(batches(data, [[1, 2]], pin=True)).images) == 2
    assert len(pinned) == 2, "images and labels"
    next(batches(data, [[1, 2]]))
    assert len(pinned) == 2


@pytest.mark.parametrize("harm", ["cut", "changed", "no manifest", "bad manifest"])
def test_a_damaged_file_is_made_again(folder, tmp_path, decodes, harm):
    file = opened(folder, tmp_path).file
    if harm == "cut":
        os.truncate(file, 100)
    elif harm == "changed":
        file.write_bytes(bytes(BYTES))
        os.utime(file, ns=(1, 1))
    elif harm == "no manifest":
        file.with_name("decoded.json").unlink()
    else:
        file.with_name("decoded.json").write_text("[")
    again = opened(folder, tmp_path)
    assert len(decodes) == 2 * COUNT
    assert_same(again, load_data(folder, memory_limit=0))


def test_changed_images_are_decoded_again(folder, tmp_path):
    opened(folder, tmp_path)
    Image.new("RGB", (SIDE, SIDE), "red").save(folder / "0" / "00.png")
    assert int(opened(folder, tmp_path).fetch([0]).images[0, 0, 0, 0]) == 255


def test_the_oldest_make_room(folder, tmp_path, caplog):
    files = []
    with caplog.at_level(logging.INFO, "scalelong"):
        for side in (8, 7, 6):
            files.append(opened(folder, tmp_path, size=side, image_cache_limit=2 * BYTES).file)
            os.utime(files[-1].with_name("decoded.json"), (side, 10 - side))  # used one after the other
    assert [file.exists() for file in files] == [False, True, True]
    assert "makes room" in caplog.text


def test_what_is_too_large_is_streamed_and_the_log_says_so(folder, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "scalelong"):
        data = load_data(folder, memory_limit=0, image_cache=tmp_path / "cache", image_cache_limit=BYTES - 1)
    assert not isinstance(data, MappedData)
    assert "image_cache_limit" in caplog.text
    assert len(data.fetch([0]).images) == 1


def test_a_full_disk_is_noticed_before_decoding(folder, tmp_path, monkeypatch, decodes, caplog):
    def full(file, size):
        raise OSError(28, "full")

    monkeypatch.setattr(mapped, "allocate", full)
    with caplog.at_level(logging.INFO, "scalelong"):
        data = load_data(folder, memory_limit=0, image_cache=tmp_path / "cache")
    assert not isinstance(data, MappedData)
    assert not decodes
    assert "space" in caplog.text


def test_a_place_that_is_a_file(folder, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(CannotWriteError, match="image_cache"):
        opened(folder, tmp_path)


def test_broken_images_are_replaced_as_in_a_stream(folder, tmp_path):
    path = folder / "1" / "03.png"
    path.write_bytes(path.read_bytes()[:60])
    ours, stream = opened(folder, tmp_path), load_data(folder, memory_limit=0)
    assert_same(ours, stream)
    assert [broken.name for broken in opened(folder, tmp_path).broken] == ["1/03.png"]


def test_the_cache_among_the_images_is_no_data(folder):
    count = len(load_data(folder))
    load_data(folder, memory_limit=0, image_cache=folder / "cache")
    data = load_data(folder)
    assert len(data) == count
    assert not data.unread
    shutil.rmtree(folder / "cache")
