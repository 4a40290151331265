"""Starts at larger widths: steps saved, the rule for a factor and a head start, resuming, and the committed page."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from research import head_start, survival
from research.head_start import AUTHORS, BRANCHES, UNIT, Average, Change, Judge, Saving, Trial
from scalelong.experiments.records import Curve

FOLDER = Path(__file__).parents[2] / "docs" / "evidence" / "starts"
STEPS = tuple(range(2, 201, 2))


def falling(speed: float = 1.0, ahead: float = 0.0) -> Curve:
    """A loss that is 1 / step, seen `speed` times faster or some steps ahead."""
    return Curve(STEPS, tuple(1 / (speed * step + ahead) for step in STEPS))


# Steps saved


def test_steps_saved_are_symmetric_and_count_to_a_level_that_both_reach():
    ratio, steps = head_start.saved(falling(2), falling(), 200) or (0, 0)
    assert math.exp(ratio) == pytest.approx(2, rel=0.02)
    assert steps == pytest.approx(100, rel=0.02)
    assert head_start.saved(falling(), falling(2), 200) == pytest.approx((-ratio, -steps))
    assert head_start.saved(Curve(), falling(), 200) is None


def test_a_curve_that_ends_early_counts_with_what_it_reached():
    short = Curve(STEPS[:4], falling().values[:4])
    ratio, steps = head_start.saved(falling(), short, 200) or (1, 1)
    assert (ratio, steps) == pytest.approx((0, 0))


@pytest.mark.parametrize(
    ("logs", "verdict"),
    [
        ([0.3, 0.31, 0.29], "**saves**"),
        ([-0.3, -0.31, -0.29], "**costs**"),
        ([0.01, 0.0, -0.01], "saves nothing"),
        ([0.5, -0.5, 0.2], "cannot be judged"),
    ],
)
def test_the_rule_of_the_first_question(logs, verdict):
    assert Saving(128, UNIT, AUTHORS, 240, logs, 0.95).verdict == verdict


def change(mine: Curve, spread: float = 0.02) -> Change:
    """From step 60 to step 200, with three seeds that differ a little."""
    found = [
        head_start.saved(mine, falling(1 + spread * k), until) or (0, 0) for k in (-1, 0, 1) for until in (60, 200)
    ]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    ratios, differences = ([(early[k], late[k]) for early, late in pairs] for k in (0, 1))
    return Change(128, UNIT, 60, 200, ratios, differences, 0.9)


def test_a_factor_and_a_head_start_are_told_apart():
    assert change(falling(2)).verdict == "**a factor**"
    assert change(falling(1, ahead=40), spread=0.001).verdict == "**a head start**"


@pytest.mark.parametrize(
    ("ratio", "difference", "word"),
    [(-1, 1, "between"), (0, 0, "cannot be told"), (-1, -1, "less than a head start"), (1, 1, "more than a factor")],
)
def test_the_rest_of_the_table_of_verdicts(ratio, difference, word):
    ratios, differences = ([(0.0, k + e) for e in (-0.1, 0.0, 0.1)] for k in (ratio, difference))
    assert word in Change(128, UNIT, 60, 200, ratios, differences, 0.9).verdict
    assert Change(128, UNIT, 60, 200, ratios, differences, 0.9, saves=False).verdict == "there is no saving"


# Runs


def test_the_authors_deviation_is_taken_to_the_width():
    place = survival.Setting(data="garments", depth=2, steps=1, width=128)
    models = {arm: head_start.build(Trial(place, arm, 1e-3, 1)) for arm in head_start.ARMS}
    layers = {arm: model.get_parameter("middle.mlp.expand.weight").detach() for arm, model in models.items()}
    assert float(layers[AUTHORS].std()) == pytest.approx(0.04, rel=0.05)
    assert float(layers[UNIT].std()) == pytest.approx(1 / math.sqrt(128), rel=0.05)
    assert models[BRANCHES].residual_scaling == 0.3


def test_the_average_is_lent_and_taken_back():
    weight = torch.nn.Parameter(torch.zeros(2))
    average = Average([weight])
    weight.data += 3
    average.take()
    with average.lent():
        assert weight.tolist() == pytest.approx([1, 1])
    assert weight.tolist() == [3, 3]
    average.take()
    with average.lent():
        assert weight.tolist() == pytest.approx([5 / 3, 5 / 3])


def test_what_a_run_leaves_and_that_it_is_not_repeated(tmp_path, monkeypatch):
    small = head_start.Width(64, (1e-3, 2e-3), 4, 8, (3, 4), 4, 2)
    monkeypatch.setattr(head_start, "WIDTHS", {**head_start.WIDTHS, 128: small})
    monkeypatch.setattr(head_start, "JUDGE_EVERY", 4)
    monkeypatch.setattr(head_start, "DEPTH", 2)
    head_start.run("128", tmp_path)
    records = head_start.read(tmp_path)
    assert len(records) == 3 * (2 * 2 + 2)
    found = head_start.judged(small, UNIT, records)
    assert [step for step, _ in found[3]["held_out"]] == [4, 8]
    # A run alone ends as it does beside another.
    alone: list[dict] = []
    rate = head_start.chosen_rate(small, UNIT, records)
    assert rate in small.rates
    lone = small.judged(UNIT, rate)[1]
    head_start.train([lone], survival.load_images("garments", None), Judge(), lambda _, result: alone.append(result))
    assert alone[0]["held_out"][-1][1] == pytest.approx(found[4]["held_out"][-1][1], rel=1e-3)
    monkeypatch.setattr(head_start, "train", None)
    head_start.run("128", tmp_path)  # nothing is left to do


def test_a_rate_is_chosen_by_the_mean_of_its_runs_and_a_collapse_counts_as_one():
    width = replace(head_start.WIDTHS[128], rates=(1e-3, 2e-3))
    losses = {1e-3: [0.2, 0.2], 2e-3: [0.1, 0.1]}
    records = {
        run.key: {"survived": True, "held_out": [[240, losses[run.lr][run.seed % 2]]]} for run in width.choosing(UNIT)
    }
    assert head_start.best_rate(width.choosing(UNIT), records) == 2e-3
    records[width.choosing(UNIT)[-1].key]["survived"] = False
    assert head_start.best_rate(width.choosing(UNIT), records) == 1e-3
    records.popitem()
    assert head_start.best_rate(width.choosing(UNIT), records) is None


# The evidence that is committed


def test_the_committed_page_is_that_of_the_raw_results():
    assert (FOLDER / "results.md").read_text() == head_start.page(FOLDER)
