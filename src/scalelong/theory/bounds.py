"""Theorem 3.4: how far a perturbation of the input can move the output of Eq. (3).

The bound holds always and is loose, by orders of magnitude for deep networks: read the measured Jacobian norm next to
it (`jacobian_norm`). As printed, with M_0 = max‖b_i∘a_i‖, the theorem is false; see `counterexample`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, NoBoundError
from .network import Equation3, RandomLinear

# Above the rounding of a singular value decomposition in float64.
ROUNDING = 1 + 1e-9


def lipschitz_bound(module: nn.Module) -> float:
    """A number L with ‖module(x) - module(y)‖ ≤ L‖x - y‖ for all x, y, in eval mode.

    A module without a proven bound raises NoBoundError, because a guess is not a bound.
    """
    # The exact type, because a subclass may compute anything, and no hooks, because they may change anything.
    bound = BOUNDS.get(type(module))
    if bound is None:
        raise NoBoundError(
            f"no Lipschitz bound is known for {type(module).__name__}. Known are linear layers, common activations and "
            f"nn.Sequential of these; add yours to scalelong.theory.bounds.BOUNDS. (Attention has none: it is not "
            f"Lipschitz.) Or measure with scalelong.theory.jacobian_norm"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoBoundError(f"this {type(module).__name__} has forward hooks, which may do anything to its values")
    return bound(module)


def _linear(module: nn.Linear | RandomLinear) -> float:
    weight = module.weight.detach()
    if weight.dim() != 2:
        raise NoBoundError("an ensemble of random networks has no single bound; build one network, with ensemble=None")
    return float(torch.linalg.matrix_norm(weight.double(), 2)) * ROUNDING


def _chain(module: nn.Sequential) -> float:
    bound = 1.0
    for part in module:
        bound *= lipschitz_bound(part)
    return bound


def _constant(value: float) -> Callable[[Any], float]:
    return lambda _: value


BOUNDS: dict[type[nn.Module], Callable[[Any], float]] = {
    nn.Linear: _linear,
    RandomLinear: _linear,
    nn.Sequential: _chain,
    Equation3: lambda module: robustness_bound(module).recursion,
    nn.LeakyReLU: lambda module: max(1.0, abs(module.negative_slope)),
    # Dropout is the identity in eval mode.
    **dict.fromkeys((nn.Identity, nn.Flatten, nn.Dropout, nn.ReLU, nn.Tanh), _constant(1.0)),
    # The largest slopes of the other activations, rounded up.
    nn.Sigmoid: _constant(0.25),
    nn.SiLU: _constant(1.1),
    nn.GELU: _constant(1.13),
}
"""The rule for each type of module: add your own to cover a module that you know the constant of."""


class RobustnessBound(NamedTuple):
    """Each is a number L with ‖UNet(x+δ) - UNet(x)‖ ≤ L‖δ‖ for all x and δ, the first never above the second."""

    recursion: float
    """Λ_0 of Λ_N = L_0, Λ_{i-1} = Lip(b_i) Lip(a_i) (κ_i + Λ_i): each block with its own constant."""
    product: float
    """Σ κ_i M_0^i + M_0^N L_0 with M_0 = max Lip(a_i) Lip(b_i): Theorem 3.4, corrected."""


def bound_from_constants(kappas: Sequence[float], blocks: Sequence[float], middle: float) -> RobustnessBound:
    """Theorem 3.4 from the constants Lip(a_i)·Lip(b_i), outermost first, and L_0 = Lip(f_N)."""
    if len(kappas) != len(blocks):
        raise InvalidConfigError(f"{len(kappas)} coefficients were given for {len(blocks)} pairs of blocks")
    recursion = middle
    for kappa, block in zip(reversed(kappas), reversed(blocks), strict=True):
        recursion = block * (abs(kappa) + recursion)
    return RobustnessBound(recursion, _product(kappas, max(blocks), middle))


def _product(kappas: Sequence[float], m0: float, middle: float) -> float:
    return sum(abs(kappa) * m0**i for i, kappa in enumerate(kappas, start=1)) + m0 ** len(kappas) * middle


def robustness_bound(network: Equation3) -> RobustnessBound:
    """Theorem 3.4 for a network of known blocks."""
    blocks = [lipschitz_bound(a) * lipschitz_bound(b) for a, b in zip(network.encoder, network.decoder, strict=True)]
    return bound_from_constants(network.kappas, blocks, lipschitz_bound(network.middle))


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
    a1, b1 = torch.diag(torch.tensor([10.0, 0.1])), torch.diag(torch.tensor([0.1, 10.0]))
    a2, b2 = torch.eye(2), torch.eye(2).flip(0)
    network = Equation3([_layer(a1), _layer(a2)], _layer(torch.zeros(2, 2)), [_layer(b1), _layer(b2)], (1.0, 1.0))
    literal_m0 = max(float(torch.linalg.matrix_norm(b @ a, 2)) for a, b in ((a1, b1), (a2, b2)))
    whole = network(torch.eye(2, dtype=torch.float64)).detach().T
    actual = float(torch.linalg.matrix_norm(whole, 2))
    return Counterexample(network, _product(network.kappas, literal_m0, 0.0), actual, robustness_bound(network).product)


def _layer(matrix: Tensor) -> nn.Linear:
    layer = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    layer.weight.data.copy_(matrix)
    return layer
