"""A run folder or a configuration from someone else runs no code, unless its user has agreed."""

import json

import pytest

from scalelong.cli import main
from scalelong.config import CheckpointConfig, LoggingConfig, TrainConfig, load_config
from scalelong.errors import UntrustedCodeError
from scalelong.runs import load_run
from scalelong.training import train

pytest.importorskip("accelerate")

OPTIONS = {"patch_size": 2, "dim": 16, "depth": 2, "heads": 2}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A run whose configuration was changed by someone who wants a command to be run."""
    folder = tmp_path_factory.mktemp("foreign")
    config = TrainConfig(
        model_options=OPTIONS,
        steps=1,
        batch_size=4,
        checkpoints=CheckpointConfig(save_every=1),
        logging=LoggingConfig(trackers=(), samples_every=0),
    )
    train(config, folder / "run")
    proof = folder / "proof"
    text = (folder / "run" / "config.yaml").read_text()
    options = {"command": f"touch {proof}"}
    before, after = text.index("model:"), text.index("scaling:")
    evil = f"model: os:system\nmodel_options: {json.dumps(options)}\n"
    (folder / "run" / "config.yaml").write_text(text[:before] + evil + text[after:])
    assert load_config(folder / "run" / "config.yaml").model_options == options
    return folder


COMMANDS = [
    ["sample", "RUN", "-n", "1"],
    ["eval", "RUN", "-n", "1"],
    ["lab", "tune", "RUN"],
    ["export", "RUN"],
    ["export", "RUN", "--format", "safetensors"],
    ["diagnose", "RUN"],
    ["diagnose", "--config", "RUN/config.yaml"],
    ["train", "--config", "RUN/config.yaml", "--out", "NEW"],
    ["train", "--config", "RUN/config.yaml", "--out", "NEW", "--dry-run"],
    ["train", "--config", "RUN/config.yaml", "--out", "RUN"],
    ["compare", "--config", "RUN/config.yaml", "--out", "NEW", "--seeds", "1"],
    ["range", "--config", "RUN/config.yaml", "--out", "NEW", "--seeds", "1"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_runs_the_code_of_a_folder(command, foreign, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"RUN": str(foreign / "run"), "NEW": str(tmp_path / "new")}
    filled = [word.replace("RUN", names["RUN"]).replace("NEW", names["NEW"]) for word in command]
    assert main(filled) == 1
    said = capsys.readouterr().err
    assert f"scalelong {' '.join(command[: 2 if command[0] == 'lab' else 1])}: UntrustedCodeError: " in said
    assert "os:system" in said
    assert "touch" in said, "what would be run is shown"
    assert "--trust" in said
    assert said.count("\n") == 1
    assert not (foreign / "proof").exists()


def test_a_report_runs_nothing(foreign, tmp_path):
    text = (foreign / "run" / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("scaling: none", "scaling: cs:0.7"))
    (tmp_path / "data.json").write_text((foreign / "run" / "data.json").read_text())
    assert main(["report", str(tmp_path)]) == 0
    assert not (foreign / "proof").exists()


def test_consent_runs_it(foreign, capsys, monkeypatch):
    with pytest.raises(UntrustedCodeError):
        load_run(foreign / "run")
    assert main(["sample", str(foreign / "run"), "--trust"]) == 1
    assert "must return a torch.nn.Module" in capsys.readouterr().err
    assert (foreign / "proof").exists()
    (foreign / "proof").unlink()
    monkeypatch.setenv("SCALELONG_TRUST", "1")
    assert main(["diagnose", str(foreign / "run")]) == 1
    assert (foreign / "proof").exists()
    (foreign / "proof").unlink()


def test_what_the_user_types_needs_no_consent(foreign, tmp_path, capsys):
    """--model is his own word, also where the file says the same."""
    config = str(foreign / "run" / "config.yaml")
    assert main(["train", "--config", config, "--model", "os:getcwd", "--out", str(tmp_path / "run")]) == 1
    assert "InvalidConfigError" in capsys.readouterr().err


def test_a_model_of_diffusers_is_a_network(tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps({"_class_name": "DiffusionPipeline"}))
    assert main(["train", "digits", "--model", str(tmp_path / "model.json"), "--out", str(tmp_path / "run")]) == 1
    assert "no network of diffusers" in capsys.readouterr().err
