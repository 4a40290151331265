"""Files that are whole or not there, under every interruption that can be simulated."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from scalelong import files
from scalelong.errors import CannotReadError, CannotWriteError, FolderInUseError
from scalelong.files import (
    append_json_line,
    at_home,
    cache_folder,
    cached_array,
    cached_bytes,
    digest,
    file_digest,
    fitting,
    in_words,
    key_of,
    locked,
    new_folder,
    read_json,
    read_json_lines,
    read_text,
    read_yaml,
    require_file_place,
    require_folder_place,
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
    with pytest.raises(OSError, match="no space"):
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


def test_the_current_folder_as_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for place in (".", "/"):
        with pytest.raises(FolderInUseError, match="not an empty folder"), new_folder(place):
            pass
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with new_folder(".") as folder:
        (folder / "made").touch()
    assert (tmp_path / "empty" / "made").exists()


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


def test_of_two_folders_for_one_place_the_first_stays_whole(tmp_path):
    def both():
        with new_folder(tmp_path / "x") as one:
            (one / "one").write_text("1")
            with new_folder(tmp_path / "x") as two:
                (two / "two").write_text("2")

    with pytest.raises(OSError, match="not empty"):
        both()
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["two"]
    assert not leftovers(tmp_path)


def test_json_lines_and_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"step": 1, "text": "κ"})
    append_json_line(path, {"step": 2})
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
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
    running = [subprocess.Popen([sys.executable, "-c", APPEND, str(path), str(i)]) for i in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    found = read_json_lines(path)
    assert len(found) == 101
    assert {(line["from"], line["number"]) for line in found[1:]} == {(i, j) for i in range(4) for j in range(25)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["scores.jsonl"]


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_half(tmp_path, monkeypatch):
    import builtins

    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"number": 1})

    class Full:
        """A file on a disk with room for five more bytes."""

        def __init__(self, *arguments, **keywords):
            self.file, self.room = plain(*arguments, **keywords), 5

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            if self.room == 0:
                raise OSError(28, "No space left on device")
            written, self.room = self.file.write(content[: self.room]), 0
            return written

        def __getattr__(self, name):
            return getattr(self.file, name)

    plain = builtins.open
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", Full)
        with pytest.raises(OSError, match="no space"):
            append_json_line(path, {"number": 2})
    assert path.read_text() == '{"number": 1}\n'


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


# What the system refuses, in words


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("ENOSPC", "no space is left"),
        ("EDQUOT", "quota"),
        ("EACCES", "no permission"),
        ("EROFS", "read-only"),
        ("EIO", "input/output error"),
        ("EMFILE", "ulimit -n"),
    ],
)
@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
def test_what_the_system_refuses_is_named(code, reason, operation, tmp_path, monkeypatch):
    path = tmp_path / "note"
    write_text(path, "old")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(*((files.whole, "open") if operation == "open" else (os, operation)), refuse, raising=False)
    with pytest.raises(CannotWriteError, match=reason) as refused:
        write_text(path, "new")
    assert refused.value.errno == getattr(errno, code)
    assert str(path) in str(refused.value)
    monkeypatch.undo()
    assert read_text(path) == "old"
    assert not leftovers(tmp_path)


def test_folders_above_a_file_are_made_and_a_file_in_the_way_is_named(tmp_path):
    write_text(tmp_path / "a" / "b" / "c", "x")
    assert read_text(tmp_path / "a" / "b" / "c") == "x"
    with pytest.raises(CannotWriteError, match=r"is a file, not a folder \(.*c\)"):
        write_text(tmp_path / "a" / "b" / "c" / "d", "x")
    with pytest.raises(CannotWriteError, match="it is a folder"):
        write_text(tmp_path / "a", "x")


def test_places_are_refused_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    for good in (tmp_path / "new", tmp_path / "new" / "deep", tmp_path / "file"):
        require_file_place(good)
    for good in (tmp_path / "new", tmp_path):
        require_folder_place(good)
    with pytest.raises(CannotWriteError, match=r"--out .* is a folder"):
        require_file_place(tmp_path)
    with pytest.raises(CannotWriteError, match=r"--out .* is a file"):
        require_folder_place(tmp_path / "file")
    for bad in (require_file_place, require_folder_place):
        with pytest.raises(CannotWriteError, match="file, not a folder"):
            bad(tmp_path / "file" / "inside")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_that_nobody_reads_or_fills_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(files.whole, "PIPE_SECONDS", 0.1)
    with pytest.raises(CannotWriteError, match="nobody serves"):
        write_text(tmp_path / "pipe", "x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    with pytest.raises(CannotReadError, match="is a pipe"):
        read_text(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(CannotReadError, match="is a device"):
        read_text(tmp_path / "zero")


def test_a_full_device_is_written_to_and_stays_a_device():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    with pytest.raises(CannotWriteError, match="no space is left"):
        write_text("/dev/full", "x")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_sparse_file_is_not_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(60 * 1024**3)
    with pytest.raises(CannotReadError, match="64424509440 bytes"):
        read_text(tmp_path / "sparse")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "nested too deeply"),
        ("a: &a [*a]", "aliases"),
        ("a: [", "not valid YAML"),
        ("a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: " + "1" * 5000, "4300 digits"),
        ("? [1]\n: 2", "a list or a mapping stands where a name must"),
    ],
)
def test_hostile_yaml_is_refused_by_name(text, reason, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(CannotReadError, match=reason):
        read_yaml(tmp_path / "c.yaml")


def test_a_bomb_of_aliases_is_refused_and_honest_aliases_are_not(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    with pytest.raises(CannotReadError, match="aliases"):
        read_yaml(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("a: &a [1, 2]\nb: *a\nday: 2024-01-31\n")
    assert read_yaml(tmp_path / "c.yaml") == {"a": [1, 2], "b": [1, 2], "day": "2024-01-31"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"[" * 100_000, "nested"), (b'{"a": ', "not valid JSON"), (b"\xff", "not text in UTF-8"), (b"", "not valid")],
)
def test_hostile_json_is_refused_by_name(content, reason, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CannotReadError, match=reason):
        read_json(tmp_path / "a.json")


def test_foreign_lines_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n' + b"[" * 9000 + b'\nnull\n{"a": 2}\n{"a"')
    assert read_json_lines(tmp_path / "a.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_flipped_bit_in_the_cache_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    said: list[str] = []
    made: list[int] = []

    def content():
        return cached_bytes("things", {"a": 1}, "thing", lambda: made.append(1) or b"right", said.append)[0]

    assert content() == content() == b"right"
    file = next(tmp_path.rglob("thing"))
    for harm in (lambda: file.write_bytes(b"rieht"), file.unlink, lambda: (file.parent / "manifest.json").unlink()):
        harm()
        assert content() == content() == b"right"
    assert len(made) == 4
    assert len(said) == 1
    assert "checksum mismatch" in said[0]
    (file.parent / "manifest.json").write_text("[]")
    assert content() == b"right"


def test_a_filled_cache_that_cannot_be_written_is_used(tmp_path, monkeypatch):
    """Not by permissions, which do not bind root."""
    np = pytest.importorskip("numpy")
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))
    said: list[str] = []

    def use(number):
        content, _ = cached_bytes("things", {"a": number}, "thing", lambda: b"right", said.append)
        array = cached_array("arrays", {"a": number}, (2, 2), "float32", lambda: [np.ones((1, 2))] * 2, said.append)
        assert content == b"right"
        assert array.dtype == np.float32
        assert array.sum() == 4

    use(1)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("scalelong.files.disk_cache.locked", refused)
    said.clear()
    use(1)
    assert not said
    use(2)  # computed, and not kept
    assert len(said) == 2
    assert all("SCALELONG_CACHE" in text for text in said)


def test_a_result_that_does_not_fit_on_the_disk_is_still_a_result(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELONG_CACHE", str(tmp_path))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scalelong.files.disk_cache.write_bytes", full)
    said: list[str] = []
    assert cached_bytes("things", {}, "thing", lambda: b"right", said.append)[0] == b"right"
    assert "No space left" in said[0]


@dataclass
class Cat:
    name: str
    legs: int
    weight: float | None = None
    places: tuple[tuple[int, str], ...] = ()
    owners: dict[str, list[int]] = field(default_factory=dict)
    mood: Literal["good", "bad"] = "good"
    anything: Any = None


def test_what_others_wrote_fits_a_dataclass_or_is_refused_in_words():
    given = {"name": "Tom", "legs": 4, "weight": 3, "places": [[1, "sofa"]], "owners": {"a": [1]}, "anything": {}}
    assert fitting(Cat, given) == Cat(**given)
    assert fitting(Cat, {"name": "", "legs": 0, "weight": float("nan")}).name == ""
    for change in (
        {"name": 3},
        {"legs": "4"},
        {"legs": True},
        {"legs": 4.0},
        {"legs": 10**30},
        {"weight": "heavy"},
        {"weight": 10**400},
        {"places": [[1]]},
        {"places": [["1", "sofa"]]},
        {"places": "sofa"},
        {"owners": {"a": [None]}},
        {"owners": []},
        {"mood": "fair"},
        {"tail": 1},
    ):
        with pytest.raises(ValueError, match=f"entry '{next(iter(change))}'"):
            fitting(Cat, {**given, **change})
    with pytest.raises(ValueError, match="no entry 'legs'"):
        fitting(Cat, {"name": "Tom"})
    with pytest.raises(ValueError, match="JSON object"):
        fitting(Cat, ["Tom"])


def test_errors_of_python_are_told_in_words():
    assert in_words(KeyError("step")) == "it has no entry 'step'"
    assert in_words(OSError(errno.ENOSPC, "No space")) == "no space is left on its disk"
    assert "type" in in_words(TypeError("'NoneType' object is not subscriptable"))
    assert in_words(ValueError("two\n lines")) == "two lines"
    assert in_words(RuntimeError()) == "RuntimeError"


def test_a_home_that_is_nobodys_is_named(monkeypatch):
    monkeypatch.setenv(files.VARIABLE, "~nobody-of-this-name/cache")
    with pytest.raises(CannotReadError, match=files.VARIABLE):
        cache_folder("x")
    with pytest.raises(CannotReadError, match="--data"):
        at_home("~nobody-of-this-name/x", "--data")


def test_what_a_kill_left_beside_a_file_is_removed_by_the_next_process(tmp_path):
    script = "import os, signal, sys\nfrom scalelong import files\nos.replace = lambda *_: os.kill(os.getpid(), 9)\n"
    script += "files.write_text(sys.argv[1], 'x')\n"
    subprocess.run([sys.executable, "-c", script, tmp_path / "a.json"], check=False)
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    write_text(tmp_path / "a.json", "y")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "null", "5", "- steps", "just words"])
def test_a_file_that_should_hold_fields(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(CannotReadError, match="fields such as 'steps: 1000'") as raised:
        files.read_fields(path)
    assert "NoneType" not in str(raised.value)
    path.write_text("steps: 3\n")
    assert files.read_fields(path) == {"steps": 3}


@pytest.mark.parametrize(
    ("said", "number", "path"),
    [
        (
            "unable to open file <run/x.safetensors> in read-only mode: Permission denied (13)",
            errno.EACCES,
            "run/x.safetensors",
        ),
        ("unable to mmap 100 bytes from file <a/b>: Cannot allocate memory (12)", errno.ENOMEM, "a/b"),
        ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC, None),
        ("mat1 and mat2 shapes cannot be multiplied (13)", None, None),
    ],
)
def test_refusals_of_the_system_that_came_through_another_language(said, number, path):
    found = files.of_the_system(RuntimeError(said))
    assert (found and (found.errno, found.filename)) == (number and (number, path))
    if found is not None:
        assert "(" not in files.in_words(RuntimeError(said))
        assert str(files.refusal(found)).startswith(f"{path or 'a file or the output'} cannot be used: ")


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    """A sparse file, or a disk that lost a part: 60 GB of zeros."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    with path.open("ab") as file:
        file.truncate(60 * 1024**3)
    with pytest.raises(CannotReadError, match="a line of more than 16 MB"):
        files.read_json_lines(path)
    with path.open("rb") as file, pytest.raises(CannotReadError, match="a line of more than 16 MB"):
        next(files.lines_from_the_end(file))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CannotReadError, match="is a device"):
        files.read_json_lines(path)
