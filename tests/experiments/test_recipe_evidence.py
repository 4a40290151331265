"""From run folders to a page: made-up curves whose ratios are known."""

import json
from dataclasses import replace

import pytest

from research.recipe import Evidence, main
from scalelong.commands.compare import remember
from scalelong.runs import TrainConfig, dump_config


@pytest.fixture
def runs(tmp_path):
    """The baseline falls to 0.5 in 100 steps; "fast" gets there in 40 and collapses later, "slow" never."""
    curves = {"none": {50: 0.75, 100: 0.5}, "fast": {20: 0.7, 60: 0.3, 100: 0.7}, "slow": {50: 0.9, 100: 0.8}}
    for name, curve in curves.items():
        for seed in (0, 1):
            folder = tmp_path / "runs" / f"{name}-seed{seed}"
            folder.mkdir(parents=True)
            config = replace(TrainConfig(), seed=seed)
            if name == "fast":
                config = replace(config, optimizer=replace(config.optimizer, lr=0.5))
            (folder / "config.yaml").write_text(dump_config(config))
            lines = [json.dumps({"step": step, "held_out_loss": loss}) for step, loss in curve.items()]
            lines += [json.dumps({"step": 100, "frechet": 7.25 + seed})] if name == "fast" else []
            (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_gather_and_redraw(runs):
    out = runs / "evidence" / "made-up.json"
    assert main(["gather", str(runs / "runs"), str(out), "--title", "Made up", "--command", "scalelong compare x"]) == 0
    evidence = Evidence.read(out)
    assert evidence.speedups("fast") == {0: pytest.approx(2.5), 1: pytest.approx(2.5)}
    assert evidence.speedups("slow") == {0: None, 1: None}
    assert evidence.differs["fast"] == {"optimizer.lr": 0.5}
    assert evidence.common["batch_size"] == 128
    assert main(["redraw", str(out.parent)]) == 0
    page = (out.parent / "README.md").read_text()
    assert "scalelong compare x" in page
    assert "2.50 2.50" in page
    assert "not reached not reached" in page
    assert "7.25 8.25" in page
    assert [(row["variant"], row["collapsed"]) for row in evidence.rows()] == [
        ("none", "0 of 2"),
        ("fast", "2 of 2"),
        ("slow", "0 of 2"),
    ]
    assert (out.parent / "made-up.png").read_bytes().startswith(b"\x89PNG")
    before = page
    assert main(["redraw", str(out.parent)]) == 0
    assert (out.parent / "README.md").read_text() == before


def test_the_command_is_the_one_that_compare_noted(runs, capsys):
    arguments = ["gather", str(runs / "runs"), str(runs / "x.json"), "--title", "t"]
    assert main(arguments) == 1
    assert "--command" in capsys.readouterr().err
    for given in (["--seeds", "2", "--variants", "a: lr=1 clip=2"], ["--seeds", "3"], ["--seeds", "3"]):
        remember([*given, "--out", "/somewhere"], runs / "runs")
    assert main(arguments) == 0
    assert Evidence.read(runs / "x.json").command.splitlines() == [
        "scalelong compare --seeds 2 --variants 'a: lr=1 clip=2'",
        "scalelong compare --seeds 3",
    ]


def test_nothing_to_gather(tmp_path, capsys):
    assert main(["gather", str(tmp_path), str(tmp_path / "x.json"), "--title", "t", "--command", "c"]) == 1
    assert "there are no runs" in capsys.readouterr().err
    assert main(["redraw", str(tmp_path)]) == 1


def test_a_baseline_that_collapsed_counts_by_what_it_had_reached(runs):
    for seed in (0, 1):
        metrics = runs / "runs" / f"none-seed{seed}" / "metrics.jsonl"
        metrics.write_text(metrics.read_text() + json.dumps({"step": 120, "held_out_loss": 1.2}) + "\n")
    out = runs / "made-up.json"
    assert main(["gather", str(runs / "runs"), str(out), "--title", "Made up", "--command", "x"]) == 0
    evidence = Evidence.read(out)
    assert evidence.collapsed("none") == 2
    assert evidence.speedups("fast") == {0: pytest.approx(2.5), 1: pytest.approx(2.5)}
