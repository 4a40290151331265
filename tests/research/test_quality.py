"""The study of quality at equal steps and of length: what is measured, resuming, claims, and the committed page."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from research import edge, quality, survival
from research.reproduce.claims import Verdict
from research.survival import Setting

FOLDER = Path(__file__).parents[2] / "docs" / "evidence" / "quality"
TINY = Setting(data="garments", depth=4, steps=6)
ANCHORS = {"noise": 12.0, "real": 0.1, "blurred": 5.0, "shuffled": 3.0}
ABOUT = {"garments": {"anchors": ANCHORS, "features": "random", "digest": "0" * 64, "images": 2000}}


@pytest.fixture
def small(monkeypatch):
    """Two settings that take seconds: one as those at equal steps, one as the long one."""
    monkeypatch.setattr(edge, "HELD_OUT", 8)
    monkeypatch.setattr(quality, "SAMPLER_STEPS", 2)
    short = quality.Place(TINY, 1e-3, ("none", "LS"), (3, 4), looks=(4,), scored=(6,), images=300)
    long = replace(short, methods=("none", "CS(0.7)"), falling=False, looks=(2, 4), scored=(4, 6))
    monkeypatch.setattr(quality, "PLACES", {"garments": short, "length": long})
    return [("garments", ("none", "LS")), ("length", ("none", "CS(0.7)"))]


def test_what_runs_leave_and_that_they_are_not_repeated(tmp_path, monkeypatch, small):
    quality.run(tmp_path, None, small)
    lines = survival.read(tmp_path / "garments.jsonl")
    assert [(line["arm"], line["seed"]) for line in lines] == [("none", 3), ("none", 4), ("LS", 3), ("LS", 4)]
    assert [step for step, _ in lines[0]["held_out"]] == [4, 6]
    assert 0.1 < lines[0]["frechet"]["6"] < 100
    lines = survival.read(tmp_path / "length.jsonl")
    assert [line["arm"] for line in lines] == ["none", "none", "CS(0.7)", "CS(0.7)"]
    assert [step for step, _ in lines[0]["held_out"]] == [2, 4, 6]
    assert set(lines[0]["frechet"]) == {"4", "6"}
    assert json.loads((tmp_path / "features.json").read_text())["garments"]["features"] == "random"
    assert len(quality.results_of(tmp_path).runs) == 8
    quality.redraw(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"distances.png", "length.png"}
    monkeypatch.setattr(survival, "train", None)
    monkeypatch.setattr(quality, "train_averaged", None)
    quality.run(tmp_path, None, small)  # nothing is left to do


def test_a_stack_that_was_interrupted_ends_with_the_same_numbers(tmp_path, monkeypatch, small):
    monkeypatch.setattr(quality, "KEPT_EVERY", 3)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    quality.run(tmp_path / "whole", None, small[1:])
    look = quality.Judge.look

    def interrupt(self, run, step, state):
        if step == 4:
            raise KeyboardInterrupt
        look(self, run, step, state)

    monkeypatch.setattr(quality.Judge, "look", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quality.run(tmp_path / "cut", None, small[1:])
    assert not (tmp_path / "cut" / "length.jsonl").exists()
    monkeypatch.setattr(quality.Judge, "look", look)
    quality.run(tmp_path / "cut", None, small[1:])
    first, second = (survival.read(tmp_path / name / "length.jsonl") for name in ("whole", "cut"))
    assert first == second
    assert not list(tmp_path.rglob("*.pt"))


def test_the_average_is_that_of_a_plain_loop(tmp_path, small):
    """One network by itself, with torch's own modules, ends with the same averaged weights as in the stack."""
    place = quality.PLACES["length"]
    images = survival.load_images("garments", None)
    runs, ends = place.runs(), {}

    class Keeper(quality.Judge):
        def __init__(self) -> None:
            self.place = place

        def look(self, run, step, state): ...

        def end(self, run, state):
            ends[run.key] = {name: value.clone() for name, value in state.items()}
            return {}

    quality.train_averaged(runs, images, lambda *_: None, Keeper(), tmp_path / "kept.pt")
    one = runs[-1]
    model, arm = survival.build(one, 1), one.spec
    mean = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), betas=arm.betas, weight_decay=arm.decay)
    stream = survival.batches(images, one.seed, survival.NoiseProcess())
    for step in range(TINY.steps):
        optimizer.param_groups[0]["lr"] = one.lr * (step + 1) / arm.warmup
        x, t, noise = next(stream)
        optimizer.zero_grad()
        (model(x, t) - noise).square().mean().backward()
        optimizer.step()
        for name, value in model.named_parameters():
            mean[name] += (1 - (step + 1) / (step + 10)) * (value.detach() - mean[name])
    # Adam's first steps are the signs of gradients: where these are all but zero, rounding decides them.
    moved = [(ends[one.key][name] - value).abs() for name, value in mean.items()]
    assert torch.cat([each.flatten() for each in moved]).mean() < 1e-6


def test_starts_and_rates_are_those_of_the_plan():
    unit, long = quality.PLACES["garments, unit"].runs()[0], quality.PLACES["length"].runs()[0]
    assert unit.spec.network == {"init_std": "unit"}
    assert [unit.spec.share(step, 400) for step in (49, 399)] == [1.0, 1 / 350]
    assert long.spec.network == {"init_std": 0.0566}
    assert long.spec.share(9_999, 10_000) == 1.0
    assert quality.LOG_SPACED[0] == 10
    assert quality.LOG_SPACED[-1] == 10_000
    assert set(quality.PLACES["length"].scored) <= set(quality.LOG_SPACED)
    planned = {(name, method) for name, methods in quality.ORDER for method in methods}
    assert planned == {(name, method) for name, place in quality.PLACES.items() for method in place.methods}


def fill(folder: Path, name: str, method: str, distances: list[float], **more) -> None:
    place = quality.PLACES[name]
    for run, distance in zip(place.runs([method]), distances, strict=False):
        result = {"survived": True, "collapsed": None, "held_out": [[100, 0.3], [place.setting.steps, 0.2]]}
        survival.append(folder / quality.file_name(name), run, result | {"frechet": {"400": distance}} | more)
    (folder / "features.json").write_text(json.dumps(ABOUT))


def test_a_method_counts_with_all_seeds(tmp_path):
    fill(tmp_path, "garments", "none", [2.0 + 0.01 * seed for seed in range(8)])
    fill(tmp_path, "garments", "CS(0.7)", [1.9] * 7)
    assert quality.results_of(tmp_path).methods() == ["none"]
    assert not quality.claims_of("table1", quality.results_of(tmp_path))
    assert "| Table 1: Fréchet distance at equal steps | none was run |" in quality.page(tmp_path)
    assert "not run: garments: CS(0.7), LS, 1/√2; CIFAR-10: none" in quality.page(tmp_path)


def test_claims_are_judged_together_and_a_collapse_has_the_distance_of_noise(tmp_path):
    fill(tmp_path, "garments", "none", [2.0 + 0.01 * seed for seed in range(8)])
    fill(tmp_path, "garments", "CS(0.7)", [1.8 + 0.01 * seed for seed in range(8)])
    fill(tmp_path, "garments", "LS", [2.0] * 8, survived=False)
    fill(tmp_path, "garments, unit", "none", [1.5 + 0.01 * seed for seed in range(8)])
    results = quality.results_of(tmp_path)
    cs, ls = quality.claims_of("table1", results)
    assert (cs.verdict, ls.verdict) == (Verdict.REPRODUCED, Verdict.CONTRADICTED)
    assert cs.confidence == 1 - 0.1 / 2
    assert cs.effect == pytest.approx(math.log(2.98 / 3.11))
    assert ls.values[0] == pytest.approx(math.log(12 / 2))
    assert quality.LOSS.of(results.of("LS", "garments")[0]) == 1.0
    (start,) = quality.claims_of("start", results)
    assert start.values[0] == pytest.approx(math.log(1.5 / 2.0))
    assert start.verdict is Verdict.REPRODUCED


def test_cifar10_is_left_out_without_data(tmp_path, capsys):
    quality.run(tmp_path, None, [("CIFAR-10", ("none",))])
    assert "needs CIFAR-10; give --data FOLDER" in capsys.readouterr().out


def test_the_committed_page_is_that_of_the_raw_results():
    assert (FOLDER / "results.md").read_text() == quality.page(FOLDER)
