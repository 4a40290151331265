"""Theorem 3.1: how large the hidden features of Eq. (3) are at the start.

What it tells a user: every skip adds κ_j² to the features outside of it; smaller κ_j, smaller features.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .network import Equation3, block_gain
from .table import data_frame

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


def paper_regressor(kappas: Sequence[float]) -> list[float]:
    """Σ_{j=i..N} κ_j² for i = 1 ... N: Theorem 3.1 says ‖h_i‖² ≈ c_1 ‖x‖² times this, plus c_2, for any i."""
    return [sum(kappa**2 for kappa in kappas[i:]) for i in range(len(kappas))]


class PaperFit(NamedTuple):
    c1: float
    c2: float
    r_squared: float


def fit_paper_form(kappas: Sequence[float], norms: Sequence[float]) -> PaperFit:
    """The best constants c_1 and c_2 for norms of H_1 ... H_N (relative to ‖x‖²), and how much they explain."""
    x = torch.tensor(paper_regressor(kappas), dtype=torch.float64)
    y = torch.as_tensor(norms, dtype=torch.float64)
    spread = (x - x.mean()).square().sum()
    c1 = float(((x - x.mean()) * (y - y.mean())).sum() / spread) if spread > 0 else 0.0
    c2 = float(y.mean()) - c1 * float(x.mean())
    total = float((y - y.mean()).square().sum())
    unexplained = float((y - c1 * x - c2).square().sum())
    return PaperFit(c1, c2, 1 - unexplained / total if total > 0 else 1.0)


def sample_feature_norms(
    kappas: Sequence[float],
    *,
    width: int = 128,
    layers: int = 2,
    initialisation: str = "kaiming",
    seeds: int = 300,
    copies: int = 32,
    seed: int = 0,
) -> Tensor:
    """‖H_i‖²/‖x‖² for random inputs x, averaged over the copies of each network: (seeds, N), in float64."""
    parts = []
    for network, x, _ in random_networks(
        kappas, width=width, layers=layers, initialisation=initialisation, seeds=seeds, copies=copies, seed=seed
    ):
        with torch.no_grad():
            norms = [h.double().square().sum(-1) / x.double().square().sum(-1) for h in network.features(x)]
        parts.append(torch.stack([norm.mean(-1) for norm in norms], -1))
    return torch.cat(parts)


def random_networks(
    kappas: Sequence[float],
    *,
    width: int,
    layers: int,
    initialisation: str,
    seeds: int,
    copies: int,
    seed: int,
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
    samples = sample_feature_norms(
        kappas,
        width=width,
        layers=layers,
        initialisation=initialisation,
        seeds=seeds,
        copies=copies,
        seed=seed,
    )
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
                "paper": fit.c1 * regressor + fit.c2,
                "paper_r2": fit.r_squared,
            }
            for i, regressor in enumerate(paper_regressor(kappas))
        ]
    )
