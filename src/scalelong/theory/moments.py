"""The input of a diffusion network: how large x_t is, and how large the noise is beside it (Lemma 3.2, Figure 3 a, b).

What it tells a user: the target of the network is ε, its input is x_t, so ‖ε‖²/‖x_t‖² is what an Eq. (3) network
must amplify by; Section 4.1 chooses κ from it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..console import data_frame
from ..errors import InvalidConfigError
from ..noise import alpha_bars, mix
from .network import Equation3, RandomLinear, block_gain

if TYPE_CHECKING:
    from pandas import DataFrame


# s of the uniform distribution on [-1, 1], which the paper assumes.
PAPER_SECOND_MOMENT = 1 / 3
SEED_OFFSET = 2_718_281_828


def second_moment(images: Tensor) -> float:
    """s = E[x_0²] per dimension, of images scaled as the network sees them (usually [-1, 1])."""
    return float(image_moments(images).mean())


def image_moments(images: Tensor) -> Tensor:
    """s of each image, in float64."""
    if images.dim() < 2 or images.numel() == 0:
        raise InvalidConfigError(f"images must be a tensor (n, ...) with at least one image, got {tuple(images.shape)}")
    if not images.is_floating_point():
        raise InvalidConfigError(
            f"images must be floating-point, scaled as the network sees them (usually to [-1, 1]), got {images.dtype}"
        )
    return torch.cat([part.double().square().flatten(1).mean(1) for part in images.split(1024)])


def expected_input_norm(dimension: int, schedule: Any = "ddpm", s: float = PAPER_SECOND_MOMENT) -> float:
    """Lemma 3.2 in general form: E‖x_t‖² = m [1 - (1 - s) E_t ᾱ_t], exact for any data and schedule.

    s = 1/3 is the paper's Eq. (5): m (1 - 2 E_t ᾱ_t / 3).
    """
    return dimension * (1 - (1 - s) * float(alpha_bars(schedule).mean()))


class NoisyBatch(NamedTuple):
    inputs: Tensor
    steps: Tensor
    noise: Tensor


def noisy_batch(images: Tensor, schedule: Any = "ddpm", seed: int = 0) -> NoisyBatch:
    """x_t of every image at a random time (Eq. 1), with the time steps 0, 1, ... and the noise ε."""
    # Far from the seeds that people draw data with: times must not follow the images.
    generator = torch.Generator().manual_seed(SEED_OFFSET + seed)
    bars = alpha_bars(schedule).to(images)
    steps = torch.randint(len(bars), (len(images),), generator=generator).to(images.device)
    noise = torch.randn(images.shape, generator=generator).to(images)
    alpha_bar = bars[steps]
    return NoisyBatch(mix(images, noise, alpha_bar.sqrt(), (1 - alpha_bar).sqrt()), steps, noise)


class InputStatistics(NamedTuple):
    """One entry per sampled (image, time)."""

    norm: Tensor
    """‖x_t‖² / m, Figure 3 a."""
    ratio: Tensor
    """‖ε‖² / ‖x_t‖², Figure 3 b."""


def sampled_statistics(images: Tensor, schedule: Any = "ddpm", draws: int = 8, seed: int = 0) -> InputStatistics:
    """Figure 3 a and b as they are defined: `draws` times and noises for every image."""
    batches = [noisy_batch(images, schedule, seed + draw) for draw in range(draws)]
    norm = torch.cat([image_moments(batch.inputs) for batch in batches])
    noise = torch.cat([image_moments(batch.noise) for batch in batches])
    return InputStatistics(norm, noise / norm)


def fast_statistics(images: Tensor, schedule: Any = "ddpm") -> InputStatistics:
    """The same without noise: ‖x_t‖²/m ≈ 1 - (1 - s_image) ᾱ_t and ‖ε‖²/‖x_t‖² ≈ its inverse, for every image and time.

    Both norms concentrate for many dimensions, so this is accurate where m is in the hundreds. Needs only the moments.
    """
    norm = 1 - (1 - image_moments(images)[:, None]) * alpha_bars(schedule)[None, :]
    norm = norm.flatten()
    return InputStatistics(norm, 1 / norm)


# Theorem 3.1: how large the hidden features of Eq. (3) are at the start.
#
# What it tells a user: every skip adds κ_j² to the features outside it; smaller κ_j, smaller features.

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


# Theorem 3.3: how large the gradients of Eq. (3)'s matrices are at the start.
#
# What it tells a user: the same Σ κ_j² that sizes the features sizes the gradients. It holds for residuals that know
# nothing of the weights; at the true loss it gives the order of magnitude, no more.

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
