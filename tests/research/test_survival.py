"""The survival study: statistics against other people's numbers, runs side by side against a plain loop, resuming."""

import dataclasses
import json

import pytest
import torch

from research import survival

IMAGES = torch.rand(20, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
SHORT = survival.Setting(depth=4, steps=12)


def test_wilson_interval():
    # Wilson's interval as scipy.stats.binomtest(k, n).proportion_ci(method="wilson") gives it.
    scipy = pytest.importorskip("scipy.stats")
    for count, of in ((0, 8), (3, 8), (8, 8), (12, 16)):
        theirs = scipy.binomtest(count, of).proportion_ci(method="wilson")
        assert survival.wilson(count, of) == pytest.approx((theirs.low, theirs.high), abs=1e-4)


def test_mcnemar_is_a_binomial_test_of_the_discordant_pairs():
    scipy = pytest.importorskip("scipy.stats")
    pairs = [(True, False)] * 7 + [(False, True)] * 1 + [(True, True)] * 5
    assert survival.mcnemar(pairs) == (7, 1, pytest.approx(scipy.binomtest(1, 8).pvalue))
    assert survival.mcnemar([(True, True)] * 3) == (0, 0, 1.0)


def fate(losses: list[float], warmup: int = 2) -> survival.Fate:
    found = survival.Fate(warmup)
    for step, loss in enumerate(losses):
        if found.add(step, loss):
            break
    return found


def test_who_survives():
    assert fate([1.0] * 3 + [0.1] * 60).record()["survived"]
    left = fate([1.0] * 3 + [0.1] * 60 + [2.0] * 60)
    # 0.9^n 0.1 + (1 - 0.9^n) 2 is above 0.5 for n = 3.
    assert left.collapsed == 66
    assert not left.record()["survived"]
    assert not fate([1.0] * 60).record()["survived"], "it never learned"
    assert fate([1.0, 0.5, float("nan"), 0.1]).record() == {
        "survived": False,
        "collapsed": 3,
        "best": None,
        "last": None,
        "curve": [],
    }


@pytest.mark.parametrize("arm", ["none", "CS attached", "rates alone"])
def test_runs_side_by_side_are_runs_alone(arm):
    found = {}
    survival.train(
        [survival.Run(SHORT, arm, 1e-3, seed) for seed in (3, 4)], IMAGES, lambda run, r: found.update({run.seed: r})
    )
    alone = survival.watch(survival.Run(SHORT, arm, 1e-3, 4), IMAGES)
    assert found[4]["curve"] == pytest.approx(alone["curve"], abs=2e-4)
    assert found[3]["curve"] != found[4]["curve"]


def test_the_end_of_one_run_does_not_touch_the_others(monkeypatch):
    def curves():
        found = {}
        runs = [survival.Run(SHORT, "none", 1e-3, seed) for seed in (3, 4, 5)]
        survival.train(runs, IMAGES, lambda run, result: found.update({run.seed: result}))
        return found

    together = curves()
    made = []

    class Unlucky(survival.Fate):
        def __init__(self, warmup: int) -> None:
            super().__init__(warmup)
            made.append(self)

        def add(self, step: int, loss: float) -> bool:
            super().add(step, loss)
            if self is made[1] and step == 4:
                self.collapsed = 5
            return self.collapsed is not None

    monkeypatch.setattr(survival, "Fate", Unlucky)
    without = curves()
    assert without[4]["collapsed"] == 5
    assert [without[seed]["curve"] for seed in (3, 5)] == [together[seed]["curve"] for seed in (3, 5)]


def test_arms_of_the_start_differ_as_they_say():
    networks = {
        arm: survival.build(survival.Run(survival.Setting(depth=8), arm, 1e-3, 0), 1)
        for arm in ("none", "CS attached", "CS folded", "rates alone")
    }
    x, t = torch.randn(2, 1, 16, 16), torch.tensor([10.0, 700.0])
    outputs = {arm: network(x, t) for arm, network in networks.items()}
    torch.testing.assert_close(outputs["none"], outputs["rates alone"])
    torch.testing.assert_close(outputs["CS attached"], outputs["CS folded"])
    assert not torch.allclose(outputs["none"], outputs["CS folded"])


def test_resumes_and_redraws_from_the_lines_alone(tmp_path, monkeypatch, capsys):
    study = survival.Study("A small study", (SHORT,), (1e-3,), ("none", "LS channel, bounded"), (0, 1))
    monkeypatch.setattr(survival, "STUDIES", {"small": study})
    monkeypatch.setattr(survival, "load_images", lambda name, data: IMAGES)
    trained = []
    train = survival.train
    monkeypatch.setattr(survival, "train", lambda runs, *rest: (trained.extend(runs), train(runs, *rest)))
    survival.run_study("small", tmp_path, None, 1)
    path = tmp_path / "small.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == len(trained) == 4
    # One line was never written, and another was cut off by a crash.
    path.write_text("".join(lines[:2]) + lines[2][:20])
    survival.run_study("small", tmp_path, None, 1)
    again = path.read_text().splitlines(keepends=True)
    assert len(trained) == 6
    assert sorted(map(survival.key_of, map(json.loads, again))) == sorted(map(survival.key_of, map(json.loads, lines)))
    survival.redraw(tmp_path)
    assert "| none | 0.001 | 0 of 2 |" in (tmp_path / "results.md").read_text()
    assert {file.name for file in tmp_path.glob("*.png")} == {"small.png", "small-gates.png"}
    assert "2 of 4 runs are missing" in capsys.readouterr().out


def test_verdicts_follow_the_plan(monkeypatch):
    study = survival.Study("Made up", (SHORT,), (1e-3,), survival.START, tuple(range(8)))
    monkeypatch.setattr(survival, "STUDIES", {"start-made-up": study})

    def verdict(*counts: int) -> str:
        alive: dict[str, int] = dict(zip(survival.START, counts, strict=True))
        records = [
            {"data": "cifar10", "depth": 4, "steps": 12, "plain": False, "arm": run.arm, "lr": 1e-3, "seed": run.seed}
            | {"survived": run.seed < alive[run.arm]}
            for run in survival.runs_of(study)
        ]
        return survival.start_verdicts(records)

    assert "| 1 | 7 | 6 | 1 | 8 | agrees |" in verdict(1, 7, 6, 1)
    assert "5 seeds survive with the first alone, 0 with the second; p = 0.062" in verdict(1, 7, 6, 1)
    assert "| silent |" in verdict(5, 7, 7, 5)
    assert "| contradicts |" in verdict(1, 7, 4, 1)
    assert "| contradicts |" in verdict(1, 7, 7, 4)


def test_what_is_trained_side_by_side_has_one_structure():
    assert survival.Arm().structure == survival.Arm(start="cs").structure
    assert survival.Arm().structure != dataclasses.replace(survival.Arm(), attach="cs").structure
