"""The second start on a large set: what the first one found, unless anything has changed."""

import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from scalelong.data import index, load_data, source
from scalelong.errors import NoImagesError


@dataclass
class Decoding:
    """Counts the images that are decoded or looked at."""

    count: int = 0


@pytest.fixture
def decoding(monkeypatch, tmp_path):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index, "FEWEST", 5)
    monkeypatch.setattr(index, "SETTLED", -1.0)
    seen = Decoding()
    for name in ("decode", "look"):
        plain = getattr(source, name)

        def counted(*arguments, plain=plain):
            seen.count += 1
            return plain(*arguments)

        monkeypatch.setattr(source, name, counted)
    return seen


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for number in range(12):
        place = folder / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 6), (20 * number, 0, 9)).save(place / f"{number}.png")
        (place / f"{number}.txt").write_text(f"number {number}")
    (folder / "class0" / "broken.png").write_bytes(b"broken")
    (folder / "class0" / "broken.txt").write_text("nothing")
    return folder


def as_zip(folder: Path) -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return path


def same(one, other):
    assert one.fingerprint() == other.fingerprint()
    first, second = one.fetch(range(len(one))), other.fetch(range(len(other)))
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    assert first.captions == second.captions
    assert (one.classes, one.broken, one.describe()) == (other.classes, other.broken, other.describe())


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize("limit", [2**30, 0])
def test_the_second_start_decodes_nothing(decoding, images, kind, limit):
    spec = images if kind == "folder" else as_zip(images)
    first = load_data(spec, memory_limit=limit)
    made, decoding.count = decoding.count, 0
    assert made > 0
    second = load_data(spec, memory_limit=limit)
    assert decoding.count == 0
    assert second.in_memory == (limit > 0)
    same(first, second)
    one, two = first.split(3, seed=1), second.split(3, seed=1)
    assert [part.fingerprint() for part in one] == [part.fingerprint() for part in two]
    load_data(spec, memory_limit=limit, size=4)
    assert decoding.count > 0


def change_pixels(images):
    Image.new("RGB", (6, 6), "white").save(images / "class1" / "1.png")


def change_pixels_and_times(images):
    """Of the same size, and with the time of before."""
    file = images / "class1" / "1.png"
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(bytes(content))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_caption(images):
    (images / "class1" / "1.txt").write_text("number one")


def rename(images):
    (images / "class1" / "1.png").rename(images / "class1" / "01.png")
    (images / "class1" / "1.txt").rename(images / "class1" / "01.txt")


def remove(images):
    shutil.rmtree(images / "class2")


@pytest.mark.parametrize("change", [change_pixels, change_pixels_and_times, change_caption, rename, remove])
def test_whatever_changes_is_noticed(decoding, images, change):
    load_data(images)
    change(images)
    decoding.count = 0
    again = load_data(images, max_broken=2)
    assert decoding.count > 0
    index.FEWEST = 10**9
    shutil.rmtree(os.environ["SCALELONG_CACHE"])
    same(load_data(images, max_broken=2), again)


@pytest.mark.parametrize("name", ["pixels", "index.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_a_damaged_index_is_made_again(decoding, images, name, harm):
    first = load_data(images)
    (file,) = Path(os.environ["SCALELONG_CACHE"]).rglob(name)
    content = file.read_bytes()
    middle = len(content) // 2
    if harm == "remove":
        file.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes({"flip": flipped, "cut": content[:middle], "empty": b""}[harm])
    decoding.count = 0
    same(first, load_data(images))
    assert decoding.count > 0
    decoding.count = 0
    same(first, load_data(images))
    assert decoding.count == 0


def test_what_changes_now_and_what_is_small_is_not_kept(decoding, images, monkeypatch):
    monkeypatch.setattr(index, "SETTLED", 3600.0)
    load_data(images)
    monkeypatch.setattr(index, "SETTLED", -1.0)
    monkeypatch.setattr(index, "FEWEST", 13)
    load_data(images)
    assert not Path(os.environ["SCALELONG_CACHE"]).exists()


def test_a_cache_that_cannot_be_written_does_not_matter(decoding, images, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "write_bytes", full)
    assert len(load_data(images)) == 12
    assert len(load_data(images)) == 12


# Runs among the images


def test_runs_samples_and_comparisons_among_the_images_are_no_data(images):
    before = load_data(images).fingerprint()
    run = images / "runs" / "mine"
    grid = Image.new("RGB", (9, 9))
    for folder in ("samples", "images/x", "checkpoints"):
        (run / folder).mkdir(parents=True)
    for name in ("config.yaml", "data.json", "images/x/samples.json"):
        (run / name).write_text("{}")
    grid.save(run / "samples" / "step-00000001.png")
    grid.save(run / "images" / "x" / "000000000000.png")
    for folder, names in {"made": ["samples.json"], "runs/compare": ["comparison.json", "table.txt"]}.items():
        (images / folder).mkdir()
        for name in names:
            (images / folder / name).write_text("{}")
        grid.save(images / folder / "picture.png")
    assert load_data(images).fingerprint() == before
    for folder in (run, run / "samples"):
        with pytest.raises(NoImagesError):
            load_data(folder)
    grid.save(run / "images" / "x" / "grid.png")
    assert len(load_data(run / "images" / "x")) == 1


def test_a_class_called_runs_is_a_class(images):
    (images / "class0").rename(images / "runs")
    assert load_data(images).classes == ("class1", "class2", "runs")
