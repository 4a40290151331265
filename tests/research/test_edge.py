"""The study at the edge of stability: what is measured, how pairs are compared, resuming, and the committed page."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from research import edge, studies, survival
from research.pages import index
from research.reproduce.items import ITEMS
from scalelong.experiments.results import Results

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"
FOLDER = EVIDENCE / "edge"
SHORT = survival.Setting(data="garments", depth=4, steps=6)


def line(arm: str, seed: int, losses: list[float], collapsed: int | None = None, **more) -> dict:
    held_out = [[25 * (place + 1), loss] for place, loss in enumerate(losses)]
    return {
        "arm": arm,
        "seed": seed,
        "held_out": held_out,
        "survived": collapsed is None,
        "collapsed": collapsed,
    } | more


def results(*lines: dict, place: str = "edge") -> Results:
    return Results([edge.record_of(place, entry) for entry in lines])


# Numbers of pairs


def test_a_collapse_counts_as_a_predictor_of_zero_from_its_step_on():
    run = edge.record_of("edge", line("none", 0, [0.5, 0.4, 0.3, 0.2, 0.2], collapsed=140))
    assert edge.LOSS.of(run) == 1.0
    assert edge.loss_at(100).of(run) == 0.2
    assert edge.loss_at(150).of(run) == 1.0
    assert edge.loss_at(175).of(edge.record_of("edge", line("none", 0, [0.5] * 8))) == 0.5


def test_steps_count_to_the_best_loss_that_the_baseline_had():
    lines = [line("none", seed, [0.8, 0.4, 0.2, 0.9], collapsed=110) for seed in range(3)]
    lines += [line("CS(0.7)", seed, [0.2, 0.1, 0.1, 0.1]) for seed in range(3)]
    lines += [line("LS", seed, [0.8, 0.4, 0.4, 0.4]) for seed in range(3)]
    quick, slow = edge.fig5(results(*lines), "edge")
    assert list(quick.values) == pytest.approx([math.log(1 / 3)] * 3)
    # LS never gets to 0.2; it ends at 0.4 after 50 steps, as none was.
    assert list(slow.values) == pytest.approx([0.0] * 3)


def wave(size: float, count: int, blow_up: int | None = None) -> list[float]:
    """Readings that swing, and that grow without bound from some place on."""
    grown = [1.0 if blow_up is None or i < blow_up else 3.0 ** (i - blow_up) for i in range(count)]
    return [math.exp(size * (-1) ** i) * value for i, value in enumerate(grown)]


def test_oscillation_is_compared_before_the_first_collapse_comes_near():
    # Twice the swing; the blow-up of the first begins at reading 41, that is step 82, and is called collapse at 100.
    broken = edge.record_of("edge", line("none", 0, [], collapsed=100, series={"middle": wave(0.2, 50, 41)}))
    calm = edge.record_of("edge", line("CS(0.7)", 0, [0.1], series={"middle": wave(0.1, 100)}))
    assert edge.oscillation_ratio(calm, broken, ["middle"]) == pytest.approx(math.log(0.5))
    late = edge.record_of("edge", line("none", 0, [], collapsed=40, series={"middle": wave(0.2, 20)}))
    assert edge.oscillation_ratio(calm, late, ["middle"]) is None  # eleven readings are no window


def test_intervals_of_an_item_hold_together():
    lines = [line(method, seed, [0.2 + 0.01 * seed] * 8) for method in edge.METHODS for seed in range(4)]
    claims = edge.claims_of(edge.ITEMS["table3"], results(*lines))
    assert len(claims) == 6
    assert {claim.confidence for claim in claims} == {1 - 0.1 / 6}
    assert not edge.claims_of(edge.ITEMS["table3"], results(*lines, place="batch 2")), "it is not judged there"


# κ


def test_kappas_that_cannot_be_told_apart_are_one_method():
    answers = {
        "data": {"kappa": 0.6812, "low": 0.3667},
        "network": {"kappa": 1.0, "low": 0.38},
        "pilot": {"kappa": 0.85, "low": 0.85},
    }
    methods = edge.kappa_methods(answers)
    assert methods == ("CS(0.7)", "CS(0.37)", "CS(1)", "CS(0.85)")
    assert edge.method_for(0.68, methods) == "CS(0.7)"
    assert edge.method_for(0.38, methods) == "CS(0.37)"
    assert edge.arm_of("CS(1)") == survival.Arm()
    assert edge.arm_of("CS(0.37)").attach == "cs:0.37"


def test_a_choice_is_judged_by_losses_and_by_survivors(tmp_path):
    answers = {"data": {"kappa": 0.9, "low": 0.5}, "network": {"kappa": 1.0, "low": 0.7}, "pilot": {"kappa": 0.7}}
    (tmp_path / "kappas.json").write_text(json.dumps({"cifar10": answers}))
    place = edge.KAPPA_PLACES["κ, CIFAR-10"]
    losses = {"CS(0.7)": 0.2, "CS(0.9)": 0.25, "CS(0.5)": 0.2, "CS(1)": None}
    for method, loss in losses.items():
        for number, seed in enumerate(place.seeds):
            run = edge.Trial(place.setting, method, place.lr, seed)
            spread = 1 + 0.01 * (number % 3 - 1) * (method == "CS(0.5)")
            points = {"held_out": [[300, loss * spread]] if loss else [], "collapsed": None if loss else 50}
            survival.append(tmp_path / "kappa-cifar-10.jsonl", run, points | {"survived": bool(loss)})
    rows = {row.method: row for row in edge.kappa_rows(tmp_path)}
    assert (rows["CS(0.9)"].verdict, rows["CS(0.9)"].choices) == ("**worse than 0.7**", "A")
    assert rows["CS(0.5)"].verdict.startswith("no difference larger than ")
    assert rows["CS(1)"].verdict == "**worse than 0.7**"
    assert (rows["CS(1)"].survivors, rows["CS(1)"].default_survivors) == (0, 8)
    assert rows["CS(1)"].p == pytest.approx(3 * 2 / 2**8)


# Runs


def test_what_a_run_leaves_and_that_it_is_not_repeated(tmp_path, monkeypatch):
    place = edge.Place(SHORT, 1e-3, ("none", "CS(0.7)"), (3, 4), read=True)
    monkeypatch.setitem(edge.PLACES, "edge", place)
    monkeypatch.setattr(edge, "JUDGE_EVERY", 4)
    monkeypatch.setattr(edge, "HELD_OUT", 8)
    edge.run("edge", tmp_path, None)
    found = edge.finished("edge", tmp_path)
    assert [(entry["arm"], entry["seed"]) for entry in found] == [(m, s) for m in place.methods for s in place.seeds]
    first = found[0]
    assert [step for step, _ in first["held_out"]] == [4, 6]
    names = ["gradient", "encoder.0", "encoder.1", "middle", "decoder.0", "decoder.1"]
    assert {name: len(values) for name, values in first["series"].items()} == dict.fromkeys(names, 3)
    # The last held-out loss is that of the network at the end, which a plain loop finds, too.
    images, held_out = survival.load_images("garments", None), edge.held_out_images("garments", None)
    reader = edge.Reader(replace(place, read=False), images, held_out)
    lone: list[dict] = []
    survival.train(place.runs()[1:2], images, lambda _, result: lone.append(result), reader)
    assert lone[0]["held_out"][-1][1] == pytest.approx(found[1]["held_out"][-1][1], rel=1e-3)
    monkeypatch.setattr(survival, "train", None)
    edge.run("edge", tmp_path, None)  # nothing is left to do


def test_a_method_counts_with_all_seeds_and_an_item_with_all_methods(tmp_path):
    result = {"survived": True, "collapsed": None, "held_out": [[100, 0.3], [150, 0.2], [200, 0.1]]}
    *most, last = edge.PLACES["edge"].runs(["CS(0.7)", "CS(0.7) reversed"])
    for run in most:
        survival.append(tmp_path / "edge.jsonl", run, result)
    assert {line["arm"] for line in edge.finished("edge", tmp_path)} == {"CS(0.7)"}
    assert not edge.claims_of(edge.ITEMS["table4"], edge.results_of(tmp_path))
    survival.append(tmp_path / "edge.jsonl", last, result)
    assert len(edge.claims_of(edge.ITEMS["table4"], edge.results_of(tmp_path))) == 3
    assert not edge.claims_of(edge.ITEMS["table3"], edge.results_of(tmp_path))
    text = edge.page(tmp_path)
    assert "was not run: edge: none, 1/√2, LS, stable τ = 0.1" in text
    assert "κ, garments: all" in text
    assert "| Table 3: scaling of block outputs | none was run |" in text


def test_what_a_setting_lacks_is_said(tmp_path, capsys):
    edge.run("κ, garments", tmp_path, None)
    assert "first run `python -m research.edge kappas`" in capsys.readouterr().out
    (tmp_path / "kappas.json").write_bytes((FOLDER / "kappas.json").read_bytes())
    edge.run("κ, CIFAR-10", tmp_path, None)
    assert "needs CIFAR-10; give --data FOLDER" in capsys.readouterr().out


# The evidence that is committed


def test_the_committed_page_is_that_of_the_raw_results():
    assert (FOLDER / "results.md").read_text() == edge.page(FOLDER)


def test_difference_of_shares():
    # Newcombe (1998), Table II, contrast (a): 56 of 70 against 48 of 80.
    assert studies.newcombe(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_the_committed_table_of_all_studies():
    rows = studies.all_rows(EVIDENCE)
    assert json.loads((EVIDENCE / "studies.json").read_text()) == rows
    assert {row["study"] for row in rows} == set(studies.SOURCES)
    assert all((EVIDENCE / row["study"] / "README.md").exists() for row in rows)
    assert all(row["effect"] and row["verdict"] for row in rows)
    assert index(EVIDENCE, ITEMS.values()) == (EVIDENCE / "README.md").read_text()
