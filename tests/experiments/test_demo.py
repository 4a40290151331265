"""The demo and the command `scalelong range`, in small."""

import json
from dataclasses import replace

import pytest

from scalelong.cli import find_command, main
from scalelong.cli.range import seconds_of_a_step
from scalelong.config import recipe
from scalelong.errors import InvalidConfigError
from scalelong.experiments import RecipeTask, config_range, demo, demo_config, run_demo
from scalelong.runs import read_png
from scalelong.stability import RateRange, RateRun

SMALL = {"patch_size": 8, "dim": 16, "depth": 4, "heads": 2, "init_std": 0.1}


@pytest.fixture
def _small(monkeypatch):
    changed = replace(demo_config(), model_options=SMALL, batch_size=4)
    monkeypatch.setattr(demo, "demo_config", lambda: changed)


@pytest.mark.usefixtures("_small")
def test_the_demo_counts_draws_and_writes_a_report(tmp_path, capsys):
    out = tmp_path / "demo"
    arguments = ["demo", "--steps", "5", "--seeds", "2", "--seed", "3", "--jobs", "1", "--out", str(out)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    found = json.loads((out / "range.json").read_text())
    assert found["summary"] in said
    assert found["seeds"] == [300, 301]
    assert found["methods"] == ["none", "cs:0.7", "merge_norm"]
    assert [entry["seed"] for entry in found["samples"]] == [300] * 3
    assert all((out / entry["file"]).read_bytes().startswith(b"\x89PNG") for entry in found["samples"])
    # Photographs have more than two shades.
    drawn = read_png(out / found["samples"][0]["file"])
    assert len(drawn.unique()) > 20
    report = (out / "report.html").read_text()
    assert "merge_norm" in report
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    before = (out / "runs.jsonl").read_text()
    assert main(arguments) == 0
    assert "all 6 runs are finished already" in capsys.readouterr().err  # progress, not the result
    assert (out / "runs.jsonl").read_text() == before


def test_base_seeds_share_no_run(tmp_path):
    with pytest.raises(InvalidConfigError, match="base seed"):
        run_demo(tmp_path, seed=-1)


def test_the_range_of_a_recipe_from_the_command_line(tmp_path, capsys):
    out = tmp_path / "range"
    command = "range --recipe digits-class-tiny --rates 1e-3,2e-3 --methods none,start:cs:0.7 --seeds 1 --steps 4"
    changes = ["model_options.dim=16", "model_options.heads=2", "batch_size=4"]
    arguments = [*command.split(), "--set", *changes, "--jobs", "1", "--out", str(out)]
    arguments += ["--variants", "unit: model_options.init_std=unit"]
    assert main(arguments) == 0
    assert "Cannot be judged with one seed" in capsys.readouterr().out
    found = json.loads((out / "range.json").read_text())
    assert found["methods"] == ["none", "start:cs:0.7", "unit"]
    assert found["your_rate"] == 1e-3
    assert (out / "command.txt").read_text().startswith("scalelong range --recipe digits-class-tiny")
    assert main([*arguments, "--set", "batch_size=8"]) == 1
    assert "batch_size was 4 and is 8" in capsys.readouterr().err


def test_a_step_is_timed_before_a_range_begins():
    options = find_command("range").parser().parse_args(["--jobs", "1"])
    config = replace(demo_config(), model_options=SMALL, batch_size=4)
    assert 0 < seconds_of_a_step(config, options) < 10


def test_methods_of_a_range_share_the_optimiser(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"'fast' changes optimizer\.betas"):
        config_range(recipe("digits-tiny"), rates=(1e-3,), methods=["none", "fast: betas=[0.9,0.9]"], out=tmp_path)
    half = replace(recipe("digits-tiny"), hardware=replace(recipe("digits-tiny").hardware, precision="bf16"))
    with pytest.raises(InvalidConfigError, match="float32"):
        config_range(half, rates=(1e-3,))


def test_the_reference_is_the_loss_of_the_zero_predictor():
    # ε has unit variance, whatever the data.
    assert RecipeTask(demo_config()).zero_loss() == pytest.approx(1.0, abs=0.05)


def test_the_sentence_counts_by_majority(tmp_path):
    def run(method, seed, outcome, steps):
        return RateRun(
            method=method, rate=0.1, seed=seed, outcome=outcome, steps=steps, best=0.5, best_step=1, last=0.5, curve=[]
        )

    fates = {"none": (60, 70, 80), "cs:0.7": (150, 200, 300), "merge_norm": (300, 300, 300)}
    runs = tuple(
        run(method, seed, "survived" if steps == 300 else "collapsed", steps)
        for method, ends in fates.items()
        for seed, steps in enumerate(ends)
    )
    found = RateRange(
        methods=tuple(fates), rates=(0.1,), seeds=(0, 1, 2), runs=runs, steps=300, warmup=5, reference_loss=1.0, rule=""
    )
    said = demo.summary_of(found)
    assert said.startswith("Runs with none and cs:0.7 collapse, and runs with merge_norm survive: ")
    assert "cs:0.7 1 of 3 alive after 300 steps, lost after 150 to 200" in said
