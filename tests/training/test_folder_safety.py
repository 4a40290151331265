"""A run folder of someone else changes nothing outside of it; a run is found from any working directory."""

import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scalelong.cli import main
from scalelong.config import load_config
from scalelong.data import load_data
from scalelong.errors import InvalidConfigError, LinkRefusedError, RunFolderError
from scalelong.runs import load_run, make_accelerator, read_metrics, require_whole_curve, save_png
from scalelong.training import train

FILES = ["config.yaml", "data.json", "run.json", "environment.json", "README.md", "metrics.jsonl", "alarms.jsonl"]
FILES += ["rollbacks.json", "scores.jsonl", "tracker_id.txt", ".lock", ".lock-holder"]
FILES += ["checkpoints/step-00000002/manifest.json", "checkpoints/step-00000002/model.safetensors"]
FOLDERS = ["checkpoints", "samples", "images", "averages", "tensorboard", "checkpoints/step-00000002"]


@pytest.fixture(scope="module")
def tiny(tiny):
    """With held-out images, which a comparison needs."""
    return replace(tiny, images=replace(tiny.images, held_out=4))


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("made") / "run"
    train(replace(tiny, steps=2), folder, quiet=True)
    return folder


def everything(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def linked(made, folder, name):
    """A copy of the run in which one file or folder is a link to one outside; the folder outside."""
    run, outside = folder / "run", folder / "outside"
    shutil.copytree(made, run, symlinks=True)
    place, victim = run / name, outside / "victim"
    outside.mkdir(parents=True)
    if name in FOLDERS:
        shutil.move(place, victim) if place.exists() else victim.mkdir()
        for inner in (".mine.old", ".mine.part", "step-00000001.png"):
            (victim / inner).write_text("precious")
    else:
        shutil.move(place, victim) if place.exists() else victim.write_text("precious")
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(victim)
    return run, outside


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_links_in_a_run_folder_are_refused_and_nothing_changes(name, made, tmp_path, tiny):
    run, outside = linked(made, tmp_path, name)
    before = everything(outside), everything(run)
    with pytest.raises(LinkRefusedError, match="not followed"):
        train(replace(tiny, steps=4), run, quiet=True)
    assert (everything(outside), everything(run)) == before


COMMANDS = [
    ["train", "--config", "RUN/config.yaml", "--out", "RUN", "--steps", "4"],
    ["train", "digits", "--from", "RUN", "--out", "NEW", "--steps", "1"],
    ["sample", "RUN", "-n", "1", "--steps", "1"],
    ["eval", "RUN", "-n", "10", "--steps", "1"],
    ["export", "RUN", "--format", "safetensors"],
    ["diagnose", "RUN"],
    ["report", "RUN", "--out", "NEW.html"],
    ["report", "RUN"],
    ["lab", "probe", "RUN", "--out", "NEW"],
    ["lab", "tune", "RUN", "--out", "NEW"],
    ["compare", "--config", "RUN/config.yaml", "--methods", "none", "--seeds", "1", "--scores", "0", "--out", "FOLDER"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_follows_a_link_of_a_run_folder(command, made, tmp_path, monkeypatch):
    """Most refuse. A report leaves out what is a link; it must not show what the link leads to."""
    monkeypatch.chdir(tmp_path)
    for name in [*FILES, *FOLDERS, "samples/step-00000001.png"]:
        folder = tmp_path / name.replace("/", "-")
        run, outside = linked(made, folder, name)
        before = everything(outside), everything(run)
        new = folder / "new"
        # Its configuration is refused before most links are met: this shows that nothing is followed, not why.
        if command[0] == "compare":
            run = run.rename(folder / "none-seed0")
            before = before[0], everything(run)
        names = {"RUN": str(run), "NEW": str(new), "FOLDER": str(folder)}
        code = main([re.sub("RUN|NEW|FOLDER", lambda match, names=names: names[match[0]], word) for word in command])
        assert everything(outside) == before[0], name
        assert command[0] == "report" or code == 1, name
        assert code == 0 or (everything(run) == before[1] and not new.exists()), name
        page = new.with_suffix(".html") if "NEW.html" in command else run / "report.html"
        assert not page.exists() or b"precious" not in page.read_bytes(), name
        assert not page.exists() or b"cHJlY2lvdXM" not in page.read_bytes(), name  # the same in base64


def test_a_file_does_not_say_where_images_are_decoded_to(made, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text((made / "config.yaml").read_text().replace("image_cache: auto", f"image_cache: {tmp_path}/victim"))
    with pytest.raises(InvalidConfigError, match="image_cache"):
        load_config(path)


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
    with pytest.raises(RunFolderError, match="gap before step 2"):
        require_whole_curve(run)
    require_whole_curve(made)
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
    train(replace(tiny, steps=1), "other", data=pngs, quiet=True)
    assert load_run("other").config.data == str(pngs)


@pytest.mark.parametrize(
    "variable",
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_DYNAMO_BACKEND", "nothing"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
    ],
)
def test_variables_of_accelerate_change_no_run_silently_and_are_named(variable, tmp_path, monkeypatch, tiny):
    monkeypatch.setenv(*variable)
    with pytest.raises(InvalidConfigError, match=variable[0]):
        train(replace(tiny, steps=1), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_flat_shards_are_refused(kind, monkeypatch, tiny):
    configured = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=False)
    monkeypatch.setattr("accelerate.Accelerator", lambda **_: configured)
    with pytest.raises(InvalidConfigError, match=f"configured for {kind}, .* or FSDP2"):
        make_accelerator(tiny, ".")


@pytest.mark.parametrize("name", ["table.txt", "range.json", "runs.jsonl", "none-seed0", "jobs", "samples"])
@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--recipe", "digits-tiny", "--methods", "none", "--seeds", "1", "--steps", "1"],
        ["range", "--recipe", "digits-tiny", "--methods", "none", "--seeds", "1", "--steps", "12", "--rates", "1e-3"],
        ["demo"],
    ],
    ids=lambda words: words[0],
)
def test_links_in_a_folder_of_many_runs_are_refused_before_any_work(name, command, tmp_path, capsys):
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (outside / "mine").write_text("precious")
    (out / name).symlink_to(outside if "." not in name else outside / "mine")
    before = everything(tmp_path)
    assert main([*command, "--out", str(out)]) == 1
    assert everything(tmp_path) == before
    assert [path.name for path in out.iterdir()] == [name]
    assert "symbolic link" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tune", "probe"])
def test_results_are_not_written_through_a_link_of_the_run(command, made, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(made, run, symlinks=True)
    (tmp_path / "outside").mkdir()
    (run / command).symlink_to(tmp_path / "outside")
    assert main(["lab", command, str(run)]) == 1
    assert not list((tmp_path / "outside").iterdir())
    assert "symbolic link" in capsys.readouterr().err
