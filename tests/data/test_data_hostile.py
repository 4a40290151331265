"""Data sets from strangers: pipes, devices, giants, lying headers, rows that name the files of others."""

import errno
import json
import os
import struct
from io import BytesIO

import pytest

from scalelong.data import load_data
from scalelong.data.folders import TreeSource
from scalelong.errors import BrokenImagesError, CannotReadError, MetadataError, ScaleLongError, UnreadableDataError

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")
import pyarrow.parquet as pq  # noqa: E402


def png(shade: int = 0) -> bytes:
    content = BytesIO()
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(3):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(number))
    return tmp_path / "images"


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/tty", "sparse"])
def test_what_is_no_file_among_the_images_is_skipped_without_being_opened(kind, folder):
    if kind == "pipe":
        os.mkfifo(folder / "x.png")
    elif kind == "sparse":
        with (folder / "x.png").open("wb") as file:
            file.truncate(60 * 1024**3)
    else:
        (folder / "x.png").symlink_to(kind)
    data = load_data(folder)
    assert len(data) == 3
    assert data.broken[0].name == "x.png"
    with pytest.raises(BrokenImagesError, match=r"x\.png"):
        load_data(folder, skip_broken=0)


def test_nesting_and_labels_beyond_measure(folder):
    (folder / "metadata.jsonl").write_text("[" * 100_000)
    with pytest.raises(MetadataError, match="nested too deeply"):
        load_data(folder)
    rows = [{"file_name": f"{number}.png", "label": 2**63} for number in range(3)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(MetadataError, match="9223372036854775808"):
        load_data(folder)


# Tables


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret.png", "a/../../secret.png", "/dev/zero", "link/secret.png"])
def test_rows_name_no_files_of_others(path, tmp_path):
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "link").symlink_to(tmp_path)
    pq.write_table(pa.table({"image": [{"bytes": None, "path": path}]}), tmp_path / "table" / "a.parquet")
    with pytest.raises(BrokenImagesError, match="in the folder of the data"):
        load_data(tmp_path / "table" / "a.parquet")


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"bytes": png(number), "path": None} for number in range(4)]
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    made = datasets.Dataset.from_dict({"image": rows, "text": ["a", "bc", "def", "g"]}, features=features)
    made.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_offsets_that_point_elsewhere_are_found_before_they_are_used(saved):
    """Unchecked, some of these end the process."""
    assert len(load_data(saved)) == 4
    file = next(saved.glob("*.arrow"))
    content = file.read_bytes()
    place = content.index(struct.pack("<4i", 0, 1, 3, 6))  # where the texts begin
    for wrong in (2**30, -5):
        file.write_bytes(content[:place] + struct.pack("<4i", 0, wrong, 3, 6) + content[place + 16 :])
        with pytest.raises(UnreadableDataError, match="is damaged"):
            load_data(saved)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"_data_files": 3, "features": {"image": 3}}', "[" * 9999])
def test_damaged_notes_of_a_saved_set(name, content, saved):
    (saved / name).write_text(content)
    with pytest.raises(ScaleLongError):
        load_data(saved)


def test_a_saved_set_names_no_tables_of_others(saved):
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other.arrow"}]
    (saved / "state.json").write_text(json.dumps(state))
    with pytest.raises(UnreadableDataError, match="outside"):
        load_data(saved)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.ESTALE])
def test_what_the_machine_lacks_is_no_broken_image(code, tmp_path, monkeypatch):
    """Skipped as broken, the image would be missing from the training without a word."""
    for number in range(3):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")

    def read(self: TreeSource, row: int) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(TreeSource, "read", read)
    with pytest.raises(CannotReadError, match="png cannot be read"):
        load_data(tmp_path, size=8, skip_broken=3)
