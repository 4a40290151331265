"""Reproducing the paper: the rule of verdicts, the plans, small runs, and the pages that are committed."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from research.reproduce import fig3
from research.reproduce.claims import (
    ABOVE_ZERO,
    BELOW_ZERO,
    LOSS,
    Claim,
    StudyResults,
    Verdict,
    alike,
    below,
    faster,
    judge,
    oscillations,
    overall,
    region_of,
)
from research.reproduce.items import ITEMS
from research.reproduce.pages import index, page
from research.reproduce.run import describe, redraw, reproduce
from research.reproduce.settings import CS, LS, NONE, SCALES, planned, tiny_uvit
from scalelong.cli import main
from scalelong.config import RECIPES, TrainConfig, recipe, with_values
from scalelong.errors import InvalidConfigError
from scalelong.experiments import Curve, RunRecord

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence"


# The rule


@pytest.mark.parametrize("values", [[0.1, 0.3], [-1.0, 2.0, 4.0], [0.5, 0.6, 0.4, 0.55, 0.7]])
def test_the_interval_is_students(values):
    found = region_of(values)
    expected = stats.t.interval(0.9, len(values) - 1, loc=stats.tmean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-0.10, -0.11, -0.12], Verdict.REPRODUCED),
        ([0.10, 0.11, 0.12], Verdict.CONTRADICTED),
        ([-0.30, -0.01, 0.05], Verdict.CANNOT_BE_JUDGED),  # the mean is below zero, but so large a spread says nothing
        ([-0.01, 0.00, 0.01], Verdict.NO_EFFECT),  # the paper's effect would have been seen
        ([-5.0], Verdict.CANNOT_BE_JUDGED),  # one seed is no evidence, for or against
        ([], Verdict.CANNOT_BE_JUDGED),
    ],
)
def test_verdicts_respect_the_spread(values, verdict):
    assert judge(values, BELOW_ZERO, [ABOVE_ZERO], effect=-0.05) is verdict


def test_what_a_claim_says_of_itself():
    def claim(*values: float, effect: float | None = -0.05) -> str:
        return Claim("x", "s", values, BELOW_ZERO, (ABOVE_ZERO,), effect=effect).verdict_text()

    assert claim(-0.1, -0.11, -0.12) == "**reproduced**"
    assert claim(-0.01, 0.0, 0.01) == "no effect larger than 1.7 %"
    assert claim(-3.0, 3.0) == claim(-0.1, 0.1, effect=None) == claim(0.1) == "cannot be judged at this scale"


def test_the_verdict_of_an_item():
    yes, nothing, opposite = Verdict.REPRODUCED, Verdict.NO_EFFECT, Verdict.CONTRADICTED
    unknown = Verdict.CANNOT_BE_JUDGED
    assert overall([yes, yes]) is yes
    assert overall([yes, nothing]) is nothing
    assert overall([yes, yes, nothing]) is Verdict.MIXED
    assert overall([opposite, nothing, nothing]) is nothing
    assert overall([opposite, yes]) is opposite
    assert overall([]) is unknown
    assert overall([unknown, unknown]) is unknown
    assert overall([unknown, yes]) is unknown


# Claims


def made_up(method: str, seed: int, losses: list[float], setting: str = "s", **more) -> RunRecord:
    held_out = [(100 * (place + 1), value) for place, value in enumerate(losses)]
    scores = {"o1_features": more.pop("o1_features", 0.1 + 0.01 * seed), "o1_gradient": 0.2}
    values = {"kappas": (1.0, 0.7, 0.5), "measured": scores} | more
    curve = Curve(tuple(step for step, _ in held_out), tuple(value for _, value in held_out))
    return RunRecord(setting=setting, method=method, seed=seed, run="run", held_out=curve, **values)


def results_of(*runs: RunRecord) -> StudyResults:
    return StudyResults(list(runs), item="table4", scale="tiny", seeds=3, settings={"s": {}})


def test_oscillation_is_what_lies_around_the_trend():
    source = random.Random(0)
    growth = [math.exp(0.02 * t) for t in range(200)]
    noise = [math.exp(source.gauss(0, 0.2)) for _ in range(4000)]
    for series, o1 in ((growth, 0.0), (noise, 0.2), ([1.0] * 50, None), ([1e-9] * 60, None), ([math.inf] * 60, None)):
        curve = Curve(tuple(range(len(series))), tuple(series))
        found = oscillations({"probe_block_rms/a": curve, "gradient_norm/all": curve})
        assert found["o1_features"] == (o1 if o1 is None else pytest.approx(o1, rel=0.03, abs=1e-9))
        lost = oscillations({"probe_block_rms/a": curve, "held_out_loss": Curve((1,), (1.2,))})
        assert lost == {"o1_features": None, "o1_gradient": None}


def test_ratios_are_those_of_equal_seeds():
    # Seeds differ by a factor of two, methods by a tenth: only pairs show it.
    runs = [made_up(NONE.label, seed, [0.1 * 2**seed]) for seed in range(3)]
    runs += [made_up(CS.label, seed, [0.09 * 2**seed]) for seed in (2, 0, 1)]
    claim = below(results_of(*runs), "s", CS, NONE, LOSS)
    assert list(claim.values) == pytest.approx([math.log(0.9)] * 3)
    assert claim.verdict is Verdict.REPRODUCED
    assert claim.text_of(claim.values[0]) == "-10.0 %"
    assert alike(results_of(*runs), "s", CS, NONE, LOSS, 0.03).verdict is Verdict.CONTRADICTED
    assert alike(results_of(*runs), "s", CS, NONE, LOSS, 0.15).verdict is Verdict.REPRODUCED


def test_a_speed_up_counts_steps_to_where_the_other_ends():
    runs = [made_up(NONE.label, seed, [0.8, 0.6, 0.4, 0.2]) for seed in range(3)]
    quick = [made_up(CS.label, seed, [0.2, 0.1, 0.1, 0.1]) for seed in range(3)]
    slow = [made_up(LS.label, seed, [0.9, 0.8, 0.7, 0.6]) for seed in range(3)]
    results = results_of(*runs, *quick, *slow)
    assert list(faster(results, "s", CS, NONE).values) == pytest.approx([math.log(0.25)] * 3)
    assert faster(results, "s", CS, NONE).verdict is Verdict.REPRODUCED
    # LS ends at 0.6 after 400 steps, where no scaling was after 200.
    assert list(faster(results, "s", LS, NONE).values) == pytest.approx([math.log(2)] * 3)
    assert faster(results, "s", LS, NONE).verdict is Verdict.CONTRADICTED


# Plans


@pytest.mark.parametrize("scale", SCALES)
def test_every_item_has_the_baselines_of_the_paper(scale):
    methods = {name: {arm.method.label for arm in item.arms(scale)} for name, item in ITEMS.items()}
    core = {"none", "1/√2", "CS(0.7)", "LS"}
    assert all(core <= methods[name] for name in ("fig1", "fig3", "fig5", "fig6", "table1"))
    assert {"CS(0.5)", "CS(0.9)"} <= methods["table1"]
    designs = {"ratio 4", "ratio 8", "ELU", "Mish", "IE", "scalars", "per skip"}
    assert {f"LS, {design}" for design in designs} <= methods["table2"]
    assert {"stable τ = 0.1", "stable τ = 0.3", "ReZero", "CS(0.7)", "LS"} <= methods["table3"]
    assert {"CS(0.7)", "CS(0.7) reversed"} <= methods["table4"]
    networks = {arm.setting.config.model.partition("/")[0] for arm in ITEMS["table1"].arms(scale)}
    assert networks == {"uvit", "unet"}


def test_items_share_runs():
    wanted = [arm for item in ITEMS.values() for arm in item.arms("tiny")]
    runs = planned(wanted, 3, Path("runs"))
    assert len({run.folder for run in runs}) == len(runs)
    assert len(runs) < 3 * len(wanted)
    baseline = with_values(replace(tiny_uvit(), seed=0), {"hardware.precision": "fp32"})  # the same on every machine
    baselines = [run for run in runs if run.config == baseline]
    assert len(baselines) == 1
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)


def test_the_plan_of_the_paper_follows_the_recipes(capsys, tmp_path):
    assert main(["lab", "reproduce", "all", "--scale", "paper", "--dry-run", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for name in RECIPES:
        if not name.endswith(("tiny", "deep")):
            assert f"(recipe {name})" in out
    assert "UNet: cifar10, unet/cifar10, 800000 steps, batch 128: none; 1/√2; CS(0.7); LS" in out
    assert "U-ViT, batch 64: cifar10, uvit/cifar10-s2, 45000 steps, batch 64: none; CS(0.7); CS(0.7) reversed" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ITEMS)
def test_pages_of_made_up_results(name, scale):
    """Every item makes a page of any results, with every arm in it, whatever the scale."""
    item = ITEMS[name]
    measured = {"gain": 1.0, "losses": {"0.0": 0.3, "0.1": 0.4, "0.2": 0.5, "0.4": 0.6}}
    runs = [
        made_up(arm.method.label, seed, [0.5, 0.3 + 0.01 * seed], arm.setting.name, measured=measured)
        for arm in item.arms(scale)
        for seed in range(3)
    ]
    settings = {arm.setting.name: {"data": arm.setting.config.data} for arm in item.arms(scale)}
    text = page(item, StudyResults(runs, item=name, scale=scale, seeds=3, settings=settings))
    assert text.startswith(f"# {item.title}\n")
    assert f"scalelong lab reproduce {name} --scale {scale} --seeds 3" in text
    assert all(f"| {run.setting} | {run.method} |" in text for run in runs) or name == "table4"
    assert "claims reproduced" in text


# Small runs


def small(**changes) -> TrainConfig:
    base = recipe("digits-tiny")
    config = replace(
        base,
        steps=4,
        batch_size=4,
        model_options={"patch_size": 4, "dim": 16, "depth": 4, "heads": 2},
        images=replace(base.images, held_out=16),
        logging=replace(base.logging, log_every=2, held_out_every=1, samples_every=0, trackers=()),
        checkpoints=replace(base.checkpoints, save_every=2),
    )
    kept = {name: value for name, value in changes.items() if name in ("model", "model_options")}
    return replace(config, **kept)


@pytest.fixture
def in_small(monkeypatch):
    monkeypatch.setattr("research.reproduce.settings.tiny_uvit", small)


def test_a_table_from_runs_to_page_and_back(in_small, tmp_path, capsys):
    command = ["lab", "reproduce", "table4", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "table4: " in capsys.readouterr().out
    results = StudyResults.read(tmp_path / "table4")
    assert [(run.method, run.seed) for run in results.runs] == [
        (method, seed) for method in ("none", "CS(0.7)", "CS(0.7) reversed") for seed in (0, 1)
    ]
    assert results.of("CS(0.7) reversed", "U-ViT")[0].kappas == pytest.approx([0.49, 0.7])
    written = json.loads((tmp_path / "table4" / "results.json").read_text())
    assert written["settings"]["U-ViT"]["model_options.depth"] == 4
    # Figure 1 looks at the baseline, so it is read densely whoever trains it; CS reversed is in Table 4 alone.
    readings = {run.method: readings_of(tmp_path / "runs" / run.run) for run in results.runs}
    assert readings == {"none": 4, "CS(0.7)": 4, "CS(0.7) reversed": 1}
    text, first = (tmp_path / "table4" / "README.md").read_text(), (tmp_path / "README.md").read_text()
    assert (tmp_path / "table4" / "curves.png").read_bytes().startswith(b"\x89PNG")
    # The same command finds everything done, and the pages can be made again of the JSON alone.
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/metrics.jsonl")}
    assert len(trained) == 6
    assert main(command) == 0
    assert all(path.stat().st_mtime_ns == before for path, before in trained.items())
    for path in (tmp_path / "table4" / "README.md", tmp_path / "table4" / "curves.png", tmp_path / "README.md"):
        path.unlink()
    assert main(["lab", "reproduce", "--redraw", str(tmp_path)]) == 0
    assert (tmp_path / "table4" / "README.md").read_text() == text
    assert (tmp_path / "table4" / "curves.png").exists()
    assert (tmp_path / "README.md").read_text() == first


def readings_of(folder: Path) -> int:
    return sum('"kappa/1"' in line for line in (folder / "metrics.jsonl").read_text().splitlines())


@pytest.mark.filterwarnings("ignore::scalelong.errors.CancelledScalingWarning")
def test_extra_noise_and_the_data(in_small, tmp_path, monkeypatch):
    monkeypatch.setitem(fig3.DATA, "tiny", ("digits", "no-such-data"))
    item = ITEMS["fig3"]
    one = replace(item, arms=lambda scale: [arm for arm in item.arms(scale) if arm.method == NONE])
    monkeypatch.setitem(ITEMS, "fig3", one)
    found = reproduce(["fig3"], "tiny", 1, tmp_path, 1)
    assert found is not None
    record = found[0].of("none", "UNet")[0]
    assert set(record.measured["losses"]) == {"0.0", "0.1", "0.2", "0.4"}
    assert record.measured["gain"] > 0
    # Data that is not there is left out; noise is what the general form of Lemma 3.2 says.
    (digits,) = found[0].survey["data"].values()
    assert digits["norm"][0] == pytest.approx(digits["lemma_general"], rel=0.05)
    assert sum(digits["histograms"]["ratio"]) == pytest.approx(1, rel=1e-2)


def test_learned_coefficients_are_measured(in_small, tmp_path):
    found = reproduce(["fig7"], "tiny", 1, tmp_path, 1)
    assert found is not None
    results = found[0]
    authors, ours = results.of("LS", "U-ViT")[0], results.of("LS from CS", "U-ViT")[0]
    assert authors.measured["kappas"] == pytest.approx([0.5, 0.5], abs=0.1)
    assert ours.measured["kappas"] == pytest.approx([1.0, 0.7], abs=0.02)
    assert len(results.of("LS", "UNet")[0].measured["kappas"]) == 4


def test_mistakes_are_named(tmp_path, capsys):
    assert main(["lab", "reproduce"]) == 1
    assert "say what to reproduce: fig1" in capsys.readouterr().err
    assert main(["lab", "reproduce", "fig1", "--seeds", "0"]) == 1
    assert "--seeds must be at least 1" in capsys.readouterr().err
    assert main(["lab", "reproduce", "--redraw", str(tmp_path)]) == 1
    assert "holds no results" in capsys.readouterr().err
    with pytest.raises(InvalidConfigError, match="unknown figure or table 'fig2'"):
        describe(["fig2"], "tiny", 1, tmp_path)
    (tmp_path / "fig1").mkdir()
    (tmp_path / "fig1" / "results.json").write_text('{"item": "fig1"}')
    with pytest.raises(InvalidConfigError, match="cannot be read as results"):
        redraw(tmp_path)


# The evidence that is committed


@pytest.mark.parametrize("name", ITEMS)
def test_committed_pages_are_those_of_the_raw_results(name):
    folder = EVIDENCE / name
    assert (folder / "README.md").read_text() == page(ITEMS[name], StudyResults.read(folder))
    assert all((folder / f"{figure}.png").exists() for figure in ITEMS[name].figures)
    assert (folder / "results.json").stat().st_size < 100_000


def test_the_committed_index():
    assert (EVIDENCE / "README.md").read_text() == index(EVIDENCE, ITEMS.values())
    assert all(StudyResults.read(EVIDENCE / name).seeds >= 3 for name in ITEMS)
