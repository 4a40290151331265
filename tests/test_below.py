"""A stranger's folder: names below it are reached without following links."""

import os
from pathlib import Path

import pytest

from scalelong.errors import CannotReadError, CannotWriteError, LinkRefusedError
from scalelong.files import below


@pytest.fixture(params=[True, False], ids=["descriptors", "paths"])
def run(request, tmp_path, monkeypatch):
    """A folder, reached in both ways: that of POSIX and that of Windows."""
    monkeypatch.setattr("scalelong.files.links._HAS_DIR_FD", request.param)
    (tmp_path / "run").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").write_text("mine")
    return below(tmp_path / "run")


def secret(run) -> Path:
    return run.folder.parent / "home" / "secret"


def test_files_are_written_read_listed_and_deleted(run):
    run.write_text("a/b/c.txt", "ü")
    run.write_text("a/b/c.txt", "new", sync=False)
    with run.open("a/b/lines", "ab") as file:
        file.write(b"1\n")
    with run.open("a/b/lines", "r+b") as file:
        file.truncate(0)
    assert (run.read_text("a/b/c.txt"), run.read_bytes("a/b/lines")) == ("new", b"")
    assert run.names("a/b") == ["c.txt", "lines"]
    assert run.names() == ["a"]
    run.remove("a/b/c.txt")
    run.remove("a/b/c.txt")
    assert run.exists("a/b")
    assert not run.exists("a/b/c.txt")
    run.remove("a")
    assert run.names() == run.names("a") == []


def test_a_link_is_not_followed_to_a_file(run):
    (run.folder / "metrics.jsonl").symlink_to(secret(run))
    for mode in ("rb", "r+b", "ab"):
        with pytest.raises(LinkRefusedError, match="symbolic link"):
            run.open("metrics.jsonl", mode)
    assert not run.exists("metrics.jsonl")
    run.write_text("metrics.jsonl", "ours")
    assert run.read_text("metrics.jsonl") == "ours"
    assert secret(run).read_text() == "mine"


def test_a_link_is_not_followed_to_a_folder(run):
    (run.folder / "checkpoints").symlink_to(secret(run).parent)
    for act in (run.read_bytes, run.remove, lambda name: run.write_text(name, "x")):
        with pytest.raises(LinkRefusedError, match="checkpoints"):
            act("checkpoints/secret")
    with pytest.raises(LinkRefusedError):
        run.remove_matching("checkpoints", "*")
    run.remove("checkpoints")  # the link itself
    assert secret(run).read_text() == "mine"
    assert run.names() == []


def test_a_folder_is_deleted_without_what_its_links_point_to(run):
    run.write_text("old/file", "x")
    (run.folder / "old" / "link").symlink_to(secret(run).parent)
    run.remove("old")
    assert run.names() == []
    assert secret(run).read_text() == "mine"


def test_only_names_that_match_are_deleted(run):
    for name in (".step-1.part", ".step-2.old", ".bashrc.old", "step-3"):
        run.write_text(f"checkpoints/{name}", "")
    run.remove_matching("checkpoints", ".step-*.part", ".step-*.old")
    run.remove_matching("absent", "*")
    assert run.names("checkpoints") == [".bashrc.old", "step-3"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../home/secret", "a/../../home/secret", "a\0b"])
def test_names_that_leave_the_folder_are_refused(run, name):
    with pytest.raises(CannotWriteError, match="below"):
        run.read_bytes(name)


def test_the_folder_itself_may_be_a_link(run):
    (run.folder.parent / "alias").symlink_to(run.folder)
    below(run.folder.parent / "alias").write_text("x", "1")
    assert run.read_text("x") == "1"


def test_pipes_absent_and_large_files_are_refused_with_words(run):
    os.mkfifo(run.folder / "pipe")
    with pytest.raises(CannotReadError, match="regular"):
        run.open("pipe")
    with pytest.raises(CannotReadError, match="No such file"):
        run.read_bytes("absent")
    run.write_text("large", "12345")
    with pytest.raises(CannotReadError, match="more than 4 bytes"):
        run.read_bytes("large", most=4)


def test_a_failed_write_leaves_the_old_file(run, monkeypatch):
    run.write_text("x", "old")
    monkeypatch.setattr(os, "replace", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(CannotWriteError, match="space"):
        run.write_text("x", "new")
    assert run.read_text("x") == "old"
    assert run.names() == ["x"]
