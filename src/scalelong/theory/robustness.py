"""Theorem 3.4: how far a perturbation of the input can move the output of Eq. (3).

What it tells a user: the bound falls with κ, most for CS, whose small coefficients meet the large powers of M_0. It
holds always and is loose (by orders of magnitude for deep networks), so read the measured Jacobian norm beside it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError
from .network import Equation3


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
    from .lipschitz import lipschitz_bound, output_shape

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
