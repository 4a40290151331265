"""Directional derivatives of any network: exact where forward mode reaches, otherwise by differences."""

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def directional_derivative(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """d/ds function(point + s·direction) at s = 0."""
    try:
        return forward_derivative(function, point, direction)
    except NotImplementedError:
        # Custom autograd functions and some fused kernels have no forward mode.
        return difference_derivative(function, point, direction)


def forward_derivative(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Exact, in one forward with dual numbers."""
    # The fused attention kernels know no forward mode; the plain one does.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        output = function(forward_ad.make_dual(point.detach(), direction.to(point)))
        tangent = forward_ad.unpack_dual(output).tangent
        return torch.zeros_like(output) if tangent is None else tangent.clone()


def difference_derivative(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Central differences with a step relative to the point; needs nothing of the function but its values."""
    with torch.no_grad():
        # The cube root of the precision of the values balances truncation against rounding.
        precision = max(torch.finfo(point.dtype).eps, torch.finfo(function(point).dtype).eps)
        length = direction.norm().clamp(min=torch.finfo(point.dtype).tiny)
        step = float(precision ** (1 / 3) * point.norm().clamp(min=1.0) / length)
        return (function(point + step * direction) - function(point - step * direction)) / (2 * step)
