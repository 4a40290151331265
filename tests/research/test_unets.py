"""UNets at high rates: the arms, the rules, resuming, and the committed page."""

import math
from pathlib import Path

import pytest
import torch

from research import survival, unets
from research.unets import BEHIND, BRANCHES, NONE, SEEDS, ZERO, LossClaim

pytest.importorskip("diffusers")
FOLDER = Path(__file__).parents[2] / "docs" / "evidence" / "unets"


@torch.no_grad()
def answers(arm: str, seed: int = 1) -> torch.Tensor:
    x = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(5))
    return unets.build(survival.Run(unets.UNET, arm, 1e-3, seed))(x, torch.tensor([100.0, 900.0])).sample


def test_arms_differ_from_the_plain_network_and_share_its_weights():
    plain = answers(NONE)
    assert all(not answers(arm).allclose(plain, atol=1e-4) for arm in (BRANCHES, ZERO, BEHIND))
    models = [unets.build(survival.Run(unets.UNET, arm, 1e-3, 1)) for arm in (NONE, BRANCHES, BEHIND)]
    first = [model.state_dict()["conv_in.weight"] for model in models]
    assert all(weight.equal(first[0]) for weight in first)


def test_scaled_branches_are_those_that_zero_removes(monkeypatch):
    zero = answers(ZERO)
    monkeypatch.setattr(unets, "TAU", 0.0)
    without = answers(BRANCHES)
    assert zero.allclose(without, atol=1e-5)
    model = unets.build(survival.Run(unets.UNET, NONE, 1e-3, 1))
    # Eight blocks with two convolutions each, and four attentions.
    assert len(list(unets.last_layers(model))) == 12


def records(losses: dict[str, float | None]) -> dict:
    """All runs of all arms, which survive the lower rates; with None none survives the high ones."""
    found = {}
    for arm, loss in losses.items():
        for run in unets.choosing(arm) + [run for rate in unets.RATES for run in unets.at_rate(arm, rate)]:
            survived = loss is not None or run.lr < min(unets.HIGH)
            value = (loss or 0.2) * run.lr**0.1 * (1 + 0.01 * (run.seed % 3))
            found[run.key] = {"survived": survived, "held_out": [[160, value]], "collapsed": None}
    return found


def test_losses_and_survivors_are_judged_against_none():
    found = records({NONE: 0.2, BRANCHES: 0.18, ZERO: 0.201, BEHIND: None})
    claims = {claim.arm: claim for claim in unets.loss_claims(found)}
    assert {claim.confidence for claim in claims.values()} == {1 - 0.1 / 3}
    assert claims[BRANCHES].verdict == "**better**"
    assert claims[BRANCHES].text.startswith("-10.0 %")
    alive = {claim.arm: claim for claim in unets.survival_claims(found)}
    assert alive[BRANCHES].verdict == "no difference by the rule"
    assert (alive[BEHIND].survivors, alive[BEHIND].baseline_survivors, alive[BEHIND].runs) == (0, 16, 16)
    assert alive[BEHIND].verdict == "**fewer survive**"
    assert alive[BEHIND].p == pytest.approx(3 * 2 / 2**16)


def test_no_difference_and_what_cannot_be_judged():
    assert LossClaim(ZERO, [0.01, -0.01, 0.0, 0.005], 0.9).verdict.startswith("no difference larger than ")
    assert LossClaim(ZERO, [0.3, -0.3, 0.1, -0.2], 0.9).verdict == "cannot be judged"
    assert LossClaim(ZERO, [0.1, 0.11, 0.12], 0.9).verdict == "**worse**"


def test_an_arm_counts_with_all_of_its_seeds():
    found = records({NONE: 0.2, ZERO: 0.2})
    del found[unets.at_rate(ZERO, unets.HIGH[0])[0].key]
    (claim,) = unets.survival_claims(found)
    assert (claim.rates, claim.runs) == ((unets.HIGH[1],), len(SEEDS))
    assert f"{ZERO} at {unets.HIGH[0]:g}" in unets.missing(found)
    assert not math.isnan(claim.p)


def test_what_a_run_leaves_and_that_it_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(unets, "UNET", survival.Setting(data="garments", depth=2, steps=4, width=8, batch=2))
    monkeypatch.setattr(unets, "RATES", (1e-3, 2e-3))
    monkeypatch.setattr(unets, "HIGH", (2e-3,))
    monkeypatch.setattr(unets, "SEEDS", (3,))
    monkeypatch.setattr(unets, "ARMS", (NONE, ZERO))
    unets.run(tmp_path)
    found = unets.read(tmp_path)
    # Two arms: four runs choose, one is judged, and one is at the high rate unless that was chosen.
    assert 10 <= len(found) <= 12
    assert all(record["held_out"][-1][0] == 4 for record in found.values())
    monkeypatch.setattr(unets, "train", None)
    unets.run(tmp_path)  # nothing is left to do


# The evidence that is committed


def test_the_committed_page_is_that_of_the_raw_results():
    assert (FOLDER / "results.md").read_text() == unets.page(FOLDER)
