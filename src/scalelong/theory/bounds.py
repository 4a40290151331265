"""Spectral norms ‖W‖ = max ‖W x‖/‖x‖ of linear layers and convolutions, from below and from above.

Power iteration approaches the norm from below, so a bound must not be built on it. Gram iteration approaches it from
above: for A = WᵀW and any k, ‖W‖² ≤ ‖A^k‖_F^(1/k), and squaring A a few times makes this tight (Delattre et al., ICML
2023).

What it tells a user: how much one layer can stretch a perturbation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, NoBoundError
from .network import Equation3, RandomLinear

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

    A zero-padded convolution is a cyclic one on a torus of size + padding, fed with zeros outside the image and read
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


# Upper bounds of the Lipschitz constants of blocks: linear layers, convolutions, activations, norms, chains of them.
#
# What it tells a user: no perturbation of a block's input can grow by more. A module without a proven bound raises
# NoBoundError, because a guess is not a bound.

Shape = tuple[int, ...]


def lipschitz_bound(module: nn.Module, input_shape: Shape = ()) -> float:
    """A number L with ‖module(x) - module(y)‖ ≤ L‖x - y‖ for all x, y, in eval mode.

    `input_shape` is that of one input without its batch axis; convolutions need it.
    """
    # The exact type, because a subclass may compute anything, and no hooks, because they may change anything.
    bound = BOUNDS.get(type(module))
    if bound is None:
        raise NoBoundError(
            f"no Lipschitz bound is known for {type(module).__name__}. Known are linear layers, convolutions, norms, "
            f"pooling, common activations and nn.Sequential of these. (Attention has none: it is not Lipschitz.) "
            f"Measure instead with scalelong.theory.jacobian_norm"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoBoundError(f"this {type(module).__name__} has forward hooks, which may do anything to its values")
    return bound(module, tuple(input_shape))


def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """The shape of one output, found by a forward of zeros."""
    parameter = next(module.parameters(), None)
    probe = torch.zeros(1, *shape, dtype=None if parameter is None else parameter.dtype)
    training = module.training
    with torch.no_grad():
        output = module.eval()(probe)
    module.train(training)
    return tuple(output.shape[1:])


def _random_linear(module: RandomLinear, _: Shape) -> float:
    if module.signs is not None:
        raise NoBoundError("an ensemble of random networks has no single bound; build one network, with ensemble=None")
    return linear_bound(module.weight)


def _convolution(module: nn.Conv2d, shape: Shape) -> float:
    if len(shape) != len(module.kernel_size) + 1:
        raise NoBoundError(f"the bound of {module} needs input_shape=(channels, sizes...), got {shape}")
    return convolution_bound(module, shape[1:])


def _chain(module: nn.Sequential, shape: Shape) -> float:
    bound = 1.0
    for part in module:
        bound *= lipschitz_bound(part, shape)
        shape = output_shape(part, shape) if shape else shape
    return bound


def _batch_norm(module: nn.BatchNorm2d, _: Shape) -> float:
    if module.running_var is None:
        raise NoBoundError("a batch norm without running statistics depends on the other images of the batch")
    deviation = (module.running_var.double() + module.eps).sqrt()
    weight = torch.ones_like(deviation) if module.weight is None else module.weight.detach().double().abs()
    return float((weight / deviation).max())


def _norm(module: nn.LayerNorm | nn.GroupNorm, _: Shape) -> float:
    # The derivative of (x - mean)/√(var + ε) is at most a projection over √(var + ε), and the variance may be 0.
    if not module.eps > 0:
        raise NoBoundError(f"{module} divides by a deviation that may be 0")
    weight = 1.0 if module.weight is None else float(module.weight.detach().double().abs().max())
    return weight / math.sqrt(module.eps)


def _pool(module: nn.AvgPool2d | nn.MaxPool2d, _: Shape) -> float:
    dilated = getattr(module, "dilation", 1) not in (1, (1,), (1, 1), (1, 1, 1))
    if module.kernel_size != module.stride or dilated or getattr(module, "divisor_override", None):
        raise NoBoundError(f"the bound of a pooling needs windows that do not overlap (stride = kernel): {module}")
    # Each input enters one window, where a mean or a maximum changes by no more than the norm of the change.
    return 1.0


def _equation3(module: Equation3, shape: Shape) -> float:

    return robustness_bound(module, shape).recursion


def _constant(value: float) -> Callable[[Any, Shape], float]:
    return lambda _module, _shape: value


BOUNDS: dict[type[nn.Module], Callable[[Any, Shape], float]] = {
    nn.Linear: lambda module, _: linear_bound(module.weight),
    RandomLinear: _random_linear,
    Equation3: _equation3,
    nn.Sequential: _chain,
    nn.LeakyReLU: lambda module, _: max(1.0, abs(module.negative_slope)),
    nn.ELU: lambda module, _: max(1.0, abs(module.alpha)),
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), _pool),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), _pool),
    # Dropout is the identity in eval mode.
    **dict.fromkeys((nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d), _constant(1.0)),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Softsign, nn.LogSigmoid), _constant(1.0)),
    # The largest slopes of the other activations, rounded up.
    nn.Sigmoid: _constant(0.25),
    nn.SiLU: _constant(1.1),
    nn.GELU: _constant(1.13),
    nn.Mish: _constant(1.09),
    nn.Hardswish: _constant(1.5),
    nn.SELU: _constant(1.7581),
}
"""The rule for each type of module: add your own to cover a module that you know the constant of."""


# Theorem 3.4: how far a perturbation of the input can move the output of Eq. (3).
#
# What it tells a user: the bound falls with κ, most for CS, whose small coefficients meet the large powers of M_0. It
# holds always and is loose (by orders of magnitude for deep networks), so read the measured Jacobian norm beside it.


class RobustnessBound(NamedTuple):
    """Each is a number L with ‖UNet(x+δ) - UNet(x)‖ ≤ L‖δ‖ for all x and δ, the first never above the second."""

    recursion: float
    """Λ_0 of Λ_N = L_0, Λ_{i-1} = Lip(b_i) Lip(a_i) (κ_i + Λ_i): each block with its own constant."""
    product: float
    """Σ κ_i M_0^i + M_0^N L_0 with M_0 = max Lip(a_i) Lip(b_i): Theorem 3.4, corrected."""
    m0: float
    l0: float


def bound_from_constants(kappas: Sequence[float], blocks: Sequence[float], middle: float) -> RobustnessBound:
    """Theorem 3.4 from the constants Lip(a_i)·Lip(b_i), outermost first, and L_0 = Lip(f_N)."""
    if len(kappas) != len(blocks):
        raise InvalidConfigError(f"{len(kappas)} coefficients were given for {len(blocks)} pairs of blocks")
    recursion = middle
    for kappa, block in zip(reversed(kappas), reversed(blocks), strict=True):
        recursion = block * (abs(kappa) + recursion)
    m0 = max(blocks)
    product = sum(abs(kappa) * m0**i for i, kappa in enumerate(kappas, start=1)) + m0 ** len(kappas) * middle
    return RobustnessBound(recursion, product, m0, middle)


def robustness_bound(network: Equation3, input_shape: tuple[int, ...] = ()) -> RobustnessBound:
    """Theorem 3.4 for a network of known blocks. Convolutions need `input_shape`, that of x without its batch axis."""

    shape, before = tuple(input_shape), []
    encoder = []
    for a in network.encoder:
        encoder.append(lipschitz_bound(a, shape))
        shape = output_shape(a, shape) if shape else shape
        before.append(shape)
    middle = lipschitz_bound(network.middle, shape)
    decoder = [lipschitz_bound(b, shape) for b, shape in zip(network.decoder, before, strict=True)]
    return bound_from_constants(network.kappas, [a * b for a, b in zip(encoder, decoder, strict=True)], middle)


def literal_bound(
    kappas: Sequence[float], encoder: Sequence[Tensor], decoder: Sequence[Tensor], middle: float
) -> float:
    """Theorem 3.4 as printed, with M_0 = max‖b_i a_i‖, for matrices. It is not a bound; see `counterexample`."""
    m0 = max(float(torch.linalg.matrix_norm((b @ a).detach(), 2)) for a, b in zip(encoder, decoder, strict=True))
    return sum(abs(kappa) * m0**i for i, kappa in enumerate(kappas, start=1)) + m0 ** len(kappas) * middle


class Counterexample(NamedTuple):
    network: Equation3
    stated: float
    """What Theorem 3.4 allows as it is printed."""
    actual: float
    """The norm of the network, which is linear."""
    corrected: float
    """The bound with M_0 = max Lip(a_i) Lip(b_i)."""


def counterexample() -> Counterexample:
    """A network of N = 2 that Theorem 3.4's literal M_0 = max‖b_i∘a_i‖ gets wrong by a factor of 50.

    a_1 = diag(10, 0.1) and b_1 = diag(0.1, 10) undo each other, so ‖b_1 a_1‖ = 1; but what happens between them (b_2
    swaps the axes) meets the large entries of both.
    """
    matrices = {
        "a1": [[10.0, 0.0], [0.0, 0.1]],
        "b1": [[0.1, 0.0], [0.0, 10.0]],
        "a2": [[1.0, 0.0], [0.0, 1.0]],
        "b2": [[0.0, 1.0], [1.0, 0.0]],
        "f2": [[0.0, 0.0], [0.0, 0.0]],
    }
    a1, b1, a2, b2, f2 = (_matrix_block(matrix) for matrix in matrices.values())
    network = Equation3([a1, a2], f2, [b1, b2], kappas=(1.0, 1.0))
    stated = literal_bound(network.kappas, [a1.weight, a2.weight], [b1.weight, b2.weight], middle=0.0)
    whole = network(torch.eye(2, dtype=torch.float64)).detach().T
    actual = float(torch.linalg.matrix_norm(whole, 2))
    return Counterexample(network, stated, actual, robustness_bound(network).product)


def _matrix_block(matrix: list[list[float]]) -> nn.Linear:
    block = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    block.weight.data.copy_(torch.tensor(matrix, dtype=torch.float64))
    return block
