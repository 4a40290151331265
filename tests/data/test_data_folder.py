"""Folders and archives of images: labels, captions, parts, and everything that can be wrong with them."""

import json
import os
import stat
import zipfile
from importlib.util import find_spec

import pytest
from PIL import Image

from scalelong.data import UndecodableError, load_data, open_image
from scalelong.errors import (
    BrokenImagesError,
    DataError,
    DataNotFoundError,
    MetadataError,
    MissingDependencyError,
    UnreadableDataError,
    UnsafeArchiveError,
)

SIZE = (5, 4)


def paint(folder, *names):
    """Images whose gray value is their position in `names`, so that each can be recognised."""
    for value, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", SIZE, value).save(path)
    return folder


def values(data) -> list[int]:
    return data.fetch(range(len(data))).images[:, 0, 0, 0].tolist()


def zipped(folder, path, prefix=""):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path


@pytest.fixture(params=["folder", "zip"])
def opened(request, tmp_path):
    """Loads a folder as it is, and as an archive: both must behave alike."""

    def load(folder, **options):
        if request.param == "folder":
            return load_data(str(folder), **options)
        return load_data(str(zipped(folder, tmp_path / "photos.zip", "photos/")), **options)

    return load


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


def test_plain_folder(folder, opened):
    data = opened(paint(folder, "b.png", "a.PNG", "c.bmp", ".hidden.png", "__MACOSX/d.png"))
    assert (len(data), data.channels, data.height, data.width) == (3, 1, 4, 5)
    assert values(data) == [1, 0, 2], "in the order of names"
    assert data.classes is None
    assert data.fetch([0]).labels is None
    assert data.broken == ()


def test_labels_from_sub_folders(folder, opened):
    data = opened(paint(folder, "dog/1.png", "cat/1.png", "cat/more/2.png"))
    assert data.classes == ("cat", "dog")
    assert dict(zip(values(data), data.fetch(range(3)).labels.tolist(), strict=True)) == {0: 1, 1: 0, 2: 0}


def test_parts_by_folder_number_classes_alike(folder, opened):
    paint(folder, "train/ape/1.png", "train/bee/1.png", "train/cow/1.png", "test/cow/2.png", "valid/ape/3.png")
    train, test, valid = (opened(folder, split=split) for split in ("train", "test", "validation"))
    assert (len(train), len(test), len(valid)) == (3, 1, 1)
    assert train.classes == test.classes == ("ape", "bee", "cow")
    assert test.fetch([0]).labels.tolist() == [2]
    with pytest.raises(DataNotFoundError, match=r"no part 'extra'; found: 'test', 'train', 'validation'"):
        opened(folder, split="extra")


@pytest.mark.parametrize(
    ("names", "classes"),
    [(("all/1.png", "all/2.png"), None), (("train/1.png", "bus/1.png"), ("bus", "train"))],
    ids=["one folder alone is a place", "a class may be called train"],
)
def test_which_folders_are_classes(folder, opened, names, classes):
    assert opened(paint(folder, *names)).classes == classes
    with pytest.raises(DataNotFoundError, match="no part 'test'"):
        opened(folder, split="test")


def test_captions_from_jsonl(folder, opened):
    paint(folder, "a.png", "sub/b.png")
    rows = [{"file_name": "sub/b.png", "text": "über  b\n"}, {"file_name": "a.png", "text": "an a"}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    data = opened(folder)
    assert data.has_captions
    assert dict(zip(values(data), data.fetch([0, 1]).captions, strict=True)) == {0: "an a", 1: "über b"}


def test_captions_and_labels_from_csv(folder, opened):
    paint(folder, "a.png", "b.png", "c.png")
    text = '\ufefffile_name,caption,label\na.png,"one, two",wolf\nb.png,,fox\nc.png,three,wolf\n'
    (folder / "metadata.csv").write_text(text, encoding="utf-8")
    batch = opened(folder).fetch([0, 1, 2])
    assert batch.captions == ["one, two", "", "three"]
    assert batch.labels.tolist() == [1, 0, 1]
    (folder / "metadata.csv").write_text("file_name,label\na.png,10\nb.png,2\nc.png,0\n")
    assert opened(folder).fetch([0, 1, 2]).labels.tolist() == [10, 2, 0], "numbers stay numbers"


def test_captions_beside_the_images(folder, opened):
    paint(folder, "a.png", "b.jpeg")
    (folder / "a.txt").write_text("first\n line")
    (folder / "b.txt").write_text("second")
    (folder / "README.txt").write_text("not a caption")
    assert opened(folder).fetch([0, 1]).captions == ["first line", "second"]
    (folder / "b.txt").unlink()
    with pytest.raises(MetadataError, match=r"1 of 2 images: .*b\.txt"):
        opened(folder)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}', MetadataError, r"no row for 1 of 2 images: .*b\.png"),
        ("metadata.jsonl", '{"file_name": "gone.png", "text": "x"}', MetadataError, r"not there: .*gone\.png"),
        ("metadata.jsonl", "{broken", MetadataError, "line 1"),
        ("metadata.jsonl", '{"file": "a.png"}', MetadataError, "'file_name'"),
        ("metadata.jsonl", '{"file_name": "../a.png", "text": "x"}', MetadataError, "below the metadata"),
        ("metadata.csv", "file_name,text\na.png,x\na.png,y\n", MetadataError, "line 3"),
        ("metadata.csv", "file_name,text\na.png,x,y\nb.png,x\n", MetadataError, "line 2.*2 fields"),
        ("metadata.csv", "file_name,label\na.png,x\nb.png,\n", MetadataError, r"no 'label' for 1 .*b\.png"),
        ("metadata.csv", "file_name,width\na.png,1\nb.png,2\n", MetadataError, "neither captions nor labels"),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "text": "x"}\n{"file_name": "b.png"}',
            MetadataError,
            r"no 'text' for 1 of 2 images: .*b\.png",
        ),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "text": "x"}\n{"file_name": "b.png", "text": 3}',
            MetadataError,
            "must be a text, found 3",
        ),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "label": "x"}\n{"file_name": "b.png", "label": 1}',
            DataError,
            "all whole numbers or all names",
        ),
    ],
)
def test_metadata_that_does_not_fit_is_named(folder, opened, name, content, error, message):
    paint(folder, "a.png", "b.png")
    (folder / name).write_text(content)
    with pytest.raises(error, match=message):
        opened(folder)


def test_empty_folders_and_folders_without_images(folder, tmp_path):
    with pytest.raises(DataNotFoundError, match="found nothing; looked for"):
        load_data(str(folder))
    (folder / "notes.docx").write_text("x")
    with pytest.raises(DataNotFoundError, match=r"1 × \.docx"):
        load_data(str(folder))


def damage(folder, *names):
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("memory_limit", [2**20, 0], ids=["memory", "stream"])
def test_broken_images_are_skipped_and_named_up_to_the_limit(folder, opened, memory_limit, caplog):
    paint(folder, *[f"{number:02}.png" for number in range(20)])
    (folder / "07.png").write_bytes(b"")
    (folder / "11.png").write_text("no image")
    data = opened(folder, skip_broken=2, memory_limit=memory_limit)
    assert len(data) == 18
    assert values(data) == [value for value in range(20) if value not in (7, 11)]
    assert [broken.name.rpartition("/")[2] for broken in data.broken] == ["07.png", "11.png"]
    assert "empty file" in data.broken[0].reason
    assert "07.png (empty file)" in caplog.text
    with pytest.raises(BrokenImagesError, match=r"2 of 20 images cannot be read, 1 are allowed.*07\.png.*11\.png"):
        opened(folder, skip_broken=1, memory_limit=memory_limit)
    with pytest.raises(BrokenImagesError, match=r"0 are allowed.*07\.png"):
        opened(folder, skip_broken=0, memory_limit=memory_limit)
    assert len(opened(folder, skip_broken=0.1, memory_limit=memory_limit)) == 18


def test_folder_and_archive_have_one_fingerprint(folder, tmp_path):
    paint(folder, "a/0.png", "b/1.png")
    archive = zipped(folder, tmp_path / "set.zip")
    assert load_data(str(folder)).fingerprint() == load_data(str(archive)).fingerprint()


def test_links_to_folders_are_followed_once(folder, tmp_path):
    paint(tmp_path / "elsewhere", "x.png", "y.png")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "circle").symlink_to(folder)
    assert len(load_data(str(folder))) == 2


@pytest.mark.parametrize("memory_limit", [2**20, 0])
def test_dangling_links_are_broken_images(folder, tmp_path, memory_limit):
    paint(folder, "a.png")
    (folder / "b.png").symlink_to(tmp_path / "gone")
    data = load_data(folder, memory_limit=memory_limit)
    assert values(data) == [0]
    assert "No such file" in data.broken[0].reason
    assert len(data.fingerprint()) == 64


def member(name: str, content: bytes = b"x", mode: int = 0o644 | stat.S_IFREG) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info, content


@pytest.mark.parametrize("name", ["a.png", "notes.txt"])
def test_bombs_in_an_archive_are_refused(tmp_path, name):
    paint(tmp_path, "good.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "good.png", "good.png")
        archive.writestr(*member(name, bytes(30 * 1024**2)))
    with pytest.raises(UnsafeArchiveError, match="would unpack from"):
        load_data(str(tmp_path / "a.zip"))


@pytest.mark.parametrize("name", ["../a.png", "/etc/a.png", "C:\\a.png"])
def test_names_in_an_archive_can_do_no_harm(tmp_path, name):
    """Nothing is unpacked to disk, and a link is its text, which is no image."""
    paint(tmp_path, "good.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "good.png", "good.png")
        archive.writestr(*member(name, (tmp_path / "good.png").read_bytes()))
        archive.writestr(*member("link.png", b"good.png", 0o777 | stat.S_IFLNK))
    before = sorted(tmp_path.parent.rglob("*"))
    data = load_data(str(tmp_path / "a.zip"))
    assert set(values(data)) == {0}
    assert [broken.name for broken in data.broken] == ["link.png"]
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_overlapping_members_are_refused(tmp_path):
    """The quoted-overlap bomb: many entries of the directory point at the same data."""
    paint(tmp_path, "good.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("kernel.png", os.urandom(200_000))
        for number in range(3):
            copy = zipfile.ZipInfo(f"{number}.png")
            kernel = archive.getinfo("kernel.png")
            copy.CRC, copy.file_size, copy.compress_size = kernel.CRC, kernel.file_size, kernel.compress_size
            copy.header_offset = kernel.header_offset
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
    with pytest.raises(UnsafeArchiveError, match="overlap"):
        load_data(str(tmp_path / "a.zip"))


def test_an_archive_that_lies_about_sizes_cannot_unpack_more(tmp_path):
    bomb = bytes(8 * 1024**2)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bomb)
        archive.getinfo("a.png").file_size = 1000
    with pytest.raises(BrokenImagesError, match="cannot be read"):
        load_data(str(tmp_path / "a.zip"), skip_broken=1)


def test_other_bad_archives(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(UnreadableDataError, match="zip archive"):
        load_data(str(tmp_path / "a.zip"))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("a.png", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.png", b"2")
    with pytest.raises(MetadataError, match=r"a\.png"):
        load_data(str(tmp_path / "b.zip"))
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.png", b"1")
    with pytest.raises(UnreadableDataError, match="deflate"):
        load_data(str(tmp_path / "c.zip"))
    with zipfile.ZipFile(tmp_path / "d.zip", "w"):
        pass
    with pytest.raises(DataNotFoundError, match="found nothing"):
        load_data(str(tmp_path / "d.zip"))


@pytest.mark.parametrize("memory_limit", [10**9, 0])
def test_all_broken_images_are_named_at_once(tmp_path, memory_limit, monkeypatch):
    """Those without a header and those whose pixels are cut off, in memory and in the image cache."""
    folder = tmp_path / "images"
    paint(folder, *[f"{number:02}.png" for number in range(20)])
    for number in (3, 7):
        (folder / f"{number:02}.png").write_bytes(b"no image")
    damage(folder, "19.png")
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path / "cache"))
    options = {"memory_limit": memory_limit, "image_cache": "auto"}
    with pytest.raises(BrokenImagesError, match=r"3 of 20 .*03\.png.*07\.png.*19\.png.*`skip_broken`"):
        load_data(folder, skip_broken=2, **options)
    assert len(load_data(folder, skip_broken=True, size=4, memory_limit=0).broken) == 3, "all headers are read"
    left = load_data(folder, skip_broken=True, **options)
    assert len(left.broken) == 3
    assert {3, 7, 19}.isdisjoint(values(left))


def test_different_sizes_are_said_as_such(tmp_path):
    for number, size in enumerate([(20, 21), (300, 200), (64, 64)]):
        Image.new("L", size).save(tmp_path / f"{number}.png")
    assert "3 different sizes, 20×21 to 300×200" in load_data(tmp_path, size=16).describe()
    assert "different sizes" not in load_data("digits", size=16).describe()


def test_photographs_of_phones_need_an_extra(tmp_path):
    (tmp_path / "a.HEIC").write_bytes(b"")
    if find_spec("pillow_heif") is None:
        with pytest.raises(MissingDependencyError, match=r"convert them to JPEG, .*scalelong\[heic\]"):
            load_data(tmp_path)
        paint(tmp_path, "b.png")
        assert "scalelong[heic]" in load_data(tmp_path).describe()


def test_heic_is_read(tmp_path):
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed: pip install 'scalelong[heic]'")
    heif.register_heif_opener()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(tmp_path / "a.heic")
    data = load_data(tmp_path)
    assert (data.channels, data.height, data.width) == (3, 48, 64)
    assert abs(int(data.fetch([0]).images[0, 0, 24, 32]) - 200) < 8


def test_ghostscript_is_never_started(tmp_path, monkeypatch):
    """Pillow reads EPS by starting it, whatever the file is called."""
    (tmp_path / "x.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"
    )
    Image.new("L", (4, 4)).save(tmp_path / "y.png")
    monkeypatch.setattr("subprocess.Popen", lambda *given, **options: pytest.fail("a process was started"))
    assert [broken.name for broken in load_data(tmp_path).broken] == ["x.png"]
    with pytest.raises(UndecodableError):
        open_image((tmp_path / "x.png").read_bytes())
