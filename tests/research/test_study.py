"""The study driver on tiny plans: carried out, killed and continued, judged by the plan's rule."""

import json
import math

import pytest
import torch

from research.page import holm, mcnemar, steps_to
from research.study import RUNS, Plan, Results, Run, main
from research.training import CURES, NETWORKS, Setting, cure_of, rate_share

PLAN = """
title: Tiny
question: Does it work?
kind: {kind}
setting: {{width: 16, depth: 2, heads: 2, batch: 4, steps: 4, warmup: 2, score_every: 2, images: 16, held_out: 8}}
cells: {{garments: {{data: garments}}}}
rates: {rates}
arms: {{none: , cured: {{norm: main, start: "cs:0.7", optimizer: muon, cure: zclip}}}}
baseline: none
seeds: [1, 2]
tuning_seeds: {tuning}
"""


def plan_file(folder, kind="lasts", rates="[1e-3]", tuning="[]"):
    path = folder / "tiny.yaml"
    path.write_text(PLAN.format(kind=kind, rates=rates, tuning=tuning))
    return path


def study(path, out):
    main([str(path), "--out", str(out), "--jobs", "0"])
    return (out / RUNS).read_text().splitlines()


def without_time(lines):
    return sorted(json.dumps({**json.loads(line), "seconds": 0}) for line in lines)


def test_a_study_that_was_killed_is_continued_by_the_same_command(tmp_path):
    path = plan_file(tmp_path)
    lines = study(path, tmp_path / "whole")
    assert len(lines) == 4
    # Two lines were written, the third is cut off.
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / RUNS).write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])
    found = [line for line in study(path, killed) if line.endswith("}")]
    assert found[:2] == lines[:2]
    assert without_time(found) == without_time(lines)
    assert study(path, killed)[-1] == found[-1]
    assert "## Who lasts" in (killed / "README.md").read_text()
    assert (killed / "losses.png").stat().st_size > 1000


@pytest.mark.parametrize("model", NETWORKS)
def test_a_unet_is_trained_under_the_guard_and_with_its_scaling(tmp_path, model):
    path = plan_file(tmp_path)
    text = path.read_text().replace("width: 16, depth: 2", f"model: {model}, width: 16, depth: 2")
    arms = '{none: , norm: {attach: "merge_norm:everywhere=true", optimizer: muon of all}, guard: {cure: guard}}'
    path.write_text(text.replace(text[text.index("arms: ") + 6 : text.index("\nbaseline")], arms))
    lines = [json.loads(line) for line in study(path, tmp_path)]
    losses = {line["arm"]: line["held_out"] for line in lines if line["seed"] == 1}
    assert losses["none"] == losses["guard"] != losses["norm"]
    assert {line["arm"] for line in lines if line.get("rollbacks") == 0} == {"guard"}


def test_rates_are_chosen_by_seeds_that_do_not_count(tmp_path):
    path = plan_file(tmp_path, "buys", "[1e-3, 2e-3]", "[7]")
    lines = [json.loads(line) for line in study(path, tmp_path)]
    assert len(lines) == 2 * 2 + 2 * 2  # two arms: two rates with the tuning seed, then one rate with two seeds
    best = Results(Plan.read(path), tmp_path).best_rate("garments", "none")
    assert {line["rate"] for line in lines if line["arm"] == "none" and line["seed"] != 7} == {best}
    assert "## The rates" in (tmp_path / "README.md").read_text()


def test_a_changed_plan_does_not_take_the_old_runs(tmp_path):
    path = plan_file(tmp_path)
    first = Plan.read(path)
    path.write_text(path.read_text().replace("steps: 4", "steps: 5"))
    run = Run("garments", "none", 1e-3, 1)
    assert Plan.read(path).key(run) != first.key(run)


def test_a_misspelled_option_is_named(tmp_path):
    path = plan_file(tmp_path)
    path.write_text(path.read_text().replace("norm: main", "nrom: main"))
    with pytest.raises(SystemExit, match="arm cured: unknown nrom"):
        Plan.read(path)


def test_steps_to_a_loss_are_read_between_scores():
    curve = [[10, 0, 1.0], [20, 0, 0.1], [30, 0, 0.05]]
    assert steps_to(curve, 0.1) == 20
    assert steps_to(curve, math.sqrt(0.1)) == pytest.approx(15)
    assert steps_to(curve, 0.01) is None


def test_statistics():
    assert mcnemar([(True, False)] * 6 + [(True, True)] * 3) == pytest.approx(2 / 64)
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "c": 0.06, "b": 0.06}


def test_cosine_ends_at_two_percent():
    setting = Setting(warmup=10, schedule="cosine")
    assert [round(rate_share(setting, 100, step), 3) for step in (5, 10, 55, 100)] == [0.5, 1.0, 0.51, 0.02]


@pytest.mark.parametrize("name", CURES)
def test_a_cure_stops_a_gradient_that_explodes(name):
    weight = torch.ones(4, 4, requires_grad=True)
    cure = cure_of(name, [weight])
    for step in range(40):
        weight.grad = torch.full((4, 4), 1e-3 * (1 + 0.1 * (step % 3)))
        assert cure()
    weight.grad = torch.full((4, 4), 100.0)
    assert not cure() or float(weight.grad.abs().max()) < 1
