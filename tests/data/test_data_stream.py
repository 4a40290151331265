"""Sets that do not fit into memory: decoded when fetched, or once into the image cache. Batches are those of memory."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import itertools
import logging
import os
import shutil
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import MappedData, batches, load_data, stream
from scalelong.errors import BrokenImagesError

COUNT, SIDE = 24, 8
BYTES = COUNT * 3 * SIDE * SIDE
ORDER = [[3, 1], [23], [0, 0, 17], [5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Two classes of noise; image i has the value i in its first pixel."""
    place = tmp_path / "images"
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        (place / str(number // 12)).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        pixels[0, 0, 0] = number
        Image.fromarray(pixels).save(place / str(number // 12) / f"{number:02}.png")
    return place


@pytest.fixture
def decodes(monkeypatch):
    """Counts decoded images."""
    counted = []
    before = stream.decode
    monkeypatch.setattr(stream, "decode", lambda *given: counted.append(1) or before(*given))
    return counted


def mapped(folder, **options) -> MappedData:
    data = load_data(folder, memory_limit=0, image_cache="auto", **options)
    assert isinstance(data, MappedData)
    return data


def pixels_file(tmp_path):
    (file,) = (tmp_path / "cache").glob("decoded/*/pixels")
    return file


def assert_same(ours, expected):
    rows = torch.arange(len(expected))
    assert torch.equal(ours.fetch(rows).images, expected.fetch(rows).images)
    assert torch.equal(ours.fetch(rows).labels, expected.fetch(rows).labels)
    assert ours.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize("kind", ["folder", "archive", "mapped"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_memory(folder, tmp_path, kind, workers):
    where = folder
    if kind == "archive":
        where = tmp_path / "images.zip"
        with zipfile.ZipFile(where, "w") as file:
            for image in sorted(folder.rglob("*.png")):
                file.write(image, image.relative_to(folder).as_posix())
    cache = "auto" if kind == "mapped" else "none"
    memory, ours = load_data(where), load_data(where, memory_limit=0, image_cache=cache)
    assert memory.in_memory
    assert not ours.in_memory
    before = torch.get_rng_state()
    for ours_, expected in zip(batches(ours, ORDER, workers), batches(memory, ORDER), strict=True):
        assert torch.equal(ours_.images, expected.images)
        assert torch.equal(ours_.labels, expected.labels)
    assert torch.equal(before, torch.get_rng_state()), "batches must not draw from the global generator"
    for part, expected in zip(ours.split(10, seed=2), memory.split(10, seed=2), strict=True):
        assert torch.equal(part.fetch(range(10)).images, expected.fetch(range(10)).images)
        assert torch.equal(part.fetch(range(10)).labels, expected.fetch(range(10)).labels)


def test_an_endless_order_is_read_only_a_little_ahead(folder):
    taken = []

    def forever():
        for step in itertools.count():
            taken.append(step)
            yield [step % COUNT]

    stream = batches(load_data(folder, memory_limit=0), forever(), workers=2, prefetch=3)
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(taken) <= 4 + 2 * 3 + 1


def test_pinned_batches(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    data = load_data("digits", limit=8)
    assert len(next(batches(data, [[1, 2]], pin=True)).images) == 2
    assert len(pinned) == 2, "images and labels"
    next(batches(data, [[1, 2]]))
    assert len(pinned) == 2


def test_fingerprints_of_streams_follow_names_sizes_and_settings(folder):
    def fingerprint(**options):
        return load_data(folder, memory_limit=0, **options).fingerprint()

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(size=4), fingerprint(limit=20), fingerprint(channels=1)}) == 4


# Images whose pixels are damaged, which their headers do not show


@pytest.fixture
def damaged(folder):
    for number in (11, 12):
        path = folder / str(number // 12) / f"{number:02}.png"
        path.write_bytes(path.read_bytes()[:60])
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_replaced_by_the_next(damaged, workers):
    stream = load_data(damaged, memory_limit=0, skip_broken=2)
    assert len(stream) == COUNT
    first, second = batches(stream, [[10, 11], [12]], workers)
    assert first.images[:, 0, 0, 0].tolist() == [10, 13]
    assert first.labels.tolist() == [0, 1], "the label is that of the replacement"
    assert second.images[:, 0, 0, 0].tolist() == [13]
    assert [broken.name for broken in stream.broken] == ["0/11.png", "1/12.png"]
    assert "2 broken images skipped" in stream.describe()
    assert_same(mapped(damaged, skip_broken=2), stream)
    assert len(mapped(damaged, skip_broken=2).broken) == 2
    parts = stream.split(8, seed=0)
    seen = [set(part.fetch(range(len(part))).images[:, 0, 0, 0].tolist()) for part in parts]
    assert not seen[0] & seen[1], "replacements come from the same part"


def test_broken_images_are_named_in_order_whoever_is_found_first(damaged):
    stream = load_data(damaged, memory_limit=0, skip_broken=2)
    for row in (12, 11):
        stream.fetch([row])
    assert [broken.name for broken in stream.broken] == ["0/11.png", "1/12.png"]


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_broken_images_stop_the_stream(damaged, workers):
    stream = load_data(damaged, memory_limit=0, skip_broken=1)
    with pytest.raises(BrokenImagesError, match=r"2 of 24 .*0/11\.png.*1/12\.png"):
        list(batches(stream, [[0], [11], [12], [6]], workers))


# The image cache


def test_each_image_is_decoded_once(folder, decodes):
    mapped(folder)
    mapped(folder).fetch([1, 2])
    assert len(decodes) == COUNT
    Image.new("RGB", (SIDE, SIDE), "red").save(folder / "0" / "00.png")
    assert int(mapped(folder).fetch([0]).images[0, 0, 0, 0]) == 255


def test_a_set_in_memory_is_decoded_once_per_process(folder, decodes):
    first = load_data(folder)
    assert load_data(folder) is first
    load_data(folder).split(5)
    assert len(decodes) == COUNT
    os.utime(folder / "0" / "00.png", ns=(1, 1))
    assert load_data(folder) is not first
    assert load_data(folder, size=4).height == 4


@pytest.mark.parametrize("harm", ["cut", "changed", "no manifest", "bad manifest"])
def test_a_damaged_file_is_made_again(folder, tmp_path, decodes, harm):
    mapped(folder)
    file = pixels_file(tmp_path)
    if harm == "cut":
        os.truncate(file, 100)
    elif harm == "changed":
        file.write_bytes(bytes(BYTES))
        os.utime(file, ns=(1, 1))
    elif harm == "no manifest":
        file.with_name("decoded.json").unlink()
    else:
        file.with_name("decoded.json").write_text("[")
    again = mapped(folder)
    assert len(decodes) == 2 * COUNT
    assert_same(again, load_data(folder, memory_limit=0))


def test_the_oldest_make_room(folder, tmp_path, monkeypatch, caplog):
    """All of the cache takes at most half of a disk with room for four of the largest."""
    cache, sides, notes = tmp_path / "cache" / "decoded", (8, 7, 6), set()

    def usage(_):
        return SimpleNamespace(free=4 * BYTES - sum(file.stat().st_size for file in cache.glob("*/pixels")))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with caplog.at_level(logging.INFO, "scalelong"):
        for side in sides:
            mapped(folder, size=side)
            (new,) = set(cache.glob("*/decoded.json")) - notes
            os.utime(new, (side, 10 - side))  # used one after the other
            notes.add(new)
    kept = {(note.parent / "pixels").stat().st_size for note in notes if note.exists()}
    assert kept == {COUNT * 3 * side * side for side in sides[1:]}
    assert "makes room" in caplog.text


@pytest.mark.parametrize("reason", ["SCALELONG_CACHE", "space"])
def test_what_does_not_fit_on_the_disk_is_streamed_and_the_log_says_so(folder, monkeypatch, decodes, caplog, reason):
    def full(file, size):
        raise OSError(28, "full")

    if reason == "space":
        monkeypatch.setattr(stream, "allocate", full)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * BYTES - 1))
    with caplog.at_level(logging.INFO, "scalelong"):
        data = load_data(folder, memory_limit=0, image_cache="auto")
    assert not isinstance(data, MappedData)
    assert not decodes
    assert reason in caplog.text
    assert len(data.fetch([0]).images) == 1


def test_the_cache_among_the_images_is_no_data(folder, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(folder / "cache"))
    load_data(folder, memory_limit=0, image_cache="auto")
    data = load_data(folder)
    assert len(data) == COUNT
    assert not data.unread
    shutil.rmtree(folder / "cache")
