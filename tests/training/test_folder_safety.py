"""A run folder of someone else changes nothing outside of it; a run is found from any working directory."""

import os
import shutil
from dataclasses import replace

import pytest

from scalelong.config import load_config
from scalelong.data import load_data
from scalelong.errors import InvalidConfigError, LinkRefusedError
from scalelong.runs import load_run, read_metrics, save_png
from scalelong.training import train

FILES = ["config.yaml", "data.json", "run.json", "environment.json", "README.md", "metrics.jsonl", "alarms.jsonl"]
FILES += ["rollbacks.json", "scores.jsonl", "tracker_id.txt", ".lock", ".lock-holder"]
FILES += ["checkpoints/step-00000002/manifest.json", "checkpoints/step-00000002/model.safetensors"]
FOLDERS = ["checkpoints", "samples", "images", "averages", "tensorboard", "checkpoints/step-00000002"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("made") / "run"
    train(replace(tiny, steps=2), folder, quiet=True)
    return folder


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_links_in_a_run_folder_are_refused_and_nothing_changes(name, made, tmp_path, tiny):
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(made, run, symlinks=True)
    place, victim = run / name, outside / "victim"
    outside.mkdir()
    if name in FOLDERS:
        shutil.move(place, victim) if place.exists() else victim.mkdir()
        (victim / ".mine.old").write_text("precious")
        (victim / ".mine.part").write_text("precious")
    else:
        shutil.move(place, victim) if place.exists() else victim.write_text("precious")
    place.symlink_to(victim)
    before = everything(outside), everything(run)
    with pytest.raises(LinkRefusedError, match="not followed"):
        train(replace(tiny, steps=4), run, quiet=True)
    assert (everything(outside), everything(run)) == before


def test_only_names_of_ours_are_removed(made, tmp_path, tiny):
    run = tmp_path / "run"
    shutil.copytree(made, run, symlinks=True)
    mine = [run / "checkpoints" / name for name in (".notes.old", ".notes.part")]
    ours = [run / "checkpoints" / name for name in (".step-00000009.part", ".step-00000001.old")]
    for path in (*mine, *ours):
        path.mkdir()
    train(replace(tiny, steps=3), run, quiet=True)
    assert all(path.exists() for path in mine)
    assert not any(path.exists() for path in ours)


def test_lost_metrics_are_reported(made, tmp_path, tiny, caplog):
    run = tmp_path / "run"
    shutil.copytree(made, run, symlinks=True)
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    train(replace(tiny, steps=3), run, quiet=True)
    assert "its curves have a gap" in caplog.text
    assert read_metrics(run)[-1]["step"] == 3
    caplog.clear()
    train(replace(tiny, steps=4), run, quiet=True)
    assert "gap" not in caplog.text


def test_a_run_is_found_from_another_working_directory(tmp_path, monkeypatch, tiny):
    pngs = tmp_path / "work" / "pngs"
    pngs.mkdir(parents=True)
    for i, image in enumerate(load_data("digits", limit=12).fetch(range(12)).images):
        save_png(pngs / f"{i}.png", image)
    monkeypatch.chdir(tmp_path / "work")
    train(replace(tiny, data="pngs", steps=1), "run", quiet=True)
    monkeypatch.chdir(tmp_path)
    run = load_run("work/run")
    assert os.path.isabs(run.config.data)
    assert len(load_data(run.config.data)) == 12
    train(replace(load_config("work/run/config.yaml"), steps=2), "work/run", quiet=True)


@pytest.mark.parametrize(
    "variable", [("ACCELERATE_MIXED_PRECISION", "bf16"), ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")]
)
def test_variables_of_accelerate_do_not_change_a_run_silently(variable, tmp_path, monkeypatch, tiny):
    monkeypatch.setenv(*variable)
    with pytest.raises(InvalidConfigError, match=variable[0]):
        train(replace(tiny, steps=1), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
