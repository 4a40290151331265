"""How large the features and gradients of Eq. (3) are at the start: Theorem 3.1 and Theorem 3.3.

What it tells a user: every skip adds κ_j² to the features outside it, and the same sum sizes the gradients. Theorem 3.3
holds for residuals that know nothing of the weights; at the true loss it gives the order of magnitude, no more.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..console import data_frame
from .network import Equation3, RandomLinear, block_gain

if TYPE_CHECKING:
    from pandas import DataFrame

# Weights of about this many numbers are drawn at a time.
CHUNK = 32_000_000


def expected_feature_norms(kappas: Sequence[float], gain: float = 1.0) -> list[float]:
    """Theorem 3.1, exact: E‖H_i‖² / ‖x‖² = Σ_{j=i..N} g^(2j-i+1) κ_j² + g^(2N-i+2), for i = 1 ... N.

    Only g = 1 gives the paper's form, with c_1 = 1 and c_2 = ‖x‖².
    """
    count = len(kappas)
    return [
        sum(gain ** (2 * j - i + 1) * kappas[j - 1] ** 2 for j in range(i, count + 1)) + gain ** (2 * count - i + 2)
        for i in range(1, count + 1)
    ]


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


class PaperFit(NamedTuple):
    c1: float
    c2: float
    r_squared: float
    fitted: list[float]


def fit_paper_form(kappas: Sequence[float], norms: Sequence[float]) -> PaperFit:
    """The paper's form of Theorem 3.1, ‖h_i‖² ≈ c_1 ‖x‖² Σ_{j=i..N} κ_j² + c_2, at its best constants.

    `norms` are those of H_1 ... H_N, relative to ‖x‖².
    """
    x = torch.tensor([sum(kappa**2 for kappa in kappas[i:]) for i in range(len(kappas))], dtype=torch.float64)
    y = torch.as_tensor(norms, dtype=torch.float64)
    spread = (x - x.mean()).square().sum()
    c1 = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread > 0 else 0.0
    c2 = float(y.mean()) - c1 * float(x.mean())
    total = float((y - y.mean()).square().sum())
    unexplained = float((y - c1 * x - c2).square().sum())
    return PaperFit(c1, c2, 1 - unexplained / total if total > 0 else 1.0, (c1 * x + c2).tolist())


def _random_networks(
    kappas: Sequence[float], width: int, layers: int, initialisation: str, seeds: int, copies: int, seed: int
) -> Iterator[tuple[Equation3, Tensor, Tensor]]:
    """Ensembles of Eq. (3) networks, as many at a time as fit into memory, each with random inputs and targets, both
    (seeds, copies, m)."""
    generator = torch.Generator().manual_seed(seed)
    per_network = (2 * len(kappas) + 1) * layers * width**2
    at_once = max(1, min(seeds, CHUNK // per_network))
    for start in range(0, seeds, at_once):
        ensemble = (min(at_once, seeds - start), copies)
        network = Equation3.random(
            kappas, width=width, layers=layers, initialisation=initialisation, ensemble=ensemble, generator=generator
        )
        x, target = torch.randn(2, *ensemble, width, generator=generator)
        yield network, x, target


def check_features(
    kappas: Sequence[float],
    *,
    width: int = 128,
    layers: int = 2,
    initialisation: str = "kaiming",
    seeds: int = 300,
    copies: int = 16,
    seed: int = 0,
) -> "DataFrame":
    """Theorem 3.1 against measurement, one row per H_i, in units of ‖x‖²: the exact theory, the measured mean, their
    ratio and its standard error, and the paper's form at its best constants c_1 and c_2, with its R²."""
    parts = []
    for network, x, _ in _random_networks(kappas, width, layers, initialisation, seeds, copies, seed):
        with torch.no_grad():
            norms = [_squared(h) / _squared(x) for h in network.features(x)]
        parts.append(torch.stack([norm.mean(-1) for norm in norms], -1))
    samples = torch.cat(parts)  # (seeds, N), averaged over the copies of each network
    theory = expected_feature_norms(kappas, block_gain(initialisation))
    measured = samples.mean(0).tolist()
    errors = (samples.std(0) / len(samples) ** 0.5).tolist()
    fit = fit_paper_form(kappas, measured)
    return data_frame(
        [
            {
                "i": i + 1,
                "theory": theory[i],
                "measured": measured[i],
                "ratio": measured[i] / theory[i],
                "standard_error": errors[i] / theory[i],
                "paper": fit.fitted[i],
                "paper_r2": fit.r_squared,
            }
            for i in range(len(kappas))
        ]
    )


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
    for network, x, target in _random_networks(kappas, width, layers, initialisation, seeds, copies, seed):
        for key, norms in _gradient_norms(network, x, target, true_loss).items():
            samples.setdefault(key, []).append(norms)
    gain = block_gain(initialisation)
    theory = expected_gradient_norms(kappas, gain)
    rows = []
    for (kind, i, p), parts in samples.items():
        measured = torch.cat(parts)
        expected = theory[i - 1] / (gain if p == layers else 2.0)
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
    passed: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
    handles = []
    for kind, blocks in (("a", network.encoder), ("b", network.decoder)):
        for i, block in enumerate(blocks, start=1):
            matrices = [module for module in block.modules() if isinstance(module, RandomLinear)]
            for p, matrix in enumerate(matrices, start=1):

                def remember(_: Any, inputs: tuple[Tensor, ...], output: Tensor, name: Any = (kind, i, p)) -> None:
                    passed[name] = (inputs[0].detach(), output)

                handles.append(matrix.register_forward_hook(remember))
    output = network(x)
    for handle in handles:
        handle.remove()
    residual = output.detach() - target if true_loss else target
    deltas = torch.autograd.grad(output, [leaving for _, leaving in passed.values()], residual)
    scale = _squared(residual).mean() * _squared(x)
    return {
        name: (_squared(delta) * _squared(entering) / scale).mean(-1)
        for (name, (entering, _)), delta in zip(passed.items(), deltas, strict=True)
    }


def _squared(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum(-1)
