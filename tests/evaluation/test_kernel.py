"""The kernel distance against its definition, and against torch-fidelity where that is installed."""

import importlib

import pytest
import torch

from scalelong.errors import EvaluationError
from scalelong.evaluation import kernel_score, near_copies


def slowly(x: torch.Tensor, y: torch.Tensor) -> float:
    """Bińkowski et al., Eq. 4, pair by pair."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a @ b / len(a) + 1) ** 3)

    n, m = len(x), len(y)
    among_x = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    among_y = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return among_x + among_y - 2 * sum(kernel(a, b) for a in x for b in y) / (n * m)


def test_agrees_with_the_definition() -> None:
    real, generated = torch.randn(17, 5).double(), 1.3 * torch.randn(12, 5).double() + 0.3
    score = kernel_score(real, generated)
    assert score.value == pytest.approx(slowly(generated, real), rel=1e-9)
    left_out = [kernel_score(real, torch.cat([generated[:i], generated[i + 1 :]])).value for i in range(12)]
    error = (11 / 12 * sum((value - sum(left_out) / 12) ** 2 for value in left_out)) ** 0.5
    assert score.high - score.value == pytest.approx(1.96 * error, rel=1e-6)


def test_agrees_with_torch_fidelity() -> None:
    pytest.importorskip("torch_fidelity")
    theirs = importlib.import_module("torch_fidelity.metric_kid")
    real, generated = torch.randn(60, 8).double(), torch.randn(60, 8).double() + 0.2
    among, between, others = ((a @ b.T / 8 + 1).numpy() ** 3 for a, b in _pairs(generated, real))
    assert kernel_score(real, generated).value == pytest.approx(float(theirs.mmd2(among, between, others)), rel=1e-9)


def _pairs(x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, x), (x, y), (y, y)]


def test_few_images_do_not_bias_it_and_the_interval_covers() -> None:
    """Both sets from one distribution: the mean over many draws is 0, also of 20 images each."""
    generator = torch.Generator().manual_seed(0)
    scores = [
        kernel_score(torch.randn(400, 4, generator=generator), torch.randn(20, 4, generator=generator))
        for _ in range(200)
    ]
    values = torch.tensor([score.value for score in scores])
    assert abs(float(values.mean())) < 3 * float(values.std()) / 200**0.5
    assert float(values.min()) < 0
    assert sum(score.low <= 0 <= score.high for score in scores) > 170


def test_needs_three_of_each() -> None:
    with pytest.raises(EvaluationError, match="three images"):
        kernel_score(torch.randn(10, 2), torch.randn(2, 2))


def test_near_copies_are_measured_by_how_alike_real_images_are() -> None:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(500, 16, generator=generator)
    fresh = torch.randn(500, 16, generator=generator)
    assert float(near_copies(real, fresh).float().mean()) < 0.04
    assert near_copies(real, real + 1e-3 * fresh).all()
