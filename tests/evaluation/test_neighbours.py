"""Precision and recall against a slow, obvious version, and in cases where they are known."""

import numpy as np
import pytest
import torch

from scalelong.errors import EvaluationError
from scalelong.evaluation import precision_recall


def slowly(points: torch.Tensor, centres: torch.Tensor, k: int) -> list[bool]:
    radii = [sorted(float((c - other).norm()) for other in centres)[k] for c in centres]
    return [any(float((p - c).norm()) <= radius for c, radius in zip(centres, radii, strict=True)) for p in points]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_agrees_with_the_definition(k: int) -> None:
    real, generated = torch.randn(40, 4).double(), 1.5 * torch.randn(30, 4).double() + 0.5
    precise, recalled = precision_recall(real, generated, k)
    assert precise.tolist() == slowly(generated, real, k)
    assert recalled.tolist() == slowly(real, generated, k)
    assert 0 < precise.float().mean() < 1


def test_agrees_with_the_formula_of_the_prdc_package() -> None:
    """Radii by a partial sort of whole distance matrices, and any() over the other axis, as Naeem et al. write it."""
    generator = torch.Generator().manual_seed(3)
    real = torch.randn(120, 6, generator=generator).double().numpy()
    generated = 0.8 * torch.randn(90, 6, generator=generator).double().numpy() + 0.4

    def distances(a, b):
        return np.sqrt(np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T, 0.0))

    def radii(a, k):
        return np.partition(distances(a, a), k, axis=1)[:, k]

    for k in (3, 5):
        across = distances(real, generated)
        precision = (across < radii(real, k)[:, None]).any(axis=0).mean()
        recall = (across < radii(generated, k)[None, :]).any(axis=1).mean()
        precise, recalled = precision_recall(torch.from_numpy(real), torch.from_numpy(generated), k)
        assert (precise.double().mean().item(), recalled.double().mean().item()) == pytest.approx((precision, recall))
        assert 0.1 < recall < precision < 1


def test_equal_sets_are_precise_and_complete() -> None:
    features = torch.randn(100, 8)
    precise, recalled = precision_recall(features, features)
    assert precise.all()
    assert recalled.all()


def test_distant_sets_share_nothing() -> None:
    precise, recalled = precision_recall(torch.randn(50, 8), torch.randn(50, 8) + 100)
    assert not precise.any()
    assert not recalled.any()


def test_a_model_that_repeats_one_image_is_precise_but_not_complete() -> None:
    real = torch.randn(200, 2)
    precise, recalled = precision_recall(real, real[:1] + 1e-3 * torch.randn(200, 2))
    assert precise.float().mean() > 0.99
    assert recalled.float().mean() < 0.05


def test_needs_more_than_k_images() -> None:
    with pytest.raises(EvaluationError, match="3 generated"):
        precision_recall(torch.randn(10, 2), torch.randn(3, 2))


def test_one_odd_image_does_not_make_noise_precise() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = 30 + 0.1 * torch.randn(100, 8, generator=generator)
    real = torch.cat([torch.randn(100, 8, generator=generator), torch.full((1, 8), 20.0)])
    assert precision_recall(real, noise)[0].all()
    assert not precision_recall(real, noise, radius_quantile=0.9)[0].any()
    more = torch.randn(100, 8, generator=generator)
    assert precision_recall(real, more, radius_quantile=0.9)[0].float().mean() > 0.7
