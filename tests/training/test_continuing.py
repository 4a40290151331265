"""Going on with what is there: nothing that was recorded is lost, and nothing of another run is taken."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scalelong.errors import CheckpointError, ConditionError, RunFolderError, ScaleLongError
from scalelong.files import temporary_name, write_text
from scalelong.runs import (
    RunFolder,
    checkpoint as checkpoint_module,
    load_run,
    read_metrics,
    saved_steps,
)
from scalelong.training import train


def steps_of(folder):
    return saved_steps(folder / "checkpoints")


def newest(folder):
    return folder / "checkpoints" / f"step-{steps_of(folder)[-1]:08d}"


def contents(folder):
    """All files with their bytes, except the lock."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture(scope="module")
def made(full_tiny, tmp_path_factory):
    """A finished run of a class-conditional model, to be copied."""
    folder = tmp_path_factory.mktemp("made") / "run"
    train(full_tiny, folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


# No checkpoint that can be used


def cut(path):
    (path / "model.safetensors").write_bytes(b"cut")


def newer_format(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "scalelong": "9.0"}))


def foreign_manifest(path):
    (path / "manifest.json").write_text("[]")


@pytest.mark.parametrize(
    ("harm", "said"),
    [(cut, "bytes instead of"), (newer_format, "format 2, written by scalelong 9.0"), (foreign_manifest, "incomplete")],
)
def test_without_a_usable_checkpoint_nothing_is_begun(full_tiny, run, harm, said):
    for step in steps_of(run):
        harm(run / "checkpoints" / f"step-{step:08d}")
    before = contents(run)
    with pytest.raises(CheckpointError, match=said) as caught:
        train(full_tiny, run)
    assert all(word in str(caught.value) for word in ("step-00000012", "step-00000008", "`out`", "from a copy"))
    assert contents(run) == before
    with pytest.raises(CheckpointError, match=said):
        load_run(run)


@pytest.mark.parametrize("lost", ["all of them", "all but those set aside"])
def test_metrics_are_not_overwritten_where_checkpoints_are_lost(full_tiny, run, lost):
    for step in steps_of(run):
        path = run / "checkpoints" / f"step-{step:08d}"
        path.rename(path.with_name(f"abandoned-{path.name}"))
    if lost == "all of them":
        shutil.rmtree(run / "checkpoints")
    before = contents(run)
    # Also under another configuration: without checkpoints it is not compared, and must not be written either.
    for config in (full_tiny, replace(full_tiny, batch_size=4)):
        with pytest.raises(ScaleLongError, match="`out`"):
            train(config, run)
    assert contents(run) == before


def test_what_was_set_aside_stays_when_the_same_step_is_damaged_again(full_tiny, run, final_state, made):
    for _ in range(3):
        cut(newest(run))
        assert train(full_tiny, run).step == 12
    aside = sorted(path.name for path in (run / "checkpoints").glob("abandoned-*"))
    assert aside == ["abandoned-step-00000012", "abandoned-step-00000012-2", "abandoned-step-00000012-3"]
    assert final_state(run).training["step"] == 12
    assert (newest(run) / "ema.safetensors").read_bytes() == (newest(made) / "ema.safetensors").read_bytes()


# Checkpoints of another run, or under another name


@pytest.fixture(scope="module")
def other(full_tiny, tmp_path_factory):
    """Other data order and weights, the same shapes."""
    folder = tmp_path_factory.mktemp("other") / "run"
    train(replace(full_tiny, seed=1, steps=16), folder)
    return folder


def test_a_checkpoint_of_another_run_is_refused(full_tiny, run, other):
    shutil.copytree(newest(other), run / "checkpoints" / "step-00000016")
    metrics = (run / "metrics.jsonl").read_bytes()
    for use in (
        lambda: train(replace(full_tiny, steps=20), run),
        lambda: load_run(run),
        lambda: load_run(run, step=16),
    ):
        with pytest.raises(CheckpointError, match="belongs to another run"):
            use()
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert load_run(run, step=12).step == 12
    shutil.rmtree(run / "checkpoints" / "step-00000016")
    assert train(replace(full_tiny, steps=16), run).step == 16


def test_a_lost_id_is_asked_for(full_tiny, run):
    (run / "run.json").unlink()
    for use in (lambda: train(full_tiny, run), lambda: load_run(run)):
        with pytest.raises(RunFolderError, match=r"run\.json cannot be read .* manifest\.json of its checkpoints"):
            use()


# Copies, and file systems without symbolic links


def test_a_copy_with_links_followed_goes_on(full_tiny, made, tmp_path):
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    assert (copy / "checkpoints" / "latest").is_dir()
    assert not (copy / "checkpoints" / "latest").is_symlink()
    assert load_run(copy).step == 12
    assert train(replace(full_tiny, steps=16), copy).step == 16
    assert (copy / "checkpoints" / "latest").resolve().name == "step-00000016"


def test_a_file_system_without_symbolic_links(tiny, tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", unknown)
    assert train(replace(tiny, steps=8), tmp_path / "run").step == 8
    assert train(tiny, tmp_path / "run").step == 12
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000012\n"
    assert load_run(tmp_path / "run").step == 12


# What kills leave behind


def test_the_next_start_prunes_and_cleans(full_tiny, run):
    shutil.copytree(run / "checkpoints" / "step-00000008", run / "checkpoints" / "step-00000004")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for folder in (run, run / "samples", run / "checkpoints"):
        mine = temporary_name(folder / "config.yaml")
        mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-")).write_text("half")
    (run / "checkpoints" / ".step-00000016.part").mkdir()
    train(full_tiny, run)
    assert steps_of(run) == [8, 12]
    assert [path.name for path in run.rglob(".*")] == [".lock"]


def test_metrics_are_cut_at_the_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    lines = [f'{{"step": {step}, "loss": {step / 7}, "text": "{"x" * (step % 50)}"}}\n' for step in range(5000)]
    for step, rest in ((4999, ""), (4990, '{"step": 49'), (3, "not JSON\n"), (-1, "[]\n")):
        folder.metrics.write_text("".join(lines) + rest)
        folder.cut_metrics(step)
        assert folder.metrics.read_text() == "".join(lines[: step + 1])
    # A kill may take the end of a line alone: the next one must not be glued to it.
    folder.metrics.write_text("".join(lines[:3]).removesuffix("\n"))
    folder.cut_metrics(2)
    folder.append_metrics({"step": 3})
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


# What refuses leaves nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "no such data"},
        {"model": "no.such:model"},
        {"model_options": {"unknown": 1}},
        {"batch_size": 7, "hardware": "two parts"},
    ],
)
def test_a_refused_run_leaves_no_folder(tiny, tmp_path, changes):
    if "hardware" in changes:
        changes = {**changes, "hardware": replace(tiny.hardware, accumulation=2)}
    with pytest.raises(ScaleLongError):
        train(replace(tiny, **changes), tmp_path / "deep" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_folder_keeps_no_lock(tiny, tmp_path):
    write_text(tmp_path / "mine.txt", "not a run")
    with pytest.raises(RunFolderError, match="holds no run"):
        train(tiny, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_mistyped_class_leaves_no_samples(run):
    from scalelong.diffusion import SampleSettings, requests
    from scalelong.runs import fill_folder

    trained, settings = load_run(run), SampleSettings(steps=2)
    with pytest.raises(ConditionError):
        fill_folder(trained, run / "images" / "x", requests(2, 0, ["unicorn"]), settings)
    assert not (run / "images").exists()
    fill_folder(trained, run / "images" / "x", requests(2, 0, ["3"]), settings)
    assert len(list((run / "images" / "x").glob("0*.png"))) == 2


# Reading a run that is training


def test_a_checkpoint_that_is_pruned_while_it_is_read(full_tiny, run, monkeypatch, caplog):
    """The next one is taken; once read, the files are not needed any more."""
    from scalelong.diffusion import SampleSettings
    from scalelong.runs.samples import describe_samples

    digest, pruned = checkpoint_module.file_digest, []

    def prune_first(path):
        if not pruned:
            pruned.append(path.parent)
            shutil.copytree(path.parent, path.parent.with_name("step-00000013"))
            shutil.rmtree(path.parent)
        return digest(path)

    monkeypatch.setattr(checkpoint_module, "file_digest", prune_first)
    trained = load_run(run)
    assert (pruned[0].name, trained.step, caplog.messages) == ("step-00000012", 12, [])
    shutil.rmtree(run / "checkpoints")
    assert len(describe_samples(trained, SampleSettings())["weights_sha256"]) == 64
    assert trained.sample(1, steps=2, prompts=["3"]).shape == (1, 1, 8, 8)


def test_a_step_that_is_not_there(run):
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; there are: 8, 12"):
        load_run(run, step=5)
