"""Run folders that someone has damaged or edited: a named error in one line, or none where nothing is lost."""

import shutil
from dataclasses import replace

import pytest

from scalelong.cli import main
from scalelong.config import CheckpointConfig, LoggingConfig, TrainConfig, dump_config
from scalelong.training import train

PICTURES = ["-n", "2", "--sampler", "ddim", "--steps", "2"]


TINY = TrainConfig(
    model_options={"patch_size": 4, "dim": 16, "depth": 2, "heads": 2},
    scaling="cs:0.7",
    steps=2,
    batch_size=8,
    checkpoints=CheckpointConfig(save_every=2),
    logging=LoggingConfig(log_every=1, trackers=(), samples_every=0),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(TINY, folder)
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def refused(words, capsys, name):
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().err
    last = said.splitlines()[-1]  # after what was done before
    assert last.startswith(f"scalelong {words[0]}: {name}: "), said
    return last


DAMAGED = {
    "cut": '{"channels": 1, "hei',
    "empty": "",
    "list": "[1, 2]",
    "null": "null",
    "deep": "[" * 100_000,
    "without sizes": "{}",
    "negative": '{"channels": -1, "height": 8, "width": 8, "classes": null}',
    "huge": '{"channels": 1, "height": 9223372036854775808, "width": 8, "classes": null}',
    "texts": '{"channels": "1", "height": 8, "width": 8, "classes": null}',
    "odd classes": '{"channels": 1, "height": 8, "width": 8, "classes": [1, 2]}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_data_json(content, run, capsys):
    (run / "data.json").write_text(content)
    said = refused(["sample", run], capsys, "RunFolderError")
    assert "data.json" in said
    assert "README.md" in said, "it says how to write the file again"


@pytest.mark.parametrize("command", ["export", "diagnose"])
def test_without_data_json(command, run, capsys):
    (run / "data.json").unlink()
    assert "data.json" in refused([command, run], capsys, "RunFolderError")


def test_a_configuration_that_no_longer_fits_the_weights(run, capsys):
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("dim: 16", "dim: 32"))
    assert "edited" in refused(["sample", run], capsys, "CheckpointError")


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "steps: 0", "data: [1]", "foreign: 1", "model: 3", "- " * 5000])
def test_a_configuration_that_is_none(content, run, capsys):
    (run / "config.yaml").write_text(content)
    refused(["sample", run], capsys, "InvalidConfigError")


def test_foreign_lines_in_metrics_and_scores(run, capsys):
    foreign = '[1, 2]\nnull\n{"step": "x"}\n{"loss": 1}\nnot JSON\n{"step": 1, "loss": 1e400}\n'
    foreign += '{"step": 1, "kappa/x": 1.0, "kappa/": 1.0}\n{"step": 1, "loss": 1'
    for name in ("metrics.jsonl", "scores.jsonl"):
        with open(run / name, "a") as file:
            file.write(foreign)
    assert main(["report", str(run)]) == 0
    assert main(["export", str(run), "--format", "safetensors", "--out", "weights"]) == 0
    assert train(replace(TINY, steps=4), run).step == 4
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("steps: 4", "steps: many"))
    assert main(["report", str(run)]) == 0, "a report is of what there is"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weights": 3}', '{"weights": "ema", "wishes": []}'])
def test_the_note_of_samples(content, run, capsys):
    assert main(["sample", str(run), *PICTURES, "--out", "made"]) == 0
    (run.parent / "made" / "samples.json").write_text(content)
    capsys.readouterr()
    refused(["sample", run, *PICTURES, "--out", "made"], capsys, "RunFolderError")
    refused(["eval", run.parent / "made", "--data", "digits"], capsys, "RunFolderError")


def test_samples_of_unequal_sizes_and_damaged_ones(run, capsys):
    from PIL import Image

    assert main(["sample", str(run), *PICTURES, "--out", "made"]) == 0
    capsys.readouterr()
    victim = run.parent / "made" / "000000000001.png"
    Image.new("L", (5, 9)).save(victim)
    assert victim.name in refused(["sample", run, *PICTURES, "--out", "made"], capsys, "RunFolderError")
    victim.write_bytes(victim.read_bytes()[:40])
    assert "remove it" in refused(["sample", run, *PICTURES, "--out", "made"], capsys, "RunFolderError")
    victim.unlink()
    assert main(["sample", str(run), *PICTURES, "--out", "made"]) == 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"factor": "x"}]', '[{"factor": 0.5}]'])
def test_rollbacks(content, run, capsys):
    (run / "rollbacks.json").write_text(content)
    (run.parent / "tiny.yaml").write_text(dump_config(replace(TINY, steps=4)))
    words = ["train", "--config", "tiny.yaml", "--out", run]
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().err
    assert "scalelong train: RunFolderError: " in said
    assert "rollbacks.json" in said


# Names that are missing or are none


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config", ""],
        ["train", "--recipe", ""],
        ["train", ""],
        ["diagnose", "--config", ""],
        ["diagnose", "--data", ""],
        ["eval", "digits", "--data", "digits"],
        ["eval", "nowhere", "--data", "digits"],
        ["train", "digits", "--steps", "9" * 400, "--dry-run"],
        ["train", "digits", "--seed", str(2**64), "--dry-run"],
        ["train", "digits", "--scaling", "cs:" + "[" * 3000, "--dry-run"],
        ["train", "digits", "--model-options", "depth=" + "[" * 3000, "--dry-run"],
        ["train", "digits", "--model-options", "depth=" + "9" * 300, "--dry-run"],
        ["sample", "run", "--seed", str(2**62 - 1), "--steps", "0"],
        ["sample", "run", "9" * 5000],
    ],
    ids=lambda words: " ".join(words)[:50],
)
def test_arguments_beyond_sense(words, run, capsys):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code in (1, 2), said
    assert "Traceback" not in said
    assert "a bug in scalelong" not in said
    if code == 1:
        assert sum(line.startswith("scalelong ") for line in said.splitlines()) == 1
