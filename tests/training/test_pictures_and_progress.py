"""Grids, PNG files and the line that people watch."""

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from scalelong.diffusion import image_grid, prompted_grid
from scalelong.runs import RunFolder, save_png
from scalelong.training import Ema, train
from scalelong.training.recording import MetricsRecorder, TrainingProgress


def test_a_grid_puts_images_row_by_row():
    images = torch.stack([torch.full((1, 64, 64), value) for value in (-1.0, 0.0, 1.0)])
    grid = image_grid(images, columns=2)
    assert grid.shape == (1, 2 * 66 + 2, 2 * 66 + 2)
    assert [int(grid[0, y, x]) for y, x in ((10, 10), (10, 76), (76, 10), (76, 76))] == [0, 128, 255, 255]


def test_few_prompts_that_take_turns_stand_above_their_columns():
    images = torch.zeros(36, 3, 8, 8, dtype=torch.uint8)
    grid = prompted_grid(images, ["horse", "ship"] * 18)
    head = grid.shape[1] - 6 * 66 - 2
    assert grid.shape[2] == 6 * 66 + 2, "three columns of each class"
    assert 10 < head < 20
    words = (grid[0, :head, 2:] < 128).int()
    assert torch.equal(words[:, :66], words[:, 132:198])
    assert int(words[:, :66].sum()) > 20
    assert not torch.equal(words[:, :66], words[:, 66:132])
    assert prompted_grid(images, [None] * 36).shape == (3, 6 * 66 + 2, 6 * 66 + 2)
    assert prompted_grid(images, [str(number) for number in range(36)]).shape[1] == 6 * 66 + 2, "too many for titles"


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "L"), (3, "RGB"), (4, "RGBA")])
def test_png_files(tmp_path, channels, mode):
    path = tmp_path / "deep" / "a.png"
    save_png(path, torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8))
    with Image.open(path) as image:
        assert (image.mode, image.size) == (mode, (7, 5))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


class OneProcess:
    """What a recorder asks of accelerate's Accelerator."""

    device, log_with, trackers, is_main_process = torch.device("cpu"), (), (), True


def test_sums_survive_a_checkpoint_and_the_time_leaves_out_pauses(tiny, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = TrainingProgress(1, enabled=False)
    first, second = (MetricsRecorder(tiny, RunFolder(tmp_path), OneProcess(), progress) for _ in range(2))
    first.add(torch.tensor(1.0), torch.tensor(4.0))
    second.sums = second.sums.new_tensor(first.sums.tolist())
    now[0] = 2.0
    with second.paused():
        now[0] = 100.0
    now[0] = 101.0
    second.add(torch.tensor(3.0), torch.tensor(2.0))
    weights = nn.Linear(1, 1)
    state: Any = SimpleNamespace(step=3, seconds=1.0, accelerator=SimpleNamespace(scaler=None))
    state.ema, state.optimizer = Ema(weights, tiny.optimizer), torch.optim.SGD(weights.parameters(), lr=0.5)
    found = second.record(state, epoch=0.5)
    assert (found["loss"], found["gradient_norm"], found["gradient_norm_max"]) == (2.0, 3.0, 4.0)
    assert (found["seconds"], found["seconds_per_step"], found["learning_rate"]) == (4.0, 1.0, 0.5)


def test_a_line_shows_the_held_out_loss_of_its_own_step(full_tiny, tmp_path, capsys):
    train(full_tiny, tmp_path / "run")
    shown = re.findall(r"step (\d+)/12  .*in ε: training [\d.]+, held-out ([\d.]+)", capsys.readouterr().err)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    measured = {line["step"]: f"{line['held_out_loss']:.4f}" for line in lines if "held_out_loss" in line}
    assert list(measured) == [5, 10, 12]
    assert shown == [(str(step), measured[at]) for step, at in ((6, 5), (8, 5), (10, 10), (12, 12))]


def test_slow_steps_show_between_two_records(capsys):
    now = [0.0]
    progress = TrainingProgress(10, enabled=True, clock=lambda: now[0])
    for step in range(1, 5):
        now[0] += 10.0
        progress.tick(step)
    assert capsys.readouterr().err == "step 2/10  0:01:20 left\nstep 4/10  0:01:00 left\n"
