"""Distances, precision and recall against scipy, torch-fidelity, definitions and closed forms; intervals that hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import linalg

from scalelong.errors import EvaluationError
from scalelong.evaluation import (
    Moments,
    MomentsSum,
    frechet_distance,
    frechet_score,
    near_copies,
    precision_recall,
    share_score,
)


def by_scipy(a: Moments, b: Moments) -> float:
    root = np.real(np.asarray(linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy())))
    gap = (a.mean - b.mean).numpy()
    return float(gap @ gap + np.trace(a.covariance.numpy() + b.covariance.numpy() - 2 * root))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(0, 1000), st.floats(0.1, 10.0))
def test_frechet_agrees_with_scipy_where_covariances_are_regular(dim: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator)
    a = Moments.of(torch.randn(6 * dim, dim, generator=generator) @ mix)
    b = Moments.of(scale * torch.randn(5 * dim, dim, generator=generator) + 1)
    assert frechet_distance(a, b) == pytest.approx(by_scipy(a, b), rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-9)


def test_frechet_in_closed_form() -> None:
    """In one dimension, and of two planes that share nothing: there the trace of the root is zero."""
    a = Moments(torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double(), 10)
    b = Moments(torch.tensor([-2.0]).double(), torch.tensor([[9.0]]).double(), 10)
    assert frechet_distance(a, b) == pytest.approx(3.0**2 + (2 - 3) ** 2)
    a = Moments(torch.zeros(4).double(), torch.diag(torch.tensor([1.0, 2.0, 0.0, 0.0])).double(), 9)
    b = Moments(torch.zeros(4).double(), torch.diag(torch.tensor([0.0, 0.0, 3.0, 4.0])).double(), 9)
    assert frechet_distance(a, b) == pytest.approx(10.0)


def test_frechet_of_fewer_features_than_dimensions() -> None:
    """Rank 9 in 200 dimensions. The data matrices give the same trace without any root of a singular matrix."""
    x, y = torch.randn(10, 200).double(), torch.randn(12, 200).double() + 0.1
    a, b = Moments.of(x), Moments.of(y)
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    root = torch.linalg.svdvals(centred_x @ centred_y.T).sum() / (9 * 11) ** 0.5
    gap = (x.mean(0) - y.mean(0)).square().sum()
    expected = float(gap + a.covariance.trace() + b.covariance.trace() - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


def test_moments_of_batches_are_moments_of_all() -> None:
    features = torch.randn(1000, 16).double() * torch.arange(1, 17) + 1e6
    total = MomentsSum()
    for part in features.split([1, 300, 2, 697]):
        total.add(part)
    whole = Moments.of(features)
    assert total.n == whole.n == 1000
    torch.testing.assert_close(total.moments().mean, whole.mean)
    torch.testing.assert_close(total.moments().covariance, whole.covariance, rtol=1e-5, atol=1e-5)
    assert np.allclose(whole.covariance.numpy(), np.cov(features.numpy(), rowvar=False), rtol=1e-5, atol=1e-5)


def test_frechet_refuses_what_has_no_distance() -> None:
    good = Moments.of(torch.randn(10, 3))
    with pytest.raises(EvaluationError, match="dimensions"):
        frechet_distance(good, Moments.of(torch.randn(10, 4)))
    with pytest.raises(EvaluationError, match="finite"):
        frechet_distance(good, Moments.of(torch.full((10, 3), float("nan"))))
    with pytest.raises(EvaluationError, match="at least two"):
        Moments.of(torch.randn(1, 3))


@pytest.mark.parametrize(("count", "dim"), [(300, 8), (40, 64)], ids=["more images than features", "fewer"])
def test_frechet_interval_covers_what_other_seeds_give(count: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = Moments.of(torch.randn(2000, dim, generator=generator))

    def features() -> torch.Tensor:
        return 1.2 * torch.randn(count, dim, generator=generator) + 0.2

    typical = sum(frechet_distance(reference, Moments.of(features())) for _ in range(100)) / 100
    found = [frechet_score(reference, features()) for _ in range(60)]
    assert 52 <= sum(score.low <= typical <= score.high for score in found) <= 60
    # The interval is no wider than the scores' own spread asks for.
    values = torch.tensor([score.value for score in found])
    widths = torch.tensor([score.high - score.low for score in found])
    assert 0.6 < float(widths.mean() / (2 * 1.96 * values.std())) < 1.6


def test_shares_have_wilsons_interval() -> None:
    for hits, n in ((0, 50), (50, 50), (45, 50)):
        score = share_score(torch.arange(n) < hits)
        assert score.value == hits / n
        assert 0 <= score.low <= score.value <= score.high <= 1
    # For 45 of 50, from the textbook formula.
    score = share_score(torch.arange(50) < 45)
    assert (score.low, score.high) == pytest.approx((0.7864, 0.9565), abs=1e-3)


# Precision, recall and near-copies


def covered_slowly(points: torch.Tensor, centres: torch.Tensor, k: int) -> list[bool]:
    """Naeem et al., whose package is prdc: within the distance of a centre to its k-th nearest other one."""
    radii = [sorted(float((c - other).norm()) for other in centres)[k] for c in centres]
    return [any(float((p - c).norm()) <= radius for c, radius in zip(centres, radii, strict=True)) for p in points]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_precision_and_recall_agree_with_their_definition(k: int) -> None:
    real, generated = torch.randn(40, 4).double(), 1.5 * torch.randn(30, 4).double() + 0.5
    precise, recalled = precision_recall(real, generated, k)
    assert precise.tolist() == covered_slowly(generated, real, k)
    assert recalled.tolist() == covered_slowly(real, generated, k)
    assert 0 < precise.float().mean() < 1
    with pytest.raises(EvaluationError, match=f"{k} generated"):
        precision_recall(real, generated[:k], k)


def test_a_model_that_repeats_one_image_is_precise_but_not_complete() -> None:
    real = torch.randn(200, 2)
    precise, recalled = precision_recall(real, real[:1] + 1e-3 * torch.randn(200, 2))
    assert precise.float().mean() > 0.99
    assert recalled.float().mean() < 0.05


def test_one_odd_image_does_not_make_noise_precise() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 30 + 0.1 * torch.randn(100, 8, generator=generator)
    real = torch.cat([torch.randn(100, 8, generator=generator), torch.full((1, 8), 20.0)])
    assert precision_recall(real, noise)[0].all()
    assert not precision_recall(real, noise, radius_quantile=0.9)[0].any()
    more = torch.randn(100, 8, generator=generator)
    assert precision_recall(real, more, radius_quantile=0.9)[0].float().mean() > 0.7


def test_near_copies_are_measured_by_how_alike_real_images_are() -> None:
    generator = torch.Generator().manual_seed(0)
    real, fresh = (torch.randn(500, 16, generator=generator) for _ in range(2))
    assert float(near_copies(real, fresh).float().mean()) < 0.04
    assert near_copies(real, real + 1e-3 * fresh).all()
