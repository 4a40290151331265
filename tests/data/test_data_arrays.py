"""IDX, .npz and CIFAR-10 batches: real files where there are some, and files made to deceive."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import gzip
import os
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from scalelong.data import load_data
from scalelong.data.arrays import convert_channels
from scalelong.errors import (
    DataNotFoundError,
    InvalidConfigError,
    LabelError,
    MetadataError,
    NoImagesError,
    UnknownSplitError,
    UnreadableDataError,
)

RNG = np.random.default_rng(0)


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, part: str, count: int, pack: bool = False, images: np.ndarray | None = None) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = RNG.integers(0, 256, (count, 6, 5), dtype=np.uint8) if images is None else images
    labels = np.arange(count, dtype=np.uint8) % 3
    for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return images


@pytest.mark.skipif(not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs dataset-fashion-mnist")
def test_debians_fashion_mnist_is_found_by_itself():
    test = load_data("fashion-mnist", split="test")
    assert (len(test), test.channels, test.height, test.width) == (10_000, 1, 28, 28)
    batch = test.fetch(range(10_000))
    assert torch.bincount(batch.labels).tolist() == [1000] * 10
    assert [test.classes[label] for label in batch.labels[:3].tolist()] == ["Ankle boot", "Pullover", "Trouser"]
    # The published mean of the test images, as every normalisation of this set uses it.
    assert float(batch.images.float().mean() / 255) == pytest.approx(0.2868, abs=5e-4)


@pytest.mark.parametrize("pack", [False, True])
def test_idx_folder_and_file(tmp_path, pack):
    train, test = write_idx(tmp_path, "train", 7, pack), write_idx(tmp_path, "t10k", 4, pack)
    data = load_data(str(tmp_path))
    assert np.array_equal(data.fetch(range(7)).images[:, 0].numpy(), train)
    assert data.fetch(range(7)).labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert data.classes == ("0", "1", "2")
    assert np.array_equal(load_data(str(tmp_path), split="test").fetch(range(4)).images[:, 0].numpy(), test)
    file = str(tmp_path / f"t10k-images-idx3-ubyte{'.gz' if pack else ''}")
    assert len(load_data(file)) == 4
    with pytest.raises(UnknownSplitError, match="found: 'test', 'train'"):
        load_data(str(tmp_path), split="validation")


def test_idx_as_torchvision_keeps_it(tmp_path):
    write_idx(tmp_path / "MNIST" / "raw", "train", 3)
    assert len(load_data(tmp_path)) == len(load_data(tmp_path / "MNIST")) == 3


def test_idx_without_labels(tmp_path):
    write_idx(tmp_path, "train", 3)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    assert load_data(str(tmp_path)).classes is None


def test_known_sets_by_environment(tmp_path, monkeypatch):
    write_idx(tmp_path / "MNIST" / "raw", "train", 5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALELONG_DATA", os.pathsep.join(["missing", str(tmp_path)]))
    assert len(load_data("mnist")) == 5
    assert len(load_data("mnist").classes) == 10
    monkeypatch.setenv("SCALELONG_DATA", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = []

    def hub(name, options):
        asked.append(name)
        raise DataNotFoundError("no network")

    monkeypatch.setattr("scalelong.data.load.load_hub", hub)
    with pytest.raises(DataNotFoundError, match=r"mnist or MNIST/raw.*no network.*SCALELONG_DATA"):
        load_data("mnist")
    assert asked == ["hf:ylecun/mnist"]


def test_cifars_pickles_are_not_read(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"")
    with pytest.raises(UnreadableDataError, match="parquet"):
        load_data(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda good: good[:-1], "cut off"),
        (lambda good: good + b"x", "IDX file"),
        (lambda good: good[:6], "IDX file"),
        (lambda good: b"PNG!" + good, "IDX file"),
        (lambda good: idx_bytes(np.zeros((2, 3, 3), np.float32), 0x0D), "of bytes"),
        (lambda good: idx_bytes(np.zeros(9, np.uint8)), "shape"),
        (lambda good: struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**31, 9), "memory_limit"),
        (lambda good: gzip.compress(good)[:-10], "cannot be read"),
        (lambda good: gzip.compress(good + bytes(10**7)), "IDX file"),
    ],
)
def test_damaged_idx_is_named(tmp_path, change, message):
    good = idx_bytes(RNG.integers(0, 256, (4, 6, 5), dtype=np.uint8))
    (tmp_path / "train-images-idx3-ubyte").write_bytes(change(good))
    with pytest.raises(UnreadableDataError, match=message):
        load_data(str(tmp_path))


def test_idx_labels_must_match(tmp_path):
    write_idx(tmp_path, "train", 5)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(4, np.uint8)))
    with pytest.raises(LabelError, match=r"shape \(4,\) for 5 images"):
        load_data(str(tmp_path))


def npz(tmp_path, **arrays) -> str:
    np.savez_compressed(tmp_path / "set.npz", **arrays)
    return str(tmp_path / "set.npz")


BYTES = RNG.integers(0, 256, (6, 9, 7, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (BYTES, BYTES),
        (BYTES.transpose(0, 3, 1, 2), BYTES),
        (BYTES[..., 0], BYTES[..., :1]),
        (BYTES[..., :1], BYTES[..., :1]),
        (BYTES / np.float32(255), BYTES),
        (BYTES / 127.5 - 1, BYTES),
        (BYTES.astype(np.int64), BYTES),
        (BYTES.astype(np.float64), BYTES),
        (BYTES.astype(np.uint16) * 257, BYTES),
        (BYTES > 99, (BYTES > 99) * np.uint8(255)),
        (BYTES[:, :4, :4], BYTES[:, :4, :4]),
        (BYTES[:, :4, :4].transpose(0, 3, 1, 2), BYTES[:, :4, :4]),
    ],
)
def test_npz_layouts_and_types(tmp_path, array, expected):
    data = load_data(npz(tmp_path, images=array))
    assert np.array_equal(data.fetch(range(6)).images.numpy(), expected.transpose(0, 3, 1, 2))
    assert data.classes is None


def test_npz_labels_captions_classes_and_parts(tmp_path):
    captions = np.array([f"image {row}" for row in range(6)])
    where = npz(tmp_path, images=BYTES, labels=np.array([[2], [0], [1], [1], [0], [2]]), captions=captions)
    data = load_data(where)
    assert data.fetch([0, 5]).labels.tolist() == [2, 2]
    assert data.fetch([3]).captions == ["image 3"]
    where = npz(tmp_path, images=BYTES, labels=np.array(list("cabbac")), classes=np.array(list("abc")))
    assert load_data(where).fetch(range(6)).labels.tolist() == [2, 0, 1, 1, 0, 2]
    # Keras' mnist.npz has these names.
    where = npz(tmp_path, x_train=BYTES, y_train=np.arange(6), x_test=BYTES[:2], y_test=np.arange(2))
    assert len(load_data(where)) == 6
    assert load_data(where, split="test").fetch([1]).labels.tolist() == [1]
    with pytest.raises(UnknownSplitError, match="x_test"):
        load_data(where, split="validation")
    np.savez(tmp_path / "plain.npz", BYTES, np.arange(6))
    assert load_data(str(tmp_path / "plain.npz")).fetch([4]).labels.tolist() == [4]


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"pictures": BYTES}, UnreadableDataError, "pictures"),
        ({"images": BYTES[0, 0]}, UnreadableDataError, "shape"),
        ({"images": np.zeros((2, 3, 3, 3), np.uint8)}, UnreadableDataError, "not clear which are the channels"),
        ({"images": np.zeros((2, 9, 9, 9), np.uint8)}, UnreadableDataError, "not clear which are the channels"),
        ({"images": BYTES * 3.7}, UnreadableDataError, "float64 from"),
        ({"images": np.full((2, 5, 5), np.nan)}, UnreadableDataError, "nan"),
        ({"images": np.zeros((2, 5, 5), np.complex64)}, UnreadableDataError, "complex64"),
        ({"images": np.zeros((0, 5, 5), np.uint8)}, NoImagesError, "empty"),
        ({"images": BYTES, "labels": np.arange(5)}, LabelError, r"\(5,\); needed are 6"),
        ({"images": BYTES, "labels": np.linspace(0, 1, 6)}, LabelError, "float64"),
        ({"images": BYTES, "labels": np.array([0, 1, 2, -5, 1, 1])}, LabelError, "found -5"),
        ({"images": BYTES, "labels": np.arange(6), "classes": np.array(["a", "b"])}, LabelError, "2 classes"),
        ({"images": BYTES, "captions": np.array(["one"])}, MetadataError, "1 captions for 6 images"),
        ({"images": np.array([object()] * 3)}, UnreadableDataError, "cannot be read"),
    ],
)
def test_bad_npz_is_named(tmp_path, arrays, error, message):
    with pytest.raises(error, match=message):
        load_data(npz(tmp_path, **arrays))


def test_npz_that_is_too_large_or_no_archive(tmp_path):
    with pytest.raises(UnreadableDataError, match="memory_limit=1000000"):
        load_data(npz(tmp_path, images=np.zeros((4000, 20, 20), np.uint8)), memory_limit=10**6)
    (tmp_path / "set.npz").write_bytes(b"nothing")
    with pytest.raises(UnreadableDataError, match="cannot be read"):
        load_data(str(tmp_path / "set.npz"))


def test_images_without_a_side_are_no_images(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 0, 8), np.uint8))
    with pytest.raises(NoImagesError, match="empty"):
        load_data(tmp_path / "x.npz", size=8)


def test_npz_never_runs_pickles(tmp_path):
    evil = np.empty(1, dtype=object)
    evil[0] = Evil(tmp_path / "owned")
    np.save(tmp_path / "images.npy", evil, allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        archive.write(tmp_path / "images.npy", "images.npy")
    with pytest.raises(UnreadableDataError):
        load_data(str(tmp_path / "set.npz"))
    assert not (tmp_path / "owned").exists()


class Evil:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_channel_conversions_agree_with_pillow():
    from PIL import Image

    rgba = RNG.integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Image.fromarray(rgba)
    flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    tensor = torch.from_numpy(rgba).permute(2, 0, 1)[None]
    ours = convert_channels(tensor, 3)
    assert (ours[0].permute(1, 2, 0).int() - torch.from_numpy(np.array(flat)).int()).abs().max() <= 1
    gray = np.array(Image.fromarray(rgba[..., :3]).convert("L"))
    assert np.array_equal(convert_channels(tensor[:, :3], 1)[0, 0].numpy(), gray)
    assert convert_channels(tensor[:, :1], 4)[0, 3].min() == 255
    with pytest.raises(InvalidConfigError, match="has 1 channels, which cannot become 2"):
        load_data("digits", channels=2)
