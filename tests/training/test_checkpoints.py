"""Checkpoints: whole or not there, whatever happens while they are written."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open

from scalelong.config import CheckpointConfig
from scalelong.errors import CannotReadError, CheckpointError
from scalelong.files import file_digest, in_words
from scalelong.runs import Snapshot, checkpoint as module, read_checkpoint, saved_steps, write_checkpoint
from scalelong.runs.checkpoint import abandon_after, newest_good, prune, verify_checkpoint


def snapshot(step):
    weights = {"w": torch.full((4, 4), float(step))}
    return Snapshot(step, weights, {"w": weights["w"] + 0.5}, {"step": step, "tuple": (1, "a", torch.ones(2))})


def test_round_trip_and_metadata(tmp_path):
    path = write_checkpoint(tmp_path, snapshot(7))
    saved = read_checkpoint(path)
    assert saved.step == 7
    assert torch.equal(saved.model["w"], torch.full((4, 4), 7.0))
    assert torch.equal(saved.ema["w"], torch.full((4, 4), 7.5))
    assert (tmp_path / "latest").resolve() == path.resolve()
    for name, word in (("model.safetensors", "raw"), ("ema.safetensors", "EMA")):
        with safe_open(str(path / name), framework="pt") as file:
            about = json.loads(file.metadata()["scalelong"])
        assert word in about["weights"]
        assert about["step"] == 7


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "training.pt", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "empty"])
def test_damage_is_detected_logged_and_passed_over(tmp_path, name, harm, caplog):
    good = write_checkpoint(tmp_path, snapshot(1))
    bad = write_checkpoint(tmp_path, snapshot(2)) / name
    content = bad.read_bytes()
    if harm == "flip":
        middle = len(content) // 2
        bad.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif harm == "remove":
        bad.unlink()
    else:
        bad.write_bytes(content[: len(content) // 2] if harm == "cut" else b"")
    assert newest_good(tmp_path) == good
    assert len(caplog.messages) == 1
    assert "step-00000002" in caplog.messages[0]
    abandon_after(tmp_path, 1)
    assert saved_steps(tmp_path) == [1]
    assert (tmp_path / "abandoned-step-00000002").is_dir()
    assert (tmp_path / "latest").resolve() == good.resolve()


class Killed(BaseException):
    """As good as SIGKILL: no `except Exception` sees it, no cleaning up matters afterwards."""


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_any_system_call(tmp_path, monkeypatch, again):
    """The write dies at its n-th rename, sync or link, for all n; afterwards there is always a whole checkpoint."""
    finished = False
    count = 0
    while not finished:
        folder = tmp_path / str(count)
        write_checkpoint(folder, snapshot(1))
        if again:
            write_checkpoint(folder, snapshot(2))
        calls = iter(range(1000))

        def dying(function, calls=calls, limit=count):
            def call(*arguments, **keywords):
                if next(calls) == limit:
                    raise Killed
                return function(*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync", "symlink", "mkdir", "unlink"):
                patch.setattr(os, name, dying(getattr(os, name)))
            patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
            try:
                write_checkpoint(folder, snapshot(2))
                finished = True
            except Killed:
                pass
        newest = newest_good(folder)
        assert newest is not None
        assert read_checkpoint(newest).step in (1, 2)
        abandon_after(folder, read_checkpoint(newest).step)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        write_checkpoint(folder, snapshot(3))
        assert saved_steps(folder)[-1] == 3
        count += 1
    assert count > 8


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")],
)
def test_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, failure):
    good = write_checkpoint(tmp_path, snapshot(1))

    def full(*_, **__):
        raise failure

    monkeypatch.setattr(module.torch, "save", full)
    with pytest.raises(CheckpointError, match="step-00000001 is intact") as caught:
        write_checkpoint(tmp_path, snapshot(2))
    assert in_words(failure) in str(caught.value)
    assert "MB are free" in str(caught.value)
    assert newest_good(tmp_path) == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_prune_keeps_the_last_and_every_mth(tmp_path):
    for step in (0, 5, 10, 15, 20, 25):
        write_checkpoint(tmp_path, snapshot(step))
    prune(tmp_path, CheckpointConfig(keep_last=2, keep_every=10))
    assert saved_steps(tmp_path) == [0, 10, 20, 25]
    prune(tmp_path, CheckpointConfig(keep_last=1))
    assert saved_steps(tmp_path) == [25]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("training", [{"step": 1, "evil": Evil()}, {}, {"step": "one"}, [1], None])
def test_a_checkpoint_that_was_edited_with_its_checksum_is_refused_and_runs_nothing(training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_checkpoint(tmp_path, snapshot(1))
    torch.save(training, path / "training.pt")
    manifest = json.loads((path / "manifest.json").read_text())
    size, sha = (path / "training.pt").stat().st_size, file_digest(path / "training.pt")
    manifest["files"]["training.pt"] = {"bytes": size, "sha256": sha}
    (path / "manifest.json").write_text(json.dumps(manifest))
    verify_checkpoint(path)
    with pytest.raises(CheckpointError, match="restore it from a copy"):
        read_checkpoint(path)
    assert not (tmp_path / "executed").exists()


def test_what_the_machine_lacks_is_no_damage(tmp_path, monkeypatch):
    """To fall back to an older checkpoint because too many files are open would lose steps in silence."""
    for step in (1, 2):
        write_checkpoint(tmp_path, snapshot(step))

    def fail(path, *_):
        raise OSError(errno.EMFILE, "", str(path))

    monkeypatch.setattr("scalelong.runs.checkpoint.read_json", fail)
    with pytest.raises(CannotReadError, match="Too many open files"):
        newest_good(tmp_path)
