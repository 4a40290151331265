"""`scalelong lab tune` on a run that was trained for a moment, and what becomes of its files."""

import json
import shutil
from pathlib import Path

import pytest

import scalelong as sl
from scalelong.attaching import scaling_of
from scalelong.cli import main
from scalelong.config import ImagesConfig, LoggingConfig, OptimizerConfig, TrainConfig
from scalelong.runs.load import load_run
from scalelong.training import train


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALELONG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    config = TrainConfig(
        data="digits",
        model="uvit",
        model_options={"patch_size": 4, "dim": 16, "depth": 4, "heads": 2},
        scaling="cs:0.5",
        steps=4,
        batch_size=8,
        images=ImagesConfig(size=8, channels=1),
        optimizer=OptimizerConfig(lr=1e-3),
        logging=LoggingConfig(trackers=(), samples_every=0),
    )
    train(config, folder)
    return folder


FAST = ["--steps", "3", "--features", "random", "--batch-size", "16", "--quiet"]


def test_coefficients_are_found_and_used(run, tmp_path, capsys):
    assert main(["lab", "tune", str(run), "-n", "16", "--out", str(tmp_path), *FAST]) == 0
    assert "12 trials of 16 images" in capsys.readouterr().out
    file = tmp_path / "linear-dpm++3.json"
    found = sl.TunedSkips.load(file)
    assert found.about["settings"]["steps"] == 3
    assert found.about["run"] == "digits"
    # Another coefficient, so that the images must differ.
    values = json.loads(file.read_text()) | {"tuned": {"method": "custom", "kappas": [1.0, 0.1]}}
    file.write_text(json.dumps(values))
    for flags, folder in (([], "plain"), (["--tuned", str(file)], "tuned")):
        out = ["--out", str(tmp_path / folder), "-n", "8", "--steps", "3", *flags]
        assert main(["sample", str(run), *out]) == 0
    note = json.loads((tmp_path / "tuned" / "samples.json").read_text())
    assert note["scaling"] == "custom:1.0,0.1"
    assert "scaling" not in json.loads((tmp_path / "plain" / "samples.json").read_text())
    first = "000000000000.png"
    assert (tmp_path / "plain" / first).read_bytes() != (tmp_path / "tuned" / first).read_bytes()
    # A folder of plain images is not continued with tuned ones.
    again = ["--out", str(tmp_path / "plain"), "-n", "9", "--steps", "3", "--tuned", str(file)]
    assert main(["sample", str(run), *again]) == 1
    assert "made in a different way" in capsys.readouterr().err
    assert (
        main(["export", str(run), "--format", "safetensors", "--tuned", str(file), "--out", str(tmp_path / "e")]) == 0
    )
    loaded = load_run(run, scaling="custom:1.0,0.1")
    assert scaling_of(loaded.model).config == sl.CustomScaling((1.0, 0.1))


def test_a_file_that_is_absent(run, capsys):
    assert main(["lab", "tune", str(run), "-n", "64", *FAST, "--tuned", "absent.json"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_learned_coefficients_are_not_replaced(run, tmp_path):
    folder = tmp_path / "learned"
    shutil.copytree(run, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("cs:0.5", "ls"))
    with pytest.raises(sl.InvalidConfigError, match="only constant ones"):
        load_run(folder, scaling="custom:1.0,0.1")
