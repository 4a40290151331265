"""The Fréchet distance against scipy's matrix root and against closed forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import linalg

from scalelong.errors import EvaluationError
from scalelong.evaluation import Moments, MomentsSum, frechet_distance


def by_scipy(a: Moments, b: Moments) -> float:
    root = np.real(np.asarray(linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy())))
    gap = (a.mean - b.mean).numpy()
    return float(gap @ gap + np.trace(a.covariance.numpy() + b.covariance.numpy() - 2 * root))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(0, 1000), st.floats(0.1, 10.0))
def test_agrees_with_scipy_where_covariances_are_regular(dim: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(dim, dim, generator=generator)
    a = Moments.of(torch.randn(6 * dim, dim, generator=generator) @ mix)
    b = Moments.of(scale * torch.randn(5 * dim, dim, generator=generator) + 1)
    assert frechet_distance(a, b) == pytest.approx(by_scipy(a, b), rel=1e-6)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-9)


def test_one_dimension_in_closed_form() -> None:
    a = Moments(torch.tensor([1.0]).double(), torch.tensor([[4.0]]).double(), 10)
    b = Moments(torch.tensor([-2.0]).double(), torch.tensor([[9.0]]).double(), 10)
    assert frechet_distance(a, b) == pytest.approx(3.0**2 + (2 - 3) ** 2)


def test_fewer_features_than_dimensions() -> None:
    """Rank 9 in 200 dimensions. The data matrices give the same trace without any root of a singular matrix."""
    x, y = torch.randn(10, 200).double(), torch.randn(12, 200).double() + 0.1
    a, b = Moments.of(x), Moments.of(y)
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    root = torch.linalg.svdvals(centred_x @ centred_y.T).sum() / (9 * 11) ** 0.5
    gap = (x.mean(0) - y.mean(0)).square().sum()
    expected = float(gap + a.covariance.trace() + b.covariance.trace() - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_set_is_at_no_distance_from_itself(rank: int) -> None:
    features = torch.randn(50, rank) @ torch.randn(rank, 20) + 3 if rank else torch.full((50, 20), 2.5)
    moments = Moments.of(features)
    assert frechet_distance(moments, moments) == pytest.approx(0, abs=1e-6)


def test_orthogonal_singular_covariances() -> None:
    """Two planes that share nothing: the trace of the root is zero."""
    a = Moments(torch.zeros(4).double(), torch.diag(torch.tensor([1.0, 2.0, 0.0, 0.0])).double(), 9)
    b = Moments(torch.zeros(4).double(), torch.diag(torch.tensor([0.0, 0.0, 3.0, 4.0])).double(), 9)
    assert frechet_distance(a, b) == pytest.approx(10.0)


def test_large_offsets_do_not_drown_the_covariance() -> None:
    features = torch.randn(1000, 8).double()
    near, far = Moments.of(features), Moments.of(features + 1e6)
    assert torch.allclose(near.covariance, far.covariance, atol=1e-6)


def test_moments_of_batches_are_moments_of_all() -> None:
    features = torch.randn(1000, 16).double() * torch.arange(1, 17) + 100
    total = MomentsSum()
    for part in features.split([1, 300, 2, 697]):
        total.add(part)
    whole = Moments.of(features)
    assert total.n == whole.n == 1000
    torch.testing.assert_close(total.moments().mean, whole.mean)
    torch.testing.assert_close(total.moments().covariance, whole.covariance)
    assert np.allclose(whole.covariance.numpy(), np.cov(features.numpy(), rowvar=False))


def test_refuses_what_has_no_distance() -> None:
    good = Moments.of(torch.randn(10, 3))
    with pytest.raises(EvaluationError, match="dimensions"):
        frechet_distance(good, Moments.of(torch.randn(10, 4)))
    with pytest.raises(EvaluationError, match="finite"):
        frechet_distance(good, Moments.of(torch.full((10, 3), float("nan"))))
    with pytest.raises(EvaluationError, match="at least two"):
        Moments.of(torch.randn(1, 3))
    with pytest.raises(EvaluationError, match="at least two"):
        MomentsSum().moments()
