"""The paper's figures and tables once more: settings, what is measured at the end of a run, claims, the page."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from research import again, edge, survival
from research.survival import Setting
from scalelong.theory import noise_gain

FOLDER = Path(__file__).parents[2] / "docs" / "evidence" / "again"
TINY = Setting(data="garments", depth=4, steps=6)


def test_settings_are_those_of_the_plan():
    like, best = (again.PLACES[name].runs(["ReZero"])[0] for name in ("paper-like", "best"))
    assert like.lr == pytest.approx(1.6e-3)
    assert like.spec.network == {"final_start": "authors", "residual_scaling": "rezero"}
    assert like.spec.betas == (0.99, 0.999)
    assert like.spec.share(599, 600) == 1.0
    assert best.spec.network == {"init_std": "unit", "residual_scaling": "rezero"}
    assert best.spec.share(399, 400) == pytest.approx(1 / 350)
    assert again.PLACES["edge"].runs(["none"])[0].spec == survival.Arm()
    assert sum(len(again.PLACES[name].runs()) for name in again.FIRST) == 392
    assert again.METHODS["LS, scalars"].attach == "ls:start=paper,module=scalar"
    wanted = {method for item in again.ITEMS.values() for method in item.methods}
    assert wanted <= set(again.PLACES["paper-like"].methods)
    for item in again.ITEMS.values():
        assert all(set(item.methods) <= set(again.PLACES[name].methods) for name in item.places), item.title


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(edge, "HELD_OUT", 8)
    monkeypatch.setattr(edge, "JUDGE_EVERY", 4)
    place = replace(again.PLACES["paper-like"], setting=TINY, methods=("none", "LS", "LS, scalars"), seeds=(3, 4))
    monkeypatch.setattr(again, "PLACES", {"paper-like": place})
    return place


def test_what_a_run_leaves_and_that_it_is_not_repeated(tmp_path, monkeypatch, small):
    again.run(["paper-like"], tmp_path)
    lines = {(line["arm"], line["seed"]): line for line in survival.read(tmp_path / "paper-like.jsonl")}
    assert list(lines) == [(method, seed) for method in small.methods for seed in small.seeds]
    bare, gated, scalars = (lines[method, 3] for method in small.methods)
    assert [step for step, _ in bare["held_out"]] == [4, 6]
    assert len(bare["series"]["middle"]) == 3
    assert "series" not in scalars, "Figure 1 is about the paper's four methods"
    assert bare["kappas"] == []
    assert gated["kappas"] == pytest.approx([0.5, 0.5], abs=0.1)
    assert bare["noise"]["losses"]["0.0"] == pytest.approx(bare["held_out"][-1][1], rel=1e-3)
    monkeypatch.setattr(survival, "train", None)
    again.run(["paper-like"], tmp_path)  # nothing is left to do
    again.redraw(tmp_path)
    assert "was not run: paper-like" not in (tmp_path / "results.md").read_text()
    assert {path.name for path in tmp_path.glob("*.png")} == {"losses.png", "gates.png"}


def test_extra_noise_by_hand(small):
    """The last numbers of a run are those of its network, called as anybody would."""
    images, held_out = survival.load_images("garments", None), edge.held_out_images("garments", None)
    run, found = small.runs(["none"])[0], {}
    reader = again.Reader(small, images, held_out)

    class Keeper(again.Reader):
        def end(self, run, state):
            found.update({name: value.clone() for name, value in state.items()})
            return super().end(run, state)

    ended: list[dict] = []
    survival.train([run], images, lambda _, result: ended.append(result), Keeper(small, images, held_out))
    model = survival.build(run, 1)
    model.load_state_dict(found)
    extra = torch.randn(reader.x.shape, generator=torch.Generator().manual_seed(13))
    with torch.no_grad():
        loss = (model(reader.x + 0.4 * extra, reader.t) - reader.noise).square().mean()
    assert ended[0]["noise"]["losses"]["0.4"] == pytest.approx(float(loss), rel=1e-3)
    gain = noise_gain(model, reader.x[:32], reader.t[:32], sigma=0.1)
    assert ended[0]["noise"]["gain"] == pytest.approx(gain, rel=1e-3)


def line(arm: str, seed: int, **more) -> dict:
    held_out = [[step, 0.2 + 0.001 * seed] for step in (100, 200, 300, 400)]
    noise = {"losses": {"0.0": 0.2, "0.1": 0.22, "0.2": 0.3, "0.4": 0.5 + 0.01 * seed}, "gain": 1.1}
    known = {"survived": True, "collapsed": None, "held_out": held_out, "noise": noise, "kappas": []}
    return {"arm": arm, "seed": seed, **known, **more}


def test_a_run_that_broke_has_no_rise_and_no_gates():
    alive = again.record_of("edge", line("LS", 0, kappas=[1.0, 0.6, 0.4]))
    broken = again.record_of("edge", line("LS", 1, survived=False, collapsed=120, kappas=[0.9, None, 0.4]))
    results = again.Results([alive, broken])
    inside, falls = again.of_gates(results, "edge")
    assert inside.values == [0.0, None]
    assert falls.values[0] == pytest.approx((math.log(0.6) + 2 * math.log(0.4)) / 5)
    claims = again.fig3.noise_claims(again.Results([again.record_of("edge", line("none", 0)), broken]), "edge")
    assert claims[0].values == [pytest.approx(math.log(2.5))]


def test_the_committed_page_is_that_of_the_raw_results():
    assert (FOLDER / "results.md").read_text() == again.page(FOLDER)
