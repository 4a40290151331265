"""Sets that are decoded when fetched: the same batches as from memory, with any number of workers."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import itertools
import pickle
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import batches, load_data
from scalelong.errors import BrokenImagesError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(40):
        (folder / str(number % 2)).mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / str(number % 2) / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def archive(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "images.zip"
    with zipfile.ZipFile(path, "w") as file:
        for image in sorted(folder.rglob("*.png")):
            file.write(image, image.relative_to(folder).as_posix())
    return path


@pytest.fixture(params=["folder", "archive"])
def where(request):
    return str(request.getfixturevalue(request.param))


ORDER = [[3, 1], [39], [0, 0, 17], [5, 6, 7, 8]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_streams_give_what_memory_gives(where, workers):
    memory, stream = load_data(where, size=8), load_data(where, size=8, memory_limit=0)
    assert memory.in_memory
    assert not stream.in_memory
    before = torch.get_rng_state()
    for ours, expected in zip(batches(stream, ORDER, workers), batches(memory, ORDER), strict=True):
        assert torch.equal(ours.images, expected.images)
        assert torch.equal(ours.labels, expected.labels)
    assert torch.equal(before, torch.get_rng_state()), "batches must not draw from the global generator"


def test_an_endless_order_is_read_only_a_little_ahead(where):
    taken = []

    def forever():
        for step in itertools.count():
            taken.append(step)
            yield [step % 40]

    stream = batches(load_data(where, memory_limit=0), forever(), workers=2, prefetch=3)
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(taken) <= 4 + 2 * 3 + 1


def test_parts_of_streams(where):
    memory, stream = load_data(where), load_data(where, memory_limit=0)
    for ours, expected in zip(stream.split(10, seed=2), memory.split(10, seed=2), strict=True):
        assert len(ours) == len(expected)
        assert torch.equal(ours.fetch(range(10)).images, expected.fetch(range(10)).images)
        assert torch.equal(ours.fetch(range(10)).labels, expected.fetch(range(10)).labels)


def test_streams_survive_pickling(where):
    """Workers that are spawned rather than forked get a pickled copy."""
    stream = load_data(where, memory_limit=0)
    copy = pickle.loads(pickle.dumps(stream))
    assert torch.equal(copy.fetch([7, 9]).images, stream.fetch([7, 9]).images)


def test_fingerprints_of_streams_follow_names_sizes_and_settings(folder, tmp_path):
    def fingerprint(**options):
        return load_data(str(folder), memory_limit=0, **options).fingerprint()

    assert fingerprint() == fingerprint()
    assert len({fingerprint(), fingerprint(size=8), fingerprint(limit=20), fingerprint(channels=1)}) == 4


@pytest.fixture
def damaged(tmp_path):
    """Truncated after the header, so that only decoding finds out."""
    rng = np.random.default_rng(1)
    for number in range(10):
        pixels = rng.integers(0, 256, (20, 20), dtype=np.uint8)
        pixels[0, 0] = number
        (tmp_path / str(number // 5)).mkdir(exist_ok=True)
        path = tmp_path / str(number // 5) / f"{number}.png"
        Image.fromarray(pixels).save(path)
        if number in (4, 5):
            path.write_bytes(path.read_bytes()[:200])
    return str(tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_prove_broken_are_replaced_by_the_next(damaged, workers):
    stream = load_data(damaged, memory_limit=0, skip_broken=2)
    assert len(stream) == 10
    first, second, third = batches(stream, [[3, 4], [5], [9, 0]], workers)
    assert first.images[:, 0, 0, 0].tolist() == [3, 6]
    assert first.labels.tolist() == [0, 1], "the label is that of the replacement"
    assert second.images[:, 0, 0, 0].tolist() == [6]
    assert third.images[:, 0, 0, 0].tolist() == [9, 0]
    assert [broken.name for broken in stream.broken] == ["0/4.png", "1/5.png"]
    assert "2 broken images skipped" in stream.describe()


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_broken_images_stop_the_stream(damaged, workers):
    stream = load_data(damaged, memory_limit=0, skip_broken=1)
    with pytest.raises(BrokenImagesError, match=r"2 of 10 .*0/4\.png.*1/5\.png"):
        list(batches(stream, [[0], [4], [5], [6]], workers))


def test_replacements_come_from_the_same_part(damaged):
    train, held_out = load_data(damaged, memory_limit=0, skip_broken=2).split(4, seed=0)
    numbers = {part: set(part.fetch(range(len(part))).images[:, 0, 0, 0].tolist()) for part in (train, held_out)}
    assert not numbers[train] & numbers[held_out]
