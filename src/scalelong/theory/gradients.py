"""Theorem 3.3: how large the gradients of Eq. (3)'s matrices are at the start.

What it tells a user: the same Σ κ_j² that sizes the features sizes the gradients. It holds for residuals that know
nothing of the weights; at the true loss it gives the order of magnitude, no more.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .features import random_networks
from .network import Equation3, RandomLinear, block_gain
from .table import data_frame

if TYPE_CHECKING:
    from pandas import DataFrame

BLOCKS = ("a", "b")


def expected_gradient_norms(kappas: Sequence[float], gain: float = 1.0) -> list[float]:
    """E‖∇W‖² · m Var(W) / (R ‖x‖²) = Σ_{j=i..N} g^(2j) κ_j² + g^(2N+1), for every matrix W of a_i and b_i, i = 1 ... N.

    R is the squared norm of a residual that is independent of the weights. m Var(W) is 2 for Kaiming's matrices (so the
    factor is 1/g there) and 1 for the last matrix of a unit-gain block.
    """
    count = len(kappas)
    return [
        sum(gain ** (2 * j) * kappas[j - 1] ** 2 for j in range(i, count + 1)) + gain ** (2 * count + 1)
        for i in range(1, count + 1)
    ]


def check_gradients(
    kappas: Sequence[float],
    *,
    width: int = 128,
    layers: int = 2,
    initialisation: str = "kaiming",
    seeds: int = 100,
    copies: int = 32,
    seed: int = 0,
    true_loss: bool = False,
) -> "DataFrame":
    """Theorem 3.3 against measurement, one row per matrix: E‖∇W‖²/(R‖x‖²), theory, measured, ratio and standard error.

    The residual is random and independent; with `true_loss` it is that of ½‖ε - UNet(x)‖² for a random ε, and R its
    mean square, which is where the theorem is used and where it is an order of magnitude only.
    """
    samples: dict[tuple[str, int, int], list[Tensor]] = {}
    for network, x, target in random_networks(
        kappas, width=width, layers=layers, initialisation=initialisation, seeds=seeds, copies=copies, seed=seed
    ):
        for key, norms in _gradient_norms(network, x, target, true_loss).items():
            samples.setdefault(key, []).append(norms)
    theory = expected_gradient_norms(kappas, block_gain(initialisation))
    last = block_gain(initialisation)
    rows = []
    for (kind, i, p), parts in samples.items():
        measured = torch.cat(parts)
        expected = theory[i - 1] / (last if p == layers else 2.0)
        mean = float(measured.mean())
        rows.append(
            {
                "block": f"{kind}_{i}",
                "matrix": p,
                "theory": expected,
                "measured": mean,
                "ratio": mean / expected,
                "standard_error": float(measured.std()) / len(measured) ** 0.5 / expected,
            }
        )
    return data_frame(rows)


def _gradient_norms(
    network: Equation3, x: Tensor, target: Tensor, true_loss: bool
) -> dict[tuple[str, int, int], Tensor]:
    """‖∇W‖²/(R‖x‖²) of every matrix, averaged over the copies of each network: (seeds,) each.

    The gradient of one copy is δ hᵀ, with h what enters the matrix and δ the derivative by what leaves it, so its norm
    is ‖δ‖‖h‖ and no gradient is ever stored.
    """
    entering: list[Tensor] = []
    leaving: list[Tensor] = []
    names: list[tuple[str, int, int]] = []
    handles = []
    for kind, blocks in zip(BLOCKS, (network.encoder, network.decoder), strict=True):
        for i, block in enumerate(blocks, start=1):
            matrices = [module for module in block.modules() if isinstance(module, RandomLinear)]
            for p, matrix in enumerate(matrices, start=1):

                def remember(_: Any, inputs: tuple[Tensor, ...], output: Tensor, name: Any = (kind, i, p)) -> None:
                    names.append(name)
                    entering.append(inputs[0].detach())
                    leaving.append(output)

                handles.append(matrix.register_forward_hook(remember))
    output = network(x)
    for handle in handles:
        handle.remove()
    residual = output.detach() - target if true_loss else target
    deltas = torch.autograd.grad(output, leaving, residual)

    def squared(tensor: Tensor) -> Tensor:
        return tensor.double().square().sum(-1)

    scale = squared(residual).mean() * squared(x)
    return {
        name: (squared(delta) * squared(h) / scale).mean(-1)
        for name, h, delta in zip(names, entering, deltas, strict=True)
    }
