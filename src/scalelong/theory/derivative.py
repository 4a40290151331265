"""Directional derivatives of any network: exact where forward mode reaches, otherwise by differences."""

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# The relative step of central differences: the cube root of the precision balances truncation against rounding.
DIFFERENCE_STEP = {torch.float64: 6e-6, torch.float32: 5e-3}


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
    relative = DIFFERENCE_STEP.get(point.dtype, 5e-2)
    length = direction.norm().clamp(min=torch.finfo(point.dtype).tiny)
    step = float(relative * point.norm().clamp(min=1.0) / length)
    with torch.no_grad():
        return (function(point + step * direction) - function(point - step * direction)) / (2 * step)
