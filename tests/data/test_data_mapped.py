"""Images that do not fit into memory, decoded once into a file: the batches of a stream, whatever befalls it."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import MappedData, batches, load_data, mapped, source
from scalelong.errors import BrokenImagesError, CannotWriteError, InvalidConfigError

COUNT = 24


@pytest.fixture
def decoded(monkeypatch, tmp_path):
    """The names of the images that were decoded."""
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped, "SETTLED", -1.0)
    monkeypatch.setattr(mapped, "AT_A_TIME", 500)  # two images
    monkeypatch.setattr(mapped, "SPARE", 0)
    seen, plain = [], source._decode_into

    def counted(image, where, row):
        seen.append(where.name(row))
        return plain(image, where, row)

    monkeypatch.setattr(source, "_decode_into", counted)
    return seen


@pytest.fixture
def folder(tmp_path):
    folder, rng = tmp_path / "images", np.random.default_rng(0)
    for number in range(COUNT):
        (folder / str(number % 2)).mkdir(exist_ok=True, parents=True)
        pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / str(number % 2) / f"{number:02}.png")
    return folder


def opened(where, **options):
    return load_data(where, **{"size": 8, "memory_limit": 0, "image_cache": "auto", **options})


def streamed(where, **options):
    return opened(where, image_cache="none", **options)


def same(one, other):
    """All batches, labels and fingerprints, also of parts."""
    for ours, expected in [(one, other), *zip(one.split(5, seed=1), other.split(5, seed=1), strict=True)]:
        order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(3)).split(7)
        assert len(ours) == len(expected)
        for left, right in zip(batches(ours, order), batches(expected, order), strict=True):
            assert torch.equal(left.images, right.images)
            assert (left.labels is None and right.labels is None) or torch.equal(left.labels, right.labels)
            assert left.captions == right.captions
        assert ours.fingerprint() == expected.fingerprint()
        assert ours.classes == expected.classes


def pixels_of(tmp_path) -> Path:
    (found,) = (tmp_path / "cache").rglob("pixels")
    return found


def zipped(folder):
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for image in sorted(folder.rglob("*.png")):
            archive.write(image, image.relative_to(folder).as_posix())
    return path


def tabled(folder, embedded=True):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = sorted(folder.rglob("*.png"))
    rows = [{"bytes": file.read_bytes() if embedded else None, "path": str(file.relative_to(folder))} for file in files]
    parquet.write_table(pa.table({"image": rows, "label": [n % 3 for n in range(COUNT)]}), folder / "a.parquet")
    return folder / "a.parquet"


def saved(folder):
    datasets = pytest.importorskip("datasets")
    files = sorted(map(str, folder.rglob("*.png")))
    set_ = datasets.Dataset.from_dict({"image": files}).cast_column("image", datasets.Image())
    set_.save_to_disk(folder.with_name("saved"))
    return folder.with_name("saved")


def array(folder):
    images = [np.asarray(Image.open(file)) for file in sorted(folder.rglob("*.png"))]
    np.savez(folder.with_suffix(".npz"), images=np.stack(images))
    return folder.with_suffix(".npz")


@pytest.mark.parametrize("form", [Path, zipped, tabled, saved, array])
def test_batches_and_fingerprints_are_those_of_a_stream(decoded, folder, form):
    where = form(folder)
    options = {"memory_limit": 8000 if form is array else 0, "size": 24 if form is array else 8}
    lines = []
    data = opened(where, say=lines.append, **options)
    assert isinstance(data, MappedData)
    assert "decoded in the image cache" in data.describe()
    assert "decoding 24 images once" in lines[0]
    same(data, streamed(where, **options))
    decoded.clear()
    same(opened(where, **options), data)
    assert decoded == [], "a later start decodes nothing"
    copy = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 20_000
    assert torch.equal(copy.fetch([3, 1]).images, data.fetch([3, 1]).images)


def test_what_fits_into_memory_is_not_written(decoded, folder, tmp_path):
    assert load_data(folder, size=8, image_cache="auto").describe().endswith("in memory")
    assert load_data("shapes", limit=20, memory_limit=0, image_cache="auto").describe().endswith("streamed")
    assert streamed(folder).describe().endswith("streamed")
    assert not (tmp_path / "cache").exists()


def test_options_have_files_of_their_own_and_a_place_of_choice(decoded, folder, tmp_path):
    for options in ({}, {"size": 4}, {"channels": 1}, {"limit": 10}):
        same(opened(folder, **options), streamed(folder, **options))
    assert len(list((tmp_path / "cache").rglob("pixels"))) == 4
    data = opened(folder, image_cache=tmp_path / "there")
    assert data.file.is_relative_to(tmp_path / "there")
    inside = opened(folder, image_cache=folder / "cache")  # among the images: not taken for one of them
    assert opened(folder, image_cache=folder / "cache").fingerprint() == inside.fingerprint()
    with pytest.raises(InvalidConfigError, match="image_cache must be"):
        opened(folder, image_cache="")
    with pytest.raises(InvalidConfigError, match="image_cache_limit must be"):
        opened(folder, image_cache_limit=-1)


# Images that have changed, and broken ones


def repaint(folder):
    """Of the same size, and with the time of before."""
    file = folder / "0" / "00.png"
    before = file.stat()
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    content = file.read_bytes()
    file.write_bytes(content[: before.st_size].ljust(before.st_size, b"\0"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def rename(folder):
    (folder / "0" / "00.png").rename(folder / "0" / "99.png")


def remove(folder):
    (folder / "1" / "01.png").unlink()


def add(folder):
    shutil.copy(folder / "1" / "01.png", folder / "1" / "77.png")


@pytest.mark.parametrize("change", [repaint, rename, remove, add])
def test_a_changed_folder_is_decoded_again_in_place(decoded, folder, tmp_path, change):
    before = opened(folder)
    kept = before.fetch([0, 5]).images
    change(folder)
    decoded.clear()
    after = opened(folder)
    assert len(decoded) >= len(after)
    assert isinstance(after, MappedData)
    same(after, streamed(folder))
    assert torch.equal(before.fetch([0, 5]).images, kept), "whoever has the old file open goes on with it"
    assert len(list((tmp_path / "cache").rglob("pixels"))) == 1


def test_a_file_that_a_table_names_is_part_of_the_stamp(decoded, folder):
    where = tabled(folder, embedded=False)
    same(opened(where), streamed(where))
    repaint(folder)
    same(opened(where), streamed(where))


def test_a_folder_that_changes_meanwhile_is_streamed(decoded, folder, tmp_path, monkeypatch):
    plain = mapped._fill

    def meddle(*arguments):
        found = plain(*arguments)
        repaint(folder)
        return found

    monkeypatch.setattr(mapped, "_fill", meddle)
    lines = []
    data = opened(folder, say=lines.append)
    assert not isinstance(data, MappedData)
    assert "was changed while it was decoded" in lines[-1]
    assert not list((tmp_path / "cache").rglob("pixels"))


def damage(folder, *numbers):
    for number in numbers:
        file = folder / str(number % 2) / f"{number:02}.png"
        file.write_bytes(file.read_bytes()[:200])  # only decoding finds out


def test_broken_images_are_replaced_as_in_a_stream(decoded, folder, caplog):
    damage(folder, 4, 6, 23)
    data, stream = opened(folder, max_broken=3), streamed(folder, max_broken=3)
    assert isinstance(data, MappedData)
    assert len(data.broken) == 3, "all are known before the first step"
    same(data, stream)
    again = opened(folder, max_broken=3)
    assert again.broken == data.broken
    assert "3 of 24 images are broken" in caplog.text
    for _ in range(2):
        with pytest.raises(BrokenImagesError, match="2 are allowed"):
            opened(folder, max_broken=2)


def test_a_part_of_broken_images_alone(decoded, folder):
    data = opened(folder)
    part = MappedData(data.stream, data.file, data._pixel_map, torch.zeros(COUNT, dtype=torch.bool))
    with pytest.raises(BrokenImagesError, match="not one image can be read"):
        part.fetch([0])


# Damage, kills, full disks, and several processes


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def flip_unseen(file):
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("name", ["pixels", "decoded.json"])
@pytest.mark.parametrize("harm", [flip, flip_unseen, cut, empty, Path.unlink])
def test_a_damaged_file_is_made_again(decoded, folder, tmp_path, name, harm):
    opened(folder)
    harm(pixels_of(tmp_path).with_name(name))
    decoded.clear()
    data = opened(folder)
    assert len(decoded) == COUNT
    same(data, streamed(folder))
    decoded.clear()
    opened(folder)
    assert decoded == []


def test_a_copy_of_the_cache_is_checked_and_used(decoded, folder, tmp_path):
    opened(folder)
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    shutil.rmtree(tmp_path / "cache")
    shutil.move(tmp_path / "copy", tmp_path / "cache")
    decoded.clear()
    data = opened(folder)
    assert decoded == []
    same(data, streamed(folder))


KILLED = """
import os, sys
from pathlib import Path
from scalelong.data import load_data, mapped
mapped.SETTLED, mapped.AT_A_TIME, mapped.NOTE_EVERY, mapped.SPARE = -1.0, 500, 0.0, 0
def stop(done, total):
    if done >= int(sys.argv[2]) and list(Path(os.environ["SCALELONG_CACHE"]).rglob("unfinished")):
        os.kill(os.getpid(), 9)
load_data(sys.argv[1], size=8, memory_limit=0, max_broken=2, image_cache="auto", progress=stop)
"""


def killed(folder, after):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(after)], env=environment, timeout=600)
    assert ended.returncode == -signal.SIGKILL


def test_after_a_kill_the_rest_is_decoded(decoded, folder, tmp_path):
    damage(folder, 2, 21)
    killed(folder, 10)
    assert not list((tmp_path / "cache").rglob("pixels"))
    lines = []
    data = opened(folder, max_broken=2, say=lines.append)
    assert isinstance(data, MappedData)
    assert "of which 10 are there" in lines[0]
    assert len(set(decoded)) < COUNT
    assert len(data.broken) == 2
    same(data, streamed(folder, max_broken=2))
    left = {file.name for file in data.file.parent.iterdir()}
    assert left - {".lock"} == {"pixels", "decoded.json"}


class Stopped(BaseException):
    """As Ctrl-C is one."""


def stopped(folder, after):
    """What a kill leaves, without the process that is killed."""

    def stop(done, _):
        if done >= after and list(Path(os.environ["SCALELONG_CACHE"]).rglob("unfinished")):
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SETTLED": -1.0, "AT_A_TIME": 500, "NOTE_EVERY": 0.0, "SPARE": 0}.items():
            patch.setattr(mapped, name, value)
        with pytest.raises(Stopped):
            opened(folder, progress=stop)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder, and a cache that a killed process left."""
    root, rng = tmp_path_factory.mktemp("half"), np.random.default_rng(1)
    for number in range(COUNT):
        (root / "images" / str(number % 2)).mkdir(exist_ok=True, parents=True)
        pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / str(number % 2) / f"{number:02}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALELONG_CACHE", str(root / "cache"))
        stopped(root / "images", 10)
    return root


@pytest.mark.parametrize("name", ["unfinished", "progress.json"])
@pytest.mark.parametrize("harm", [flip_unseen, cut, empty, Path.unlink])
def test_damage_to_what_a_kill_left_is_noticed(decoded, half, tmp_path, monkeypatch, name, harm):
    shutil.copytree(half / "cache", tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob(name)
    if harm is flip_unseen and name == "unfinished":
        content = bytearray(file.read_bytes())
        content[5] ^= 1  # the end of it may have been written after the last note
        file.write_bytes(bytes(content))
    elif harm is cut and name == "unfinished":
        file.write_bytes(file.read_bytes()[:100])
    else:
        harm(file)
    data = opened(half / "images")
    assert len(decoded) == COUNT
    same(data, streamed(half / "images"))


def test_what_a_kill_left_of_other_images_is_not_used(decoded, half, tmp_path):
    shutil.copytree(half / "cache", tmp_path / "cache")
    os.utime(half / "images" / "0" / "00.png")
    data = opened(half / "images")
    assert len(decoded) == COUNT
    same(data, streamed(half / "images"))


def test_a_disk_without_room_streams_and_says_so(decoded, folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    size, lines = COUNT * 3 * 64, []
    for free, limit, said in (
        (2 * size - 2, None, "half of what is free"),
        (10 * size, size - 1, "--image-cache-limit"),
        (size - 1, size, "free"),
    ):
        monkeypatch.setattr(mapped.shutil, "disk_usage", lambda _, free=free: usage(free))
        data = opened(folder, image_cache_limit=limit, say=lines.append)
        assert not isinstance(data, MappedData)
        assert said in lines[-1]
        assert "decoded when they are fetched" in lines[-1]
        assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda _: usage(size))
    assert isinstance(opened(folder, image_cache_limit=size), MappedData)


def test_a_disk_that_fills_up_meanwhile(decoded, folder, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped.os, "fsync", full)
    lines = []
    data = opened(folder, say=lines.append)
    assert not isinstance(data, MappedData)
    assert "no space is left on its disk" in lines[-1]
    assert {file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()} <= {".lock"}
    monkeypatch.undo()
    assert len(data.fetch([0, 1]).images) == 2


def test_a_place_that_cannot_be_written(decoded, folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWriteError, match="--image-cache"):
        opened(folder, image_cache=tmp_path / "file")
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "file"))
    lines = []
    assert not isinstance(opened(folder, say=lines.append), MappedData)
    assert "cannot be written" in lines[-1]


def test_of_several_processes_one_decodes(decoded, folder):
    """Threads stand for processes: the lock is on a file of each."""
    found, lines, plain = [], [], mapped._fill

    def slow(*arguments):
        time.sleep(1.5)  # longer than the patience of a lock
        return plain(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_fill", slow)
        threads = [threading.Thread(target=lambda: found.append(opened(folder, say=lines.append))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(decoded) == COUNT
    assert all(isinstance(data, MappedData) for data in found)
    assert sum("waiting for another process" in line for line in lines) == 2
    same(found[0], found[2])


def test_the_manifest_is_of_the_pixels(decoded, folder, tmp_path):
    """A manifest beside pixels of another set of the same size is found out by the checksum."""
    opened(folder)
    file = pixels_of(tmp_path)
    file.write_bytes(bytes(len(file.read_bytes())))
    text = file.with_name("decoded.json").read_text().partition("\n")[2]
    values = json.loads(text)
    assert set(values) == {"stamp", "images", "bad", "broken", "sha256", "file"}
    same(opened(folder), streamed(folder))


# Training


def test_a_run_may_go_from_streaming_to_the_cache_and_back(decoded, folder, tmp_path):
    """Weights are those of a run that only streams, bit for bit; so is what it says of its data."""
    from scalelong.training import CheckpointConfig, ImagesConfig, LoggingConfig, TrainConfig, train

    def run(out, steps, image_cache):
        images = ImagesConfig(
            size=8, flip=True, held_out=4, memory_limit=0.0, image_cache=image_cache, image_cache_limit=1.0
        )
        config = TrainConfig(
            data=str(folder),
            model_options={"dim": 16, "depth": 2, "heads": 2, "patch_size": 4},
            batch_size=6,
            steps=steps,
            images=images,
            checkpoints=CheckpointConfig(save_every=100),
            logging=LoggingConfig(trackers=(), samples_every=0, monitor_every=0, held_out_every=100),
        )
        train(config, out, quiet=True)

    run(tmp_path / "streamed", 6, "none")
    assert not list((tmp_path / "cache").rglob("pixels"))
    for steps, image_cache in ((2, "none"), (4, "auto"), (6, str(tmp_path / "cache" / "own"))):
        run(tmp_path / "changing", steps, image_cache)
    assert len(list((tmp_path / "cache").rglob("pixels"))) == 2
    for name in ("model.safetensors", "ema.safetensors"):
        one, other = (
            (tmp_path / out / "checkpoints" / "latest" / name).read_bytes() for out in ("streamed", "changing")
        )
        assert one == other
    one, other = (json.loads((tmp_path / out / "data.json").read_text()) for out in ("streamed", "changing"))
    assert one == other
