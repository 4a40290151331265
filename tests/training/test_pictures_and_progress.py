"""Grids, PNG files and the line that people watch."""

import json
import re

import pytest
import torch
from PIL import Image

from scalelong.console import duration
from scalelong.runs import image_grid, save_png
from scalelong.training import train
from scalelong.training.tracking import StopWatch, TrainingProgress, Window


def test_a_grid_puts_images_row_by_row():
    images = torch.stack([torch.full((1, 64, 64), value) for value in (-1.0, 0.0, 1.0)])
    grid = image_grid(images, columns=2)
    assert grid.shape == (1, 2 * 66 + 2, 2 * 66 + 2)
    assert [int(grid[0, y, x]) for y, x in ((10, 10), (10, 76), (76, 10), (76, 76))] == [0, 128, 255, 255]


def test_small_images_are_enlarged_by_a_whole_factor():
    assert image_grid(torch.zeros(1, 3, 8, 8)).shape == (3, 68, 68)
    assert image_grid(torch.zeros(1, 3, 64, 48)).shape == (3, 132, 100)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (2, "L"), (3, "RGB"), (4, "RGBA")])
def test_png_files(tmp_path, channels, mode):
    path = tmp_path / "deep" / "a.png"
    save_png(path, torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8))
    with Image.open(path) as image:
        assert (image.mode, image.size) == (mode, (7, 5))
    assert [entry.name for entry in path.parent.iterdir()] == ["a.png"]


def test_the_window_averages_and_survives_a_checkpoint():
    window = Window(torch.device("cpu"))
    window.add(torch.tensor(1.0), torch.tensor(4.0))
    copy = Window(torch.device("cpu"))
    copy.load(window.save())
    for part in (window, copy):
        part.add(torch.tensor(3.0), torch.tensor(2.0))
    assert window.save() == copy.save()
    assert window.close() == {"loss": 2.0, "gradient_norm": 3.0, "gradient_norm_max": 4.0}


def test_the_watch_leaves_out_pauses():
    now = [0.0]
    watch = StopWatch(lambda: now[0])
    watch.start(10)
    now[0] = 2.0
    with watch.paused():
        now[0] = 100.0
    now[0] = 101.0
    assert watch.lap(13) == (3.0, 3)


def test_a_line_says_where_the_run_is(capsys):
    metrics = {"step": 50, "loss": 0.5, "gradient_norm": 0.25, "images_per_second": 640.0, "seconds_per_step": 0.1}
    clock = iter([0.0, 5.0, 5.0]).__next__
    TrainingProgress(100, enabled=True, clock=clock).record(metrics)
    assert capsys.readouterr().err == "step 50/100  loss (ε) 0.5000  gradient 0.25  640 images/s  0:00:05 left\n"
    TrainingProgress(100, enabled=False).record(metrics)
    assert capsys.readouterr() == ("", "")


def test_a_line_shows_the_held_out_loss_of_its_own_step(full_tiny, tmp_path, capsys):
    train(full_tiny, tmp_path / "run")
    shown = re.findall(r"step (\d+)/12  .*held-out \(ε\) ([\d.]+)", capsys.readouterr().err)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    measured = {line["step"]: f"{line['held_out_loss']:.4f}" for line in lines if "held_out_loss" in line}
    assert list(measured) == [5, 10, 12]
    assert shown == [(str(step), measured[at]) for step, at in ((6, 5), (8, 5), (10, 10), (12, 12))]


def test_durations():
    assert duration(3725) == "1:02:05"
    assert duration(200_000) == "2 days 7:33:20"


def test_training_says_its_lines_in_a_pipe(capsys):
    now = [100.0]
    progress = TrainingProgress(10, enabled=True, clock=lambda: now[0])
    progress.say("continuing")
    progress.start(3)
    now[0] += 4.0  # 2 seconds a step, whatever was done in them
    progress.record({"step": 5, "loss": 1, "gradient_norm": 2, "images_per_second": 3.14, "seconds_per_step": 1})
    progress.held_out = 0.5
    progress.record({"step": 5, "loss": 1, "gradient_norm": 2, "images_per_second": 31.4, "seconds_per_step": 1})
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "continuing",
        "step 5/10  loss (ε) 1.0000  gradient 2  3.1 images/s  0:00:10 left",
        "step 5/10  loss (ε) 1.0000  held-out (ε) 0.5000  gradient 2  31 images/s  0:00:10 left",
    ]


def test_slow_steps_show_between_two_records(capsys):
    now = [0.0]
    progress = TrainingProgress(10, enabled=True, clock=lambda: now[0])
    for step in range(1, 5):
        now[0] += 10.0
        progress.tick(step)
    assert capsys.readouterr().err == "step 2/10  0:01:20 left\nstep 4/10  0:01:00 left\n"
