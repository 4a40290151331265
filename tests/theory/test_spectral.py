"""Spectral norms from above and from below, against the singular values of the matrix written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from scalelong import theory
from scalelong.errors import InvalidConfigError

# torch warns that it copies the input where "same" padding is uneven.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
property_test = settings(max_examples=60, deadline=None, derandomize=True)


def dense(layer: nn.Module, channels: int, *size: int) -> torch.Tensor:
    """The matrix of a convolution, column by column."""
    count = channels * int(np.prod(size))
    with torch.no_grad():
        columns = layer(torch.eye(count, dtype=torch.float64).view(count, channels, *size))
        offset = layer(torch.zeros(1, channels, *size, dtype=torch.float64))
    return (columns - offset).flatten(1)


def true_norm(matrix: torch.Tensor) -> float:
    return float(np.linalg.norm(matrix.detach().numpy(), 2)) if matrix.numel() else 0.0


@property_test
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    rank=st.integers(1, 12),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 10**6),
)
def test_linear_norm_is_bracketed(rows, columns, rank, exponent, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    matrix = left @ torch.randn(rank, columns, generator=generator, dtype=torch.float64) * 10.0**exponent
    layer = nn.Linear(columns, rows, dtype=torch.float64)
    layer.weight.data = matrix
    exact = true_norm(matrix)
    above, below = theory.linear_bound(layer.weight), theory.spectral_norm(layer)
    assert exact <= above <= exact * 1.001
    assert below <= exact * (1 + 1e-12)


@property_test
@given(
    channels=st.sampled_from([(1, 1), (2, 3), (4, 2), (4, 4)]),
    groups=st.sampled_from([1, 2]),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.one_of(st.integers(0, 4), st.just("same")),
    dilation=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "circular"]),
    size=st.tuples(st.integers(4, 7), st.integers(4, 7)),
    seed=st.integers(0, 10**6),
)
def test_convolution_bound_holds(channels, groups, kernel, stride, padding, dilation, mode, size, seed) -> None:
    if any(channel % groups for channel in channels):
        groups = 1
    if padding == "same":
        stride = 1
    extra = 0 if padding == "same" else 2 * padding
    if any((k - 1) * dilation + 1 > s + extra for k, s in zip(kernel, size, strict=True)):
        return
    torch.manual_seed(seed)
    layer = nn.Conv2d(
        channels[0],
        channels[1],
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
    ).double()
    exact = true_norm(dense(layer, channels[0], *size))
    assert theory.convolution_bound(layer, size) >= exact * (1 - 1e-12)
    assert theory.spectral_norm(layer, size) == pytest.approx(exact, rel=1e-3)
    assert theory.spectral_norm(layer, size) <= exact * (1 + 1e-9)


def test_convolution_bound_is_tight_where_it_can_be() -> None:
    layer = nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular").double()
    assert theory.convolution_bound(layer, (8, 6)) == pytest.approx(true_norm(dense(layer, 3, 8, 6)), rel=1e-6)
    # Zero padding differs from circular padding at the border only.
    padded = nn.Conv2d(3, 5, 3, padding=1).double()
    assert theory.convolution_bound(padded, (16, 16)) <= 1.05 * true_norm(dense(padded, 3, 16, 16))


@pytest.mark.parametrize(("layer", "size"), [(nn.Conv1d(2, 3, 5, padding=2), (9,)), (nn.Conv3d(2, 2, 2), (3, 4, 3))])
def test_other_dimensions(layer, size) -> None:
    layer = layer.double()
    exact = true_norm(dense(layer, 2, *size))
    assert exact <= theory.convolution_bound(layer, size) <= 2 * exact
    assert theory.spectral_norm(layer, size) == pytest.approx(exact, rel=1e-3)


def test_extreme_values() -> None:
    assert theory.linear_bound(torch.zeros(3, 4)) == 0
    assert theory.linear_bound(torch.full((2, 2), 1e-200, dtype=torch.float64)) == pytest.approx(2e-200, rel=1e-6)
    assert theory.linear_bound(torch.full((2, 2), 1e200, dtype=torch.float64)) == pytest.approx(2e200, rel=1e-6)
    with pytest.raises(InvalidConfigError, match="not finite"):
        theory.linear_bound(torch.tensor([[float("nan")]]))


def test_convolutions_without_a_proof_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="no bound is known"):
        theory.convolution_bound(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), (5, 5))
    with pytest.raises(InvalidConfigError, match="2 input sizes"):
        theory.convolution_bound(nn.Conv2d(1, 1, 3), (5,))
