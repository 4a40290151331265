"""Parquet and Hugging Face data sets, written by pyarrow and by `datasets` themselves."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scalelong.data import load_data
from scalelong.errors import BrokenImagesError, DataNotFoundError, MetadataError, UnreadableDataError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def png(value: int, size: tuple[int, int] = (5, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (value, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def structs(*contents: bytes | None) -> pa.Array:
    rows = [{"bytes": content, "path": f"{row}.png"} for row, content in enumerate(contents)]
    return pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def reds(data) -> list[int]:
    return data.fetch(range(len(data))).images[:, 0, 0, 0].tolist()


def write(path, metadata=None, **columns) -> str:
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=2)
    return str(path)


def test_real_cifar10(cifar10):
    data = load_data(str(cifar10), split="test", limit=500)
    assert (len(data), data.channels, data.height, data.width) == (500, 3, 32, 32)
    assert len(data.classes) == 10
    table = pq.read_table(cifar10 / "test.parquet")
    for row in (0, 250, 499):
        stored = table["img"][row * 20].as_py()["bytes"]
        assert np.array_equal(
            data.fetch([row]).images[0].permute(1, 2, 0).numpy(), np.asarray(Image.open(io.BytesIO(stored)))
        )
        assert data.fetch([row]).labels.tolist() == [table["label"][row * 20].as_py()]


def test_parts_by_file_name(tmp_path):
    for number in range(2):
        write(tmp_path / f"train-0000{number}-of-00002.parquet", image=structs(png(number)))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "validation.parquet", image=structs(png(9)))
    assert reds(load_data(str(tmp_path))) == [0, 1]
    assert reds(load_data(str(tmp_path), split="val")) == [9]
    with pytest.raises(DataNotFoundError, match="found: 'validation', 'train'"):
        load_data(str(tmp_path), split="test")
    assert reds(load_data(str(tmp_path / "data" / "validation.parquet"))) == [9]
    with pytest.raises(DataNotFoundError, match="is one file"):
        load_data(str(tmp_path / "data" / "validation.parquet"), split="test")


def test_plain_bytes_captions_and_named_labels(tmp_path):
    captions = [["one  more", "again"], ["two", "again"]]  # of several the first is taken
    columns = {"photo": pa.array([png(1), png(2)]), "caption": captions, "label": ["b", "a"]}
    data = load_data(write(tmp_path / "x.parquet", **columns))
    assert data.fetch([0, 1]).captions == ["one more", "two"]
    assert data.classes == ("a", "b")
    assert data.fetch([0, 1]).labels.tolist() == [1, 0]


def test_broken_rows_are_named(tmp_path):
    where = write(
        tmp_path / "x.parquet", image=structs(png(0), b"no image", png(2), None), label=pa.array([0, 1, 2, 3])
    )
    data = load_data(where, skip_broken=2)
    assert reds(data) == [0, 2]
    assert data.fetch([1]).labels.tolist() == [2]
    assert [broken.name for broken in data.broken] == ["row 1", "row 3"]
    with pytest.raises(BrokenImagesError, match="row 1"):
        load_data(where, skip_broken=1)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"label": [1]}, UnreadableDataError, "the columns are"),
        ({"image": ["a.png"]}, UnreadableDataError, "could be"),
        ({"image": [[1, 2, 3]]}, UnreadableDataError, "could be"),
        ({"first": pa.array([b"1"]), "second": pa.array([b"2"])}, UnreadableDataError, "could be"),
        ({"image": structs(png(1)), "label": pa.array([None], pa.int64())}, MetadataError, "whole numbers"),
        ({"image": structs(png(1)), "label": [0.5]}, MetadataError, "whole numbers"),
        (
            {"image": structs(png(1)), "text": pa.array([None], pa.string())},
            MetadataError,
            "must be a text, found None",
        ),
    ],
)
def test_unusable_columns_are_named(tmp_path, columns, error, message):
    with pytest.raises(error, match=message):
        load_data(write(tmp_path / "x.parquet", **columns))


def test_damaged_and_differing_files(tmp_path):
    write(tmp_path / "a.parquet", image=structs(png(1)))
    write(tmp_path / "b.parquet", image=structs(png(1)), label=[1])
    with pytest.raises(UnreadableDataError, match=r"b\.parquet .* cannot be read as one"):
        load_data(str(tmp_path))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UnreadableDataError, match=r"b\.parquet .* cannot be read as one"):
        load_data(str(tmp_path))


def hugging_face(count: int = 4) -> Any:
    return datasets.Dataset.from_dict(
        {
            "image": [Image.new("RGB", (5, 4), (value, 0, 0)) for value in range(count)],
            "label": [value % 2 for value in range(count)],
            "text": [f"number {value}" for value in range(count)],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=["even", "odd"]),
                "text": datasets.Value("string"),
            }
        ),
    )


def test_saved_data_sets(tmp_path):
    hugging_face().save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": hugging_face(3), "test": hugging_face(2)}).save_to_disk(tmp_path / "parts")
    data = load_data(tmp_path / "one")
    assert reds(data) == [0, 1, 2, 3]
    assert data.classes == ("even", "odd")
    assert data.fetch([3]).captions == ["number 3"]
    assert data.fetch([3]).labels.tolist() == [1]
    assert len(load_data(tmp_path / "parts", split="test")) == 2
    stream = load_data(str(tmp_path / "parts"), memory_limit=10)
    assert not stream.in_memory
    assert reds(stream) == [0, 1, 2]
    with pytest.raises(DataNotFoundError, match="'train', 'test'"):
        load_data(str(tmp_path / "parts"), split="validation")


def test_parquet_written_by_datasets(tmp_path):
    (tmp_path / "set").mkdir()
    hugging_face().to_parquet(tmp_path / "set" / "train.parquet")
    data = load_data(str(tmp_path / "set"))
    assert data.classes == ("even", "odd")
    assert reds(data) == [0, 1, 2, 3]


def test_names_go_to_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return datasets.DatasetDict({"train": hugging_face()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_data("hf:owner/name")) == 4
    assert len(load_data("hf:owner/name:large")) == 4
    assert asked == [("owner/name", None), ("owner/name", "large")]


def test_an_unreachable_hub_is_a_named_error(monkeypatch):
    def load_dataset(*arguments):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataNotFoundError, match=r"'hf:owner/name' cannot be loaded: ConnectionError: no route.*save_to_disk"
    ):
        load_data("hf:owner/name")
