"""Does a model copy its training images? Counts and pictures, on samples whose answer is known."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalelong.data import load_data, split_rows
from scalelong.evaluation.features import Reference
from scalelong.evaluation.judge import copies_of
from scalelong.evaluation.scores import Moments, copies_text
from scalelong.report import collect

HELD_OUT, SEED = 300, 3


@pytest.fixture(scope="module")
def digits():
    data = load_data("digits")
    features = data.fetch(range(len(data))).images.flatten(1).float() / 255
    return data, Reference("", "", Moments.of(features.double()), features, Path())


def found(digits, rows, path):
    data, reference = digits
    images = data.fetch(rows).images
    return copies_of(images, reference.features[rows].double(), data, reference, HELD_OUT, SEED, path)


def test_copies_are_counted_and_held_out_images_are_the_baseline(digits, tmp_path):
    training, apart = split_rows(len(digits[0]), HELD_OUT, SEED)
    copied = found(digits, training[:40], tmp_path / "a.png")
    assert copied["samples"] == 1.0
    assert copied["held_out_images"] == HELD_OUT
    assert copied["held_out"] < 0.06
    new = found(digits, apart, tmp_path / "b.png")
    assert new["samples"] == pytest.approx(copied["held_out"])
    assert "100.0% of the samples" in copies_text(copied)
    assert "of 300 held-out images" in copies_text(copied)
    assert "a.png" not in copies_text(copied)


def test_the_picture_shows_each_copy_above_its_original(digits, tmp_path):
    training, _ = split_rows(len(digits[0]), HELD_OUT, SEED)
    found(digits, training[:16], tmp_path / "a.png")
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "a.png")))[None]
    rows = pixels[:, 2:].unfold(1, 66, 66)  # images of 8x8 are shown as 64x64, with gaps of 2
    assert rows.shape[1] == 4
    assert torch.equal(rows[:, 0], rows[:, 1])
    assert torch.equal(rows[:, 2], rows[:, 3])
    assert not torch.equal(rows[:, 0], rows[:, 2])


def test_few_samples_and_no_held_out_images(digits, tmp_path):
    data, reference = digits
    rows = torch.arange(5)
    images, features = data.fetch(rows).images, reference.features[rows].double()
    copies = copies_of(images, features, data, reference, 0, 0, tmp_path / "a.png")
    assert (copies["samples"], copies["held_out"]) == (1.0, None)
    assert "held-out" not in copies_text(copies)


def test_the_report_has_a_section_and_takes_no_picture_from_elsewhere(digits, tmp_path):
    run = tmp_path / "run"
    (run / "images").mkdir(parents=True)
    (run / "config.yaml").write_text("scaling: none\nseed: 0\nsteps: 4\n")
    (run / "data.json").write_text(json.dumps({"height": 8, "width": 8, "channels": 1}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 4, "loss": 1.0}) + "\n")
    copies = found(digits, torch.arange(40), run / "images" / "nearest-a.png")
    line = {"subject": {"step": 4, "copies": copies}, "protocol": {}}
    (run / "scores.jsonl").write_text(json.dumps(line) + "\n")
    (entry,) = collect([run])["copies"]
    assert entry["image"].startswith("data:image/png;base64,")
    assert "near-copies of a training image" in entry["text"]
    (tmp_path / "secret.png").write_bytes((run / "images" / "nearest-a.png").read_bytes())
    line["subject"]["copies"]["picture"] = "../../secret.png"
    (run / "scores.jsonl").write_text(json.dumps(line) + "\n")
    assert collect([run])["copies"] == []
