"""The ablations: statistics against scipy, rules on made-up runs, what is looked at, pages from the lines alone."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from research import ablations, survival

IMAGES = torch.rand(20, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
SHALLOW = replace(ablations.GARMENTS, depth=4, steps=12)


def test_fisher_is_scipys():
    scipy = pytest.importorskip("scipy.stats")
    for a, b in ((0, 8), (1, 6), (3, 3), (8, 8), (5, 2)):
        theirs = scipy.fisher_exact([[a, 8 - a], [b, 8 - b]]).pvalue
        assert ablations.fisher(a, 8, b, 8) == pytest.approx(theirs)


def test_holm_multiplies_by_what_is_left_and_never_falls():
    assert ablations.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert ablations.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def line(arm: str, seed: int, survived: bool, name: str = "starts", **more: Any) -> dict[str, Any]:
    study = ablations.STUDIES[name]
    run = {"arm": arm, "lr": study.rates[0], "seed": seed, "survived": survived, "collapsed": None if survived else 60}
    return {**study.settings[0].__dict__, **run, "best": 0.2, "last": 0.2, "curve": [0.5] * 6, **more}


def test_only_arms_that_survive_go_on_to_the_higher_rate():
    records = [line("none", seed, False) for seed in ablations.SEEDS]
    records += [line("start CS(0.5)", seed, seed != 9003) for seed in ablations.SEEDS]
    records += [line("start CS(0.9)", seed, seed > 9001) for seed in ablations.SEEDS]
    arms = ablations.planned("harder", records).arms
    assert "start CS(0.5)" in arms, "seven of eight"
    assert not {"none", "start CS(0.9)", "norms in merges"} & set(arms), "six, none, and not run"
    assert set(ablations.TOGETHER) < set(arms)


def test_each_arm_is_confirmed_at_its_own_best_rate():
    none, start = ablations.FALLING
    scores = {none: (0.3, 0.2, 0.9), start: (0.3, 0.25, 0.2)}
    records = [
        line(arm, seed, survived=not (arm == none and rate == 1.6e-2), name="buys-choice") | {"lr": rate, "held_out": s}
        for arm, found in scores.items()
        for rate, s in zip(ablations.BUYS_RATES, found, strict=True)
        for seed in ablations.CHOICE
    ]
    assert ablations.best_rates(records) == {none: 8e-3, start: 1.6e-2}
    assert ablations.best_rates(records[1:]) == {start: 1.6e-2}, "a seed of the choice is missing"


def test_what_leaves_stays_away():
    """The logit peaks and comes back; the merge leaves for good at the reading of step 70."""
    calm = [1.0] * 10
    series: dict[str, Any] = {kind: [list(calm)] * 5 for kind in ablations.KINDS} | {"step": list(calm)}
    series["logit"] = [[1, 1, 1, 1, 1, 1, 1, 9, 1, 1]] * 5
    series["merge from main"] = [calm, [1] * 7 + [3, 4, 5]]
    curve = [0.9, 0.8, 0.7, 0.6, 0.5, 0.2, 0.3, 0.4, 0.5, 0.9]
    record = {"curve": curve, "series": series, "survived": False, "collapsed": 95, "arm": "none"}
    assert ablations.departures(record) == {"merge from main": 70}
    assert "| merge from main | 1 | 1 | 25 |" in ablations.first_to_leave([record])


def test_looking_into_a_run_does_not_change_it():
    found: dict[Any, Any] = {}
    looker = ablations.Looker("starts")
    looker.arms, looker.scores = ("none",), True
    runs = [ablations.Trial(SHALLOW, "none", 4e-3, seed) for seed in (1, 2)]
    survival.train(runs, IMAGES, lambda run, result: found.update({run.seed: result}), looker)
    survival.train(runs, IMAGES, lambda run, result: found.update({f"alone {run.seed}": result}))
    assert found[2]["curve"] == found["alone 2"]["curve"]
    series = found[2]["series"]
    assert {kind: len(series[kind]) for kind in ablations.KINDS} == {
        "RMS": 5,
        "logit": 5,
        "gradient": 5,
        "merge from main": 2,
        "merge from skip": 2,
    }
    assert len(series["step"]) == len(series["nudge"]) == 2
    assert series["step"][0] > 0
    assert 0 < found[2]["held_out"] < 2
    assert found[1]["held_out"] != found[2]["held_out"]


def test_the_first_step_is_measured_along_the_signs_of_the_gradient():
    found = ablations.first_step(*ablations.network(4, "none", 3), 3, IMAGES)
    model, blocks = ablations.network(4, "none", 3)
    x, t, noise = next(survival.batches(IMAGES, 3, survival.NoiseProcess()))
    before = model(x, t).detach()
    # Without a memory, Adam divides each gradient by its own size.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.0, 0.0), eps=1e-30)
    (model(x, t) - noise).square().mean().backward()
    optimizer.step()
    assert found["all"] == pytest.approx(ablations.rms(model(x, t).detach() - before) / 1e-4, rel=0.01)
    assert found["inner"] < found["all"]
    gradient = torch.stack([p.grad.square().sum() for p in blocks[2].parameters()]).sum().sqrt()
    assert found["gradients"][2] == pytest.approx(float(gradient), rel=0.01)


def test_the_inner_half_alone_can_be_slow():
    model = survival.build(ablations.Trial(SHALLOW, "none", 1e-3, 0), 1)
    named = dict(model.named_parameters())
    inner, others = ablations.ARMS["inner half at a tenth of the rate"].groups(named, 4)
    names = {name for name, p in named.items() if any(p is q for q in inner["params"])}
    assert names == {name for name in named if name.startswith(("encoder.1.", "middle.", "decoder.0."))}
    assert len(inner["params"]) + len(others["params"]) == len(named)
    assert (inner["share"], others["share"]) == (0.1, 1.0)


def test_pages_and_figures_come_from_the_lines_alone(tmp_path):
    series = {kind: [[1.0, 1.1, 1.2, 1.3, 1.4, 1.5]] * 25 for kind in ablations.KINDS}
    series |= {"step": [0.1] * 6, "nudge": [0.5] * 6}
    records = [line(arm, seed, arm != "none", series=series) for arm in ablations.STARTS for seed in ablations.SEEDS]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ablations.redraw(tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "| none | 0 of 8 | 0.00 to 0.32 | " in page
    assert "| start CS(0.7) | 8 of 8 | 0.68 to 1.00 | 0.00016 | 0.0014 |" in page
    assert "smaller with CS(0.7) as a start than with none: 0 of 8 seeds, **failed**" in page
    assert {file.name for file in tmp_path.glob("*.png")} == {"survivors.png", "cause.png"}
