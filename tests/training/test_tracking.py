"""Where metrics and sample grids go: every tracker has its project, and every tracker that can shows grids."""

import shlex
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scalelong.config import LoggingConfig, TrainConfig, load_config
from scalelong.runs import RunFolder
from scalelong.runs.folder import COMMAND_VARIABLE, this_command
from scalelong.training import train
from scalelong.training.recording import MetricsRecorder, TrainingProgress


class FakeTracker:
    def __init__(self, name: str) -> None:
        self.name, self.shown, self.alerts = name, [], []
        self.tracker = SimpleNamespace(info=SimpleNamespace(run_id="id-of-mlflow"))
        if name == "tensorboard":
            self.tracker = SimpleNamespace(
                add_scalar=None,
                add_image=lambda *values, **named: self.shown.append((values, named)),
                add_text=lambda *values: self.alerts.append(values),
                flush=lambda: None,
            )

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """What tells a tracker of accelerate from others."""


class FakeImageTracker(FakeTracker):
    def log_images(self, values: dict[str, Any], step: int) -> None:
        self.shown.append((values, step))


class FakeAccelerator:
    """Notes with which project each tracker was opened, as accelerate would do."""

    is_main_process = True
    device = torch.device("cpu")

    def __init__(self, *names: str) -> None:
        self.log_with: list[str] = list(names)
        self.trackers: list[FakeTracker] = []
        self.opened: dict[str, tuple[str, Any, Any]] = {}
        self.started: list[str] = []

    def init_trackers(self, project: str, config: Any = None, init_kwargs: Any = None) -> None:
        for name in self.log_with:
            self.opened[name] = (project, config, (init_kwargs or {}).get(name, {}))
            plain = name in ("tensorboard", "comet_ml")
            self.trackers.append(FakeTracker(name) if plain else FakeImageTracker(name))
        for tracker in self.trackers:  # as accelerate does: those of earlier calls as well
            self.started.append(tracker.name)


def recorder(accelerator: FakeAccelerator, tmp_path) -> MetricsRecorder:
    (tmp_path / "my-run").mkdir(exist_ok=True)
    config = TrainConfig(logging=LoggingConfig(trackers=tuple(accelerator.log_with)))
    return MetricsRecorder(config, RunFolder(tmp_path / "my-run"), accelerator, TrainingProgress(1, enabled=False))


def test_every_tracker_has_its_own_project(tmp_path):
    accelerator = FakeAccelerator("tensorboard", "wandb", "mlflow")
    recorder(accelerator, tmp_path).open_trackers(7)
    assert accelerator.opened["tensorboard"] == ("tensorboard", None, {"purge_step": 8})
    project, settings, options = accelerator.opened["wandb"]
    known = (tmp_path / "my-run" / "tracker_id.txt").read_text()
    assert (project, options) == ("scalelong", {"name": "my-run", "id": known, "resume": "allow"})
    again = FakeAccelerator("wandb")
    recorder(again, tmp_path).open_trackers(9)
    assert again.opened["wandb"][2]["id"] == known, "a run that continues is the same run there"
    continued = FakeAccelerator("mlflow", "trackio")
    recorder(continued, tmp_path).open_trackers(9)
    # MLflow gives ids, and refuses parameters that differ; trackio knows runs by their names.
    assert continued.opened["mlflow"][1:] == (None, {"run_id": "id-of-mlflow"})
    assert continued.opened["trackio"][2] == {"name": f"my-run-{known[:6]}", "resume": "allow"}
    assert settings["optimizer.lr"] == "0.0002"
    assert accelerator.opened["mlflow"][2] == {"run_name": "my-run"}
    assert accelerator.opened["mlflow"][1] == settings
    assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard", "wandb", "mlflow"]
    assert accelerator.log_with == ["tensorboard", "wandb", "mlflow"]
    assert accelerator.started == ["tensorboard", "wandb", "mlflow"], "each once"


def test_grids_go_to_every_tracker_that_shows_images(tmp_path):
    accelerator = FakeAccelerator("tensorboard", "wandb", "clearml", "comet_ml")
    writes = recorder(accelerator, tmp_path)
    writes.open_trackers(0)
    grid = torch.randint(0, 256, (3, 6, 4), dtype=torch.uint8)
    writes.images(5, grid)
    tensorboard, wandb, clearml, comet = (tracker.shown for tracker in accelerator.trackers)
    assert torch.equal(tensorboard[0][0][1], grid)
    assert tensorboard[0][1] == {"global_step": 5}
    (image,) = wandb[0][0]["samples"]
    assert np.array_equal(image, grid.permute(1, 2, 0).numpy())
    assert clearml[0][0]["samples"].shape == (6, 4, 3)
    assert comet == []


def test_alarms_reach_the_trackers(tmp_path):
    accelerator = FakeAccelerator("tensorboard", "comet_ml")
    writes = recorder(accelerator, tmp_path)
    writes.open_trackers(0)
    writes.alert(12, "collapse", "the loss is back at 1")
    assert accelerator.trackers[0].alerts == [("alarms", "the loss is back at 1", 12)]
    assert accelerator.trackers[1].alerts == []


@pytest.mark.parametrize(
    ("argv", "variable", "expected"),
    [
        (["/usr/bin/scalelong", "train", "--data", "my images"], None, "scalelong train --data 'my images'"),
        (["/x/scalelong/__main__.py", "demo"], None, "scalelong demo"),
        (["/x/scalelong/experiments/runs.py"], "scalelong compare --out a", "scalelong compare --out a"),
        (["notebook.py", "-f", "x"], None, None),
    ],
)
def test_the_command_of_a_run(argv, variable, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(COMMAND_VARIABLE, variable)
    assert this_command() == expected


def test_a_run_of_a_script_says_how_to_continue_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    train(tiny, tmp_path / "run")
    command = f"scalelong train --config {tmp_path}/run/config.yaml --out {tmp_path}/run"
    assert f"    {command}\n" in (tmp_path / "run" / "README.md").read_text()
    assert load_config(shlex.split(command)[3]) == tiny
