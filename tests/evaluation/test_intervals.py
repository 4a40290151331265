"""Intervals must hold what they promise: other seeds give scores within them, about 19 times of 20."""

import pytest
import torch

from scalelong.evaluation import Moments, frechet_distance, frechet_score, share_score


@pytest.mark.parametrize(("count", "dim"), [(300, 8), (40, 64)], ids=["more images than features", "fewer"])
def test_frechet_interval_covers_what_other_seeds_give(count: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = Moments.of(torch.randn(2000, dim, generator=generator))

    def features() -> torch.Tensor:
        return 1.2 * torch.randn(count, dim, generator=generator) + 0.2

    typical = sum(frechet_distance(reference, Moments.of(features())) for _ in range(100)) / 100
    found = [frechet_score(reference, features()) for _ in range(60)]
    covered = sum(score.low <= typical <= score.high for score in found)
    assert 52 <= covered <= 60
    assert all(score.low < score.value < score.high for score in found)
    # The interval is no wider than the scores' own spread asks for.
    values = torch.tensor([score.value for score in found])
    widths = torch.tensor([score.high - score.low for score in found])
    assert 0.6 < float(widths.mean() / (2 * 1.96 * values.std())) < 1.6


def test_more_images_narrow_the_interval() -> None:
    reference = Moments.of(torch.randn(2000, 4))
    few, many = (frechet_score(reference, torch.randn(n, 4) + 1) for n in (50, 2000))
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_shares_have_intervals_within_0_and_1() -> None:
    for hits, n in ((0, 50), (50, 50), (45, 50)):
        score = share_score(torch.arange(n) < hits)
        assert score.value == hits / n
        assert 0 <= score.low <= score.value <= score.high <= 1
        assert score.high - score.low > 0.02
    # Wilson's interval for 45 of 50, from the textbook formula.
    score = share_score(torch.arange(50) < 45)
    assert abs(score.low - 0.7864) < 1e-3
    assert abs(score.high - 0.9565) < 1e-3
