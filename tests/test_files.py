"""Files that are whole or not there, under every interruption that can be simulated."""

import json
import os
import stat
import subprocess
import sys
import threading

import pytest

from scalelong.files import (
    append_json_line,
    cached_array,
    digest,
    file_digest,
    key_of,
    locked,
    new_folder,
    read_json_lines,
    write_bytes,
    write_json_lines,
    write_text,
)


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


def test_a_file_is_replaced_and_nothing_is_left(tmp_path):
    path = tmp_path / "ä.txt"
    write_text(path, "one")
    write_text(str(path), "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert not leftovers(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failure_keeps_the_previous_version(tmp_path, monkeypatch):
    path = tmp_path / "note"
    write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert not leftovers(tmp_path)


def test_many_writers_leave_one_whole_file(tmp_path):
    path, texts = tmp_path / "note", [str(i) * 10_000 for i in range(8)]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert not leftovers(tmp_path)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"through")
    reader.join()
    assert got == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_is_written_to_also_if_it_is_a_file(tmp_path):
    code = "from scalelong.files import write_text; print('a', flush=True); write_text('/dev/stdout', 'b')"
    with open(tmp_path / "out", "a") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert "b" in (tmp_path / "out").read_text()
    assert os.path.lexists("/dev/stdout")


def test_a_folder_is_complete_or_not_there(tmp_path):
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
    assert not (tmp_path / "other").exists()
    assert not leftovers(tmp_path)
    with pytest.raises(FileExistsError), new_folder(target):
        pass
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "file").write_text("y")
    assert (tmp_path / "empty" / "file").exists()


def test_json_lines_and_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"step": 1, "text": "κ"})
    append_json_line(path, {"step": 2})
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
    assert read_json_lines(path) == [{"step": 1, "text": "κ"}, {"step": 2}]
    write_json_lines(path, [{"step": 5}])
    assert path.read_text() == '{"step": 5}\n'


def test_digests(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert digest(b"abc") == file_digest(tmp_path / "abc") == known
    # The keys of the cache must not change: what was computed would be computed again.
    assert key_of({"b": [1, 2.5], "a": "x"}) == digest(b'{"a": "x", "b": [1, 2.5]}')[:16]


def test_one_process_at_a_time_in_a_folder_of_the_cache(tmp_path):
    code = """
import pathlib, sys, time
from scalelong.files import locked
with locked(pathlib.Path(sys.argv[1])):
    count = pathlib.Path(sys.argv[1]) / "count"
    number = int(count.read_text()) if count.exists() else 0
    time.sleep(0.1)
    count.write_text(str(number + 1))
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert (tmp_path / "count").read_text() == "4"
    with locked(tmp_path):
        pass


def test_a_damaged_array_is_computed_again(tmp_path, monkeypatch):
    np = pytest.importorskip("numpy")
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    said: list[str] = []

    def array():
        return cached_array("things", {"a": 1}, (4, 2), "float32", lambda: [np.ones((2, 2))] * 2, said.append)

    assert array().sum() == 8
    assert "not computed yet" in said[-1]
    assert array().sum() == 8
    assert len(said) == 1
    file = next(tmp_path.rglob("array.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert array().sum() == 8
    assert "checksum mismatch" in said[-1]
    next(tmp_path.rglob("manifest.json")).write_text(json.dumps({}))
    assert array().sum() == 8
    assert "damaged" in said[-1]
    assert not list(tmp_path.rglob("*.part"))
