"""κ after training, where the best one is known: the score is the distance to what the model computes with it."""

import copy

import pytest
import torch
from torch import Tensor

import scalelong as sl
import zoo
from scalelong.errors import InvalidConfigError


def images(seed: int = 1, count: int = 2) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


INPUTS = (images(),)


def given(model, seed):
    return (images(seed), torch.full((2,), 0.5)) if isinstance(model, sl.UViT) else (images(seed),)


def sampler(model, seeds) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(*given(model, seed)) for seed in seeds])


SEARCH, TEST = range(4), range(10, 12)


@pytest.fixture
def model() -> zoo.HandWritten:
    torch.manual_seed(0)
    return zoo.HandWritten().eval()


def one_seed(model, scaling):
    """A score on the search seeds and one on the test seeds, both zero at the scaling."""
    best = sl.scale_skips_(copy.deepcopy(model), scaling, INPUTS)
    wanted = {len(seeds): sampler(best, seeds) for seeds in (SEARCH, TEST)}

    def score(found: Tensor) -> float:
        return float((found.mean(0) - wanted[len(found) // 2].mean(0)).square().mean())

    return score


@pytest.mark.parametrize("best", [(1.0, 0.8, 0.6), (1.0, 1.2, 1.4)])
def test_the_best_is_found_and_the_test_agrees(model, tmp_path, best):
    plain = sampler(model, SEARCH)
    score = one_seed(model, sl.CustomScaling(best))
    found = sl.tune_skips(model, sampler, score, INPUTS, seeds=SEARCH, test_seeds=[TEST] * 3, test_score=score)
    assert isinstance(found.scaling, sl.CustomScaling)
    assert found.scaling.kappas == pytest.approx(best, abs=0.05)
    assert min(score for _, score in found.trials) < 0.01 * found.trials[0][1]
    assert len(found.test) == 3
    assert found.verdict == "better"
    assert not sl.is_scaled(model)
    assert torch.equal(sampler(model, SEARCH), plain)
    assert "better" in str(found)
    assert found.spelled() in str(found)
    found.save(tmp_path / "tuned.json")
    again = sl.TunedSkips.load(tmp_path / "tuned.json")
    assert again == found
    assert sl.as_scaling(again.spelled()) == found.scaling
    # A scaling like any other.
    sl.scale_skips_(model, again.scaling, INPUTS)
    scaled = sampler(model, SEARCH)
    sl.fold_(model)
    torch.testing.assert_close(sampler(model, SEARCH), scaled, rtol=1e-4, atol=1e-5)


def test_a_scaled_model_is_tuned_from_there_and_put_back():
    torch.manual_seed(0)
    model = sl.UViT(image_size=8, patch_size=2, dim=16, depth=4, heads=2, scaling="cs:0.5").eval()
    before = sampler(model, SEARCH)
    best = copy.deepcopy(model)
    sl.unscale_(best)
    sl.scale_skips_(best, "custom:1.0,0.35")
    wanted = sampler(best, SEARCH)

    def score(found: Tensor) -> float:
        return float((found - wanted).square().mean()) if len(found) == len(wanted) else 0.0

    found = sl.tune_skips(model, sampler, score, seeds=SEARCH)
    assert found.tuned["kappas"] == pytest.approx((1.0, 0.35), abs=1e-6)
    assert found.base == {"method": "cs", "kappa": 0.5, "reverse": False, "behind_norms": False}
    assert torch.equal(sampler(model, SEARCH), before)
    assert found.verdict == "no difference"  # the score of the test is the same for all


def test_progress_and_nothing_found(model):
    seen: list[tuple[int, int]] = []
    progress = lambda done, most, _: seen.append((done, most))  # noqa: E731
    found = sl.tune_skips(
        model,
        sampler,
        one_seed(model, "none"),
        INPUTS,
        kappas=[0.5],
        seeds=SEARCH,
        test_seeds=[TEST],
        progress=progress,
    )
    assert seen == [(0, 2), (1, 2)]
    assert len(found.trials) == 2
    assert found.verdict == "nothing found"
    assert "nothing was better" in str(found)


def test_what_is_refused(model, tmp_path):
    def score(_: Tensor) -> float:
        return 0.0

    worst = sl.tune_skips(model, sampler, lambda _: float("nan"), INPUTS, kappas=[0.5], seeds=SEARCH)
    worst.save(tmp_path / "worst.json")
    assert sl.TunedSkips.load(tmp_path / "worst.json") == worst
    assert worst.verdict == "nothing found"

    for options, words in (
        ({"kappas": []}, "some kappas"),
        ({"seeds": []}, "some seeds"),
        ({"seeds": range(4), "test_seeds": [range(3, 6)]}, "3 is in both"),
    ):
        with pytest.raises(InvalidConfigError, match=words):
            sl.tune_skips(model, sampler, score, INPUTS, **options)  # pyright: ignore[reportArgumentType]
    learned = sl.scale_skips_(copy.deepcopy(model), "ls", INPUTS)
    with pytest.raises(InvalidConfigError, match="only constant ones"):
        sl.tune_skips(learned, sampler, score, INPUTS)
    for text in ("{}", "no", '{"format": 1, "tuned": {"method": "x"}, "trials": [], "test": [], "names": []}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidConfigError, match="tuned long skips"):
            sl.TunedSkips.load(tmp_path / "bad.json")
    with pytest.raises(InvalidConfigError, match=r"absent\.json"):
        sl.TunedSkips.load(tmp_path / "absent.json")


def test_an_error_in_the_sampler_leaves_the_model_as_it_was(model):
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no images today")

    sl.scale_skips_(model, "cs", INPUTS)
    before = sampler(model, SEARCH)
    with pytest.raises(RuntimeError, match="no images today"):
        sl.tune_skips(model, broken, lambda _: 0.0, INPUTS)
    assert torch.equal(sampler(model, SEARCH), before)
