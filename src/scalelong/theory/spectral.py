"""Spectral norms ‖W‖ = max ‖W x‖/‖x‖ of linear layers and convolutions, from below and from above.

Power iteration approaches the norm from below, so a bound must not be built on it. Gram iteration approaches it from
above: for A = WᵀW and any k, ‖W‖² ≤ ‖A^k‖_F^(1/k), and squaring A a few times makes this tight (Delattre et al., ICML
2023).

What it tells a user: how much one layer can stretch a perturbation.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

# k = 2^SQUARINGS at most. The bound then exceeds the norm of an n x n matrix by less than a factor n^(1/2^13), which is
# 0.1 % for n = 4096. It never increases, so one may stop at any time; below this change it is not worth going on.
SQUARINGS = 12
WORTHWHILE = 1e-6
# Rounding in float64 changes the result by less than n^1.5 · 1.1e-16, which this covers for n up to 40,000.
ROUNDING = 1 + 1e-9
TINY = 1e-300


def gram_bound(matrices: Tensor) -> Tensor:
    """An upper bound of the spectral norm of every matrix of a batch (..., n, m), real or complex. In float64."""
    gram = matrices.to(torch.complex128 if matrices.is_complex() else torch.float64)
    largest = gram.abs().amax((-2, -1))
    if not bool(torch.isfinite(largest).all()):
        raise InvalidConfigError("a spectral norm was asked for of a matrix with values that are not finite")
    gram = gram / largest.clamp(min=TINY)[..., None, None]
    gram = gram.mH @ gram if gram.shape[-1] <= gram.shape[-2] else gram @ gram.mH
    # log ‖A^k‖_F = log_scale + log ‖gram‖_F: rescaling before every product keeps all powers in range.
    log_scale, power = torch.zeros_like(largest), 1
    log_bound = torch.linalg.matrix_norm(gram).log()
    for _ in range(SQUARINGS):
        size = torch.linalg.matrix_norm(gram)
        gram = gram / size.clamp(min=TINY)[..., None, None]
        gram = gram @ gram
        log_scale, power = 2 * (log_scale + size.log()), 2 * power
        previous, log_bound = log_bound, (log_scale + torch.linalg.matrix_norm(gram).log()) / power
        if not bool((previous - log_bound > WORTHWHILE).any()):
            break
    return torch.exp(log_bound / 2) * largest * ROUNDING


def linear_bound(weight: Tensor) -> float:
    """An upper bound of the spectral norm of a weight (out, in)."""
    return float(gram_bound(weight.detach()))


def convolution_bound(layer: Convolution, input_size: Sequence[int]) -> float:
    """An upper bound of the spectral norm of a convolution on images of `input_size` (height and width, or alike).

    A zero-padded convolution is a cyclic one on a torus of size + padding, fed with zeros outside of the image and read
    at some of its places, and neither can increase the norm. (Outputs that would share a place of the torus are zero.)
    The cyclic convolution is block-diagonal in frequency: one matrix (out, in) per frequency, and its norm is the
    largest of theirs. With more circular padding than the kernel needs, places are read repeatedly, which is counted.
    """
    if layer.transposed or layer.padding_mode not in ("zeros", "circular"):
        raise InvalidConfigError(
            f"no bound is known here for {layer}; only convolutions that are not transposed and pad with zeros or "
            f"circularly are covered"
        )
    dimensions = len(layer.kernel_size)
    if len(input_size) != dimensions:
        raise InvalidConfigError(f"{layer} needs {dimensions} input sizes, got {tuple(input_size)}")
    reach = [(k - 1) * d for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    padding = reach if isinstance(layer.padding, str) else list(layer.padding)
    cyclic = layer.padding_mode == "circular"
    torus = [size if cyclic else size + pad for size, pad in zip(input_size, padding, strict=True)]
    repeats = 1
    if cyclic and not isinstance(layer.padding, str):
        places = [size + 2 * pad - far for size, pad, far in zip(input_size, padding, reach, strict=True)]
        repeats = math.prod(math.ceil(place / size) for place, size in zip(places, input_size, strict=True))
    weight = layer.weight.detach().to(torch.complex128)
    # W(ω) = Σ_k w_k exp(iω·kd), one axis at a time. A kernel that is longer than the torus wraps around it.
    for axis, (size, dilation) in enumerate(zip(torus, layer.dilation, strict=True)):
        taps = torch.arange(weight.shape[2 + axis], dtype=torch.float64) * dilation
        angles = 2 * math.pi / size * torch.outer(torch.arange(size, dtype=torch.float64), taps)
        transform = torch.polar(torch.ones_like(angles), angles)
        weight = (weight.movedim(2 + axis, -1) @ transform.T).movedim(-1, 2 + axis)
    # The weights are real, so that W(-ω) is the conjugate of W(ω): half of the last axis is enough.
    frequencies = weight.narrow(-1, 0, torus[-1] // 2 + 1).flatten(2).movedim(2, 0)
    # Groups are independent convolutions: each has some of the outputs.
    groups = frequencies.unflatten(1, (layer.groups, -1)).flatten(0, 1)
    return math.sqrt(repeats) * max(float(gram_bound(part).max()) for part in groups.split(256))


def power_iteration(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int = 1000
) -> float:
    """The norm of a linear map from below, by x ← AᵀAx/‖AᵀAx‖: never above ‖A‖, and soon close to it."""
    x, norm = start / start.norm(), 0.0
    for _ in range(steps):
        image = apply(x)
        previous, norm = norm, float(image.norm())
        x = adjoint(image)
        length = x.norm()
        if float(length) == 0 or abs(norm - previous) <= 1e-10 * norm:
            break
        x = x / length
    return norm


def spectral_norm(layer: nn.Linear | Convolution, input_size: Sequence[int] = (), steps: int = 1000) -> float:
    """The spectral norm of a linear layer or convolution by power iteration: an estimate from below."""
    shape = (layer.in_features,) if isinstance(layer, nn.Linear) else (1, layer.in_channels, *input_size)
    start = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = {name: value.detach().double() for name, value in layer.named_parameters()}
    if "bias" in parameters:
        parameters["bias"] = torch.zeros_like(parameters["bias"])

    def apply(x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,))

    # The layer is linear, so its vector-Jacobian product at any place is its transpose.
    transpose = torch.func.vjp(apply, start)[1]
    return power_iteration(apply, lambda y: transpose(y)[0], start, steps)
