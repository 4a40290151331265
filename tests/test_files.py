"""Files that are whole or not there, locks, the cache, and readers, under every interruption that can be simulated."""

import errno
import os
import resource
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from scalelong import files
from scalelong.errors import CannotReadError, CannotWriteError, FolderInUseError, LinkRefusedError
from scalelong.files import (
    append_json_line,
    below,
    cached_array,
    cached_bytes,
    digest,
    fitting,
    key_of,
    locked,
    new_folder,
    read_bytes,
    read_json,
    read_json_lines,
    read_text,
    require_file_place,
    require_folder_place,
    write_json_lines,
    write_text,
)
from scalelong.runs import save_png


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_all(code: str, *arguments: list[str]) -> None:
    running = [subprocess.Popen([sys.executable, "-c", code, *given]) for given in arguments]
    assert [process.wait() for process in running] == [0] * len(running)


# Whole files and folders


def test_a_file_is_replaced_and_nothing_is_left(tmp_path):
    path = tmp_path / "made" / "ä.txt"
    write_text(path, "one")
    (tmp_path / "link").symlink_to(path)
    write_text(str(tmp_path / "link"), "zwölf")
    assert (tmp_path / "link").is_symlink()
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert names(path.parent) == ["ä.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_many_writers_leave_one_whole_file(tmp_path):
    path, texts = tmp_path / "note", [str(i) * 10_000 for i in range(8)]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["note"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
def test_what_the_system_refuses_is_named_and_the_old_file_stays(code, operation, tmp_path, monkeypatch):
    path = tmp_path / "note"
    write_text(path, "old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*((files.links, "open") if operation == "open" else (os, operation)), refuse, raising=False)
        with pytest.raises(CannotWriteError, match=f"note cannot be written: {os.strerror(code)}") as refused:
            write_text(path, "new")
    assert refused.value.errno == code
    assert read_text(path) == "old"
    assert names(tmp_path) == ["note"]


def test_what_a_kill_left_is_removed_by_the_next_process(tmp_path):
    script = (
        "import os, signal, sys\nfrom scalelong import files\nos.replace = lambda *_, **__: os.kill(os.getpid(), 9)\n"
    )
    script += "files.write_text(sys.argv[1], 'x')\n"
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.json"], check=False)
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    write_text(tmp_path / "a.json", "y")
    assert names(tmp_path) == ["a.json"]


def test_a_folder_is_complete_or_not_there(tmp_path, monkeypatch):
    target = tmp_path / "made" / "here"
    with new_folder(target) as folder:
        (folder / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"

    def fail_halfway() -> None:
        with new_folder(tmp_path / "other") as folder:
            (folder / "file").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert names(tmp_path) == ["made"]
    for taken in (target, "/"):
        with pytest.raises(FolderInUseError, match="not an empty folder"), new_folder(taken):
            pass
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with new_folder(".") as folder:
        (folder / "file").write_text("y")
    assert (tmp_path / "empty" / "file").exists()


def test_places_are_refused_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    for good in (tmp_path / "new", tmp_path / "new" / "deep", tmp_path / "file"):
        require_file_place(good)
    for good in (tmp_path / "new", tmp_path):
        require_folder_place(good)
    with pytest.raises(CannotWriteError, match=r"`out` .* is a folder"):
        require_file_place(tmp_path)
    with pytest.raises(CannotWriteError, match=r"`out` .* is a file"):
        require_folder_place(tmp_path / "file")
    for refuse in (require_file_place, require_folder_place, lambda place: write_text(place, "x")):
        with pytest.raises(CannotWriteError, match=r"inside cannot be written: .* \(.*file\)"):
            refuse(tmp_path / "file" / "inside")
    assert names(tmp_path) == ["file"]


def test_images_of_a_sample_folder_are_not_synced(tmp_path, monkeypatch):
    """Syncing takes 40 times as long as writing a small image."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    save_png(tmp_path / "x.png", torch.zeros(3, 4, 4, dtype=torch.uint8))
    assert read_bytes(tmp_path / "x.png")[:4] == b"\x89PNG"


# JSON lines


def test_json_lines_without_those_that_are_no_objects(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"step": 1, "text": "κ"})
    with open(path, "ab") as file:
        file.write(b"\xff\xfe\n[1]\n" + b"[" * 9000 + b'\nnull\n{"step": 2}\n{"step": 3, "lo')
    assert read_json_lines(path) == [{"step": 1, "text": "κ"}, {"step": 2}]
    write_json_lines(path, [{"step": 5}])
    assert path.read_text() == '{"step": 5}\n'


APPEND = """
import sys
from scalelong.files import append_json_line
for number in range(25):
    append_json_line(sys.argv[1], {"from": int(sys.argv[2]), "number": number, "text": "x" * 20_000})
"""


def test_processes_that_append_at_once_lose_nothing(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.write_text('{"number": -1}')  # without a final newline
    run_all(APPEND, *([str(path), str(i)] for i in range(3)))
    found = read_json_lines(path)
    assert len(found) == 76
    assert {(line["from"], line["number"]) for line in found[1:]} == {(i, j) for i in range(3) for j in range(25)}
    assert names(tmp_path) == ["scores.jsonl"]


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"number": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
    try:
        with pytest.raises(CannotWriteError, match="too large"):
            append_json_line(path, {"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == '{"number": 1}\n'


# Locks


def test_one_process_at_a_time_in_a_locked_folder(tmp_path):
    code = """
import pathlib, sys, time
from scalelong.files import locked
with locked(pathlib.Path(sys.argv[1])):
    count = pathlib.Path(sys.argv[1]) / "count"
    number = int(count.read_text()) if count.exists() else 0
    time.sleep(0.1)
    count.write_text(str(number + 1))
"""
    run_all(code, *[[str(tmp_path)]] * 3)
    assert (tmp_path / "count").read_text() == "3"


@pytest.mark.parametrize("name", [".lock", ".lock-holder"])
def test_a_lock_in_a_strangers_folder_is_no_link(tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    with suppress(LinkRefusedError), locked(tmp_path / "run", wait=False):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


# The cache


@pytest.fixture
def cache(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "scalelong.files")
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_damaged_in_the_cache_is_computed_again(cache):
    made = []

    def content():
        return cached_bytes("things", {"a": 1}, "thing", lambda: made.append(1) or b"right")[0]

    def array():
        return cached_array("arrays", {"a": 1}, (4, 2), "float32", lambda: made.append(1) or [np.ones((2, 2))] * 2)

    for get, name, right in ((content, "thing", b"right"), (lambda: array().tobytes(), "array.npy", b"\0\0\x80?" * 8)):
        made.clear()
        assert get() == get() == right
        file = next(cache.rglob(name))
        manifest = file.parent / "manifest.json"
        for harm in (
            lambda file=file: file.write_bytes(file.read_bytes()[:-1] + b"x"),
            file.unlink,
            manifest.unlink,
            lambda manifest=manifest: manifest.write_text("[]"),
        ):
            harm()
            assert get() == get() == right
        assert len(made) == 5
        assert not list(cache.rglob("*.part"))
    # The keys must not change: what was computed would be computed again.
    assert key_of({"b": [1, 2.5], "a": "x"}) == digest(b'{"a": "x", "b": [1, 2.5]}')[:16]


def test_a_cache_that_cannot_be_written_is_used_and_not_filled(cache, monkeypatch, caplog):
    """Not by permissions, which do not bind root."""

    def use(number):
        array = cached_array("arrays", {"a": number}, (2, 2), "float32", lambda: [np.ones((1, 2))] * 2)
        assert cached_bytes("things", {"a": number}, "thing", lambda: b"right")[0] == b"right"
        assert (array.dtype, array.sum()) == (np.float32, 4)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    use(1)
    monkeypatch.setattr("scalelong.files.disk_cache.locked", refused)
    caplog.clear()
    use(1)
    assert not caplog.records
    use(2)  # computed, and not kept
    assert [record.message.count("SCALELONG_CACHE") for record in caplog.records] == [1, 1]


def test_on_a_full_disk_no_array_is_mapped(cache, monkeypatch):
    """Writing to a mapped file on a full disk would end the process by SIGBUS."""

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CannotWriteError, match="space"):
        cached_array("x", {"a": 1}, (4, 2), "float32", lambda: (pytest.fail("computed") for _ in range(1)))
    assert not list(cache.rglob("*.npy"))


def test_an_unknown_home_is_named(monkeypatch):
    monkeypatch.setenv(files.CACHE_VARIABLE, "~nobody-of-this-name/cache")
    with pytest.raises(CannotReadError, match=files.CACHE_VARIABLE):
        files.cache_folder("x")


# Readers


def test_large_special_and_damaged_files_are_refused(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(60 * 1024**3)
    with pytest.raises(CannotReadError, match="64424509440 bytes"):
        read_text(tmp_path / "sparse")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CannotReadError, match="not a regular file"):
            read_text(place)
    with pytest.raises(CannotReadError, match="No such file"):
        read_text(tmp_path / "absent")
    for content, reason in (
        (b"[" * 100_000, "nested"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff", "UTF-8"),
        (b"", "not"),
    ):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(CannotReadError, match=reason):
            read_json(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["", "null", "5", "- steps", "just words"])
def test_a_file_that_should_hold_fields(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CannotReadError, match="fields such as 'steps: 1000'"):
        files.read_fields(path)
    path.write_text("steps: 3\nimages: {size: 8}\n")
    assert files.read_fields(path) == {"steps": 3, "images": {"size": 8}}


@dataclass
class Cat:
    name: str
    legs: int
    weight: float | None = None
    places: tuple[tuple[int, str], ...] = ()
    owners: dict[str, list[int]] = field(default_factory=dict)
    mood: Literal["good", "bad"] = "good"
    anything: Any = None


def test_what_others_wrote_fits_a_dataclass_or_is_refused():
    given = {"name": "Tom", "legs": 4, "weight": 3, "places": [[1, "sofa"]], "owners": {"a": [1]}, "anything": {}}
    assert fitting(Cat, given) == Cat(**given)
    for change in (
        {"name": 3},
        {"legs": "4"},
        {"legs": True},
        {"legs": 4.0},
        {"weight": "heavy"},
        {"places": [[1]]},
        {"places": [["1", "sofa"]]},
        {"places": "sofa"},
        {"owners": {"a": [None]}},
        {"owners": []},
        {"mood": "fair"},
        {"tail": 1},
    ):
        with pytest.raises(ValueError, match=f"'{next(iter(change))}'"):
            fitting(Cat, {**given, **change})
    with pytest.raises(ValueError, match="'legs'"):
        fitting(Cat, {"name": "Tom"})
    with pytest.raises(ValueError, match="JSON object"):
        fitting(Cat, ["Tom"])


# A stranger's folder: names below it are reached without following links


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("mine")
    return below(tmp_path / "run")


def secret(run) -> Path:
    return run.folder.parent / "home" / "secret"


def test_files_are_written_read_listed_and_deleted(run):
    (run.folder / "a").mkdir()
    run.write_text("a/c.txt", "ü")
    run.write_text("a/c.txt", "new", sync=False)
    with run.open("a/lines", "ab") as file:
        file.write(b"1\n")
    with run.open("a/lines", "r+b") as file:
        file.truncate(0)
    assert (run.read_text("a/c.txt"), run.read_bytes("a/lines")) == ("new", b"")
    run.remove("a/c.txt")
    run.remove("a/c.txt")
    assert run.names("a") == ["lines"]
    assert run.names() == ["a"]
    assert run.names("absent") == []
    (run.folder.parent / "alias").symlink_to(run.folder)  # the folder itself may be a link
    below(run.folder.parent / "alias").write_text("x", "1")
    assert run.read_text("x") == "1"


def test_a_link_is_not_followed_to_a_file(run):
    (run.folder / "metrics.jsonl").symlink_to(secret(run))
    for mode in ("rb", "r+b", "ab"):
        with pytest.raises(LinkRefusedError, match="symbolic link"):
            run.open("metrics.jsonl", mode)
    run.write_text("metrics.jsonl", "ours")
    assert run.read_text("metrics.jsonl") == "ours"
    assert secret(run).read_text() == "mine"


def test_a_link_is_not_followed_to_a_folder(run):
    (run.folder / "checkpoints").symlink_to(secret(run).parent)
    for act in (run.read_bytes, run.remove, lambda name: run.write_text(name, "x")):
        with pytest.raises(LinkRefusedError, match="checkpoints"):
            act("checkpoints/secret")
    run.remove("checkpoints")  # the link itself
    assert secret(run).read_text() == "mine"
    assert run.names() == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../home/secret", "a/../../home/secret", "a\0b"])
def test_names_that_leave_the_folder_are_refused(run, name):
    with pytest.raises(CannotWriteError, match="below"):
        run.read_bytes(name)


def test_pipes_absent_and_large_files_are_refused_with_words(run):
    os.mkfifo(run.folder / "pipe")
    with pytest.raises(CannotReadError, match="regular"):
        run.open("pipe")
    with pytest.raises(CannotReadError, match="No such file"):
        run.read_bytes("absent")
    run.write_text("large", "12345")
    with pytest.raises(CannotReadError, match="more than 4 bytes"):
        run.read_bytes("large", most=4)
