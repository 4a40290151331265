"""The network that the paper analyses, Eq. (3), and its theorems, in a form that can be run and checked.

    UNet(x) = f_0(x),   f_i(x) = b_{i+1} ∘ [ κ_{i+1} · a_{i+1}∘x + f_{i+1}(a_{i+1}∘x) ],   f_N the middle block      (3)

Theorem 3.1 and 3.3, how large features and gradients are at the start: every skip adds κ_j² to the features outside it,
and the same sum sizes the gradients. Theorem 3.3 holds for residuals that know nothing of the weights; at the true loss
it gives the order of magnitude. Theorem 3.4, how far a perturbation of the input can move the output: the bound always
holds and is loose, so read the measured `jacobian_norm` next to it. As printed, with M_0 = max‖b_i∘a_i‖, it is false;
see `counterexample`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, UnsupportedModelError
from ..scaling import ConstantScaling
from .sensitivity import COMPARED, Row, jacobian_norm, noise_gain

GAINS = {"kaiming": 2.0, "unit": 1.0}


def block_gain(initialisation: str) -> float:
    """g in E‖a(x)‖² = g‖x‖² of a random block: 2 for Kaiming's N(0, 2/m), 1 where the last matrix is N(0, 1/m)."""
    if initialisation not in GAINS:
        raise InvalidConfigError(f"initialisation must be one of {', '.join(GAINS)}, got {initialisation!r}")
    return GAINS[initialisation]


INPUTS = 32
"""Inputs of each network where many are drawn at once."""


class RandomLinear(nn.Module):
    """x ↦ W x with W_ij ~ N(0, variance): one matrix for x of (batch, m), or `count` of them for (count, INPUTS, m).

    With `count`, the columns of W are flipped at random for each input. That leaves N(0, variance) as it is, so every
    input sees a random matrix of its own: many networks for the price of one.
    """

    signs: Tensor | None

    def __init__(
        self, width: int, variance: float, count: int | None, generator: torch.Generator | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        shape = (width, width) if count is None else (count, width, width)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).mul_(variance**0.5))
        signs = None if count is None else torch.randint(0, 2, (count, INPUTS, width), generator=generator)
        self.register_buffer("signs", None if signs is None else signs.to(dtype).mul_(2).sub_(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.signs is None else x * self.signs) @ self.weight.mT


def random_block(
    width: int,
    layers: int,
    initialisation: str,
    count: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """W_l ReLU(W_{l-1} ... ReLU(W_1 x)), no ReLU after the last; `count` blocks at once."""
    variances = [2 / width] * (layers - 1) + [block_gain(initialisation) / width]
    modules: list[nn.Module] = []
    for variance in variances:
        modules += [RandomLinear(width, variance, count, generator, dtype), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


class Equation3(nn.Module):
    """Eq. (3) with N encoder blocks a_i, N decoder blocks b_i (both outermost first), a middle block f_N, and κ_i."""

    def __init__(
        self, encoder: Sequence[nn.Module], middle: nn.Module, decoder: Sequence[nn.Module], kappas: Sequence[float]
    ) -> None:
        super().__init__()
        if not len(encoder) == len(decoder) == len(kappas) >= 1:
            raise InvalidConfigError(
                f"Eq. (3) needs as many encoder blocks as decoder blocks and coefficients, at least one of each; "
                f"got {len(encoder)}, {len(decoder)} and {len(kappas)}"
            )
        self.encoder, self.middle, self.decoder = nn.ModuleList(encoder), middle, nn.ModuleList(decoder)
        self.kappas = tuple(float(kappa) for kappa in kappas)

    @classmethod
    def random(
        cls,
        kappas: Sequence[float],
        *,
        width: int,
        layers: int = 2,
        initialisation: str = "kaiming",
        count: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Theorem 3.1's network: blocks of `layers` matrices, Kaiming or unit gain; `count` networks at once."""

        def block() -> nn.Sequential:
            return random_block(width, layers, initialisation, count, generator, dtype)

        return cls([block() for _ in kappas], block(), [block() for _ in kappas], kappas)

    def features(self, x: Tensor) -> list[Tensor]:
        """H_1 ... H_N, where H_i is the output of b_i. H_1 is the output of the network."""
        skips = []
        for a in self.encoder:
            x = a(x)
            skips.append(x)
        x = self.middle(x)
        outputs = []
        for b, kappa, skip in reversed(list(zip(self.decoder, self.kappas, skips, strict=True))):
            x = b(kappa * skip + x)
            outputs.append(x)
        return outputs[::-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)[0]


# Theorems 3.1 and 3.3

CHUNK = 32_000_000
"""Weights of about this many numbers are drawn at a time."""


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


def check_features(
    kappas: Sequence[float],
    *,
    width: int = 128,
    layers: int = 2,
    initialisation: str = "kaiming",
    seeds: int = 300,
    seed: int = 0,
) -> list[Row]:
    """Theorem 3.1 against measurement, one row per H_i, in units of ‖x‖²: the exact theory, the measured mean over
    `seeds` networks, their ratio and its standard error."""
    parts = []
    for network, x, _ in _random_networks(kappas, width, layers, initialisation, seeds, seed):
        with torch.no_grad():
            parts.append(torch.stack([(_squared(h) / _squared(x)).mean(-1) for h in network.features(x)], -1))
    theory = expected_feature_norms(kappas, block_gain(initialisation))
    return [{"i": i} | _against(theory[i - 1], torch.cat(parts)[:, i - 1]) for i in range(1, len(kappas) + 1)]


def check_gradients(
    kappas: Sequence[float],
    *,
    width: int = 128,
    layers: int = 2,
    initialisation: str = "kaiming",
    seeds: int = 100,
    seed: int = 0,
    true_loss: bool = False,
) -> list[Row]:
    """Theorem 3.3 against measurement, one row per matrix: E‖∇W‖²/(R‖x‖²), theory, measured, ratio and standard error.

    The residual is random and independent; with `true_loss` it is that of ½‖ε - UNet(x)‖² for a random ε, and R its
    mean square, which is where the theorem is used and where it is an order of magnitude only.
    """
    samples: dict[tuple[str, int, int], list[Tensor]] = {}
    for network, x, target in _random_networks(kappas, width, layers, initialisation, seeds, seed):
        for key, norms in _gradient_norms(network, x, target, true_loss).items():
            samples.setdefault(key, []).append(norms)
    gain = block_gain(initialisation)
    theory = expected_gradient_norms(kappas, gain)
    rows = []
    for (kind, i, p), parts in samples.items():
        expected = theory[i - 1] / (gain if p == layers else 2.0)
        rows.append({"block": f"{kind}_{i}", "matrix": p} | _against(expected, torch.cat(parts)))
    return rows


def _random_networks(
    kappas: Sequence[float], width: int, layers: int, initialisation: str, seeds: int, seed: int
) -> Iterator[tuple[Equation3, Tensor, Tensor]]:
    """Networks of Eq. (3), as many at a time as fit into memory; inputs and targets are (networks, inputs, m)."""
    generator = torch.Generator().manual_seed(seed)
    at_once = max(1, CHUNK // ((2 * len(kappas) + 1) * layers * width**2))
    for start in range(0, seeds, at_once):
        count = min(at_once, seeds - start)
        network = Equation3.random(
            kappas, width=width, layers=layers, initialisation=initialisation, count=count, generator=generator
        )
        x, target = torch.randn(2, count, INPUTS, width, generator=generator)
        yield network, x, target


def _against(theory: float, samples: Tensor) -> Row:
    """Theory and the mean of one sample per network."""
    measured, error = float(samples.mean()), float(samples.std()) / len(samples) ** 0.5
    ratio = {"ratio": measured / theory, "standard_error": error / theory}
    return {"theory": theory, "measured": measured, **ratio}


def _gradient_norms(
    network: Equation3, x: Tensor, target: Tensor, true_loss: bool
) -> dict[tuple[str, int, int], Tensor]:
    """‖∇W‖²/(R‖x‖²) of every matrix, averaged over the inputs of each network: (networks,) each.

    The gradient of one input is δ hᵀ, with h what enters the matrix and δ the derivative by what leaves it, so its norm
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


# N, m, l, κ
FEATURE_SETTINGS = ((4, 128, 2, 1.0), (4, 128, 2, 0.7), (4, 128, 2, 0.5), (3, 256, 3, 0.9), (8, 128, 1, 1.0))
GRADIENT_SETTINGS = ((4, 128, 2, 1.0), (4, 128, 2, 0.7), (3, 128, 1, 0.9))


def _networks(settings: Sequence[tuple[int, int, int, float]]) -> Iterator[tuple[Row, list[float], dict[str, Any]]]:
    """The first columns of a table, the coefficients, and what a check takes besides."""
    for count, width, layers, kappa in settings:
        for initialisation in GAINS:
            row: Row = {"N": count, "m": width, "l": layers, "κ": kappa, "init": initialisation}
            options = {"width": width, "layers": layers, "initialisation": initialisation}
            yield row, list(ConstantScaling(kappa).curve(count)), options


def feature_rows(seeds: int = 300) -> list[Row]:
    """Theorem 3.1: measured over exact theory for the H_i that fits worst."""
    rows = []
    for row, kappas, options in _networks(FEATURE_SETTINGS):
        table = check_features(kappas, **options, seeds=seeds)
        row |= {"theory H_1": table[0]["theory"], "measured H_1": table[0]["measured"]}
        row["worst ratio"] = round(max((entry["ratio"] for entry in table), key=lambda ratio: abs(ratio - 1)), 4)
        rows.append(row | {"std. error": round(max(entry["standard_error"] for entry in table), 4)})
    return rows


def gradient_rows(seeds: int = 300) -> list[Row]:
    """Theorem 3.3: smallest and largest ratio over all matrices, for independent residuals and at the true loss."""
    rows = []
    for row, kappas, options in _networks(GRADIENT_SETTINGS):
        for name, true_loss in (("independent", False), ("true loss", True)):
            table = check_gradients(kappas, **options, seeds=seeds, true_loss=true_loss)
            ratios = [entry["ratio"] for entry in table]
            row[name] = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(row)
    return rows


# Theorem 3.4

ROUNDING = 1 + 1e-9
"""Above the rounding of a singular value decomposition in float64."""
SLOPES: dict[type[nn.Module], float] = {nn.Identity: 1.0, nn.ReLU: 1.0, nn.Tanh: 1.0, nn.SiLU: 1.1, nn.GELU: 1.13}
"""The largest slope of each activation, rounded up."""


def lipschitz_bound(module: nn.Module) -> float:
    """A number L with ‖module(x) - module(y)‖ ≤ L‖x - y‖ for all x, y: of linear layers, activations, nn.Sequential.

    A module without a proven bound raises UnsupportedModelError, because a guess is not a bound.
    """
    # The exact type, because a subclass may compute anything, and no hooks, because they may change anything.
    kind, weight = type(module), getattr(module, "weight", None)
    if not (module._forward_hooks or module._forward_pre_hooks):
        if kind in SLOPES:
            return SLOPES[kind]
        if kind in (nn.Linear, RandomLinear) and isinstance(weight, Tensor) and weight.dim() == 2:
            return float(torch.linalg.matrix_norm(weight.detach().double(), 2)) * ROUNDING
        if kind is nn.Sequential:
            return math.prod(lipschitz_bound(part) for part in module.children())
    raise UnsupportedModelError(
        f"no Lipschitz bound is known for this {kind.__name__}: known are linear layers, common activations and "
        f"nn.Sequential of these, one network at a time and without hooks (attention has none, it is not Lipschitz). "
        f"Measure with scalelong.theory.jacobian_norm"
    )


class RobustnessBound(NamedTuple):
    """Each is a number L with ‖UNet(x+δ) - UNet(x)‖ ≤ L‖δ‖ for all x and δ, the first never above the second."""

    recursion: float
    """Λ_0 of Λ_N = L_0, Λ_{i-1} = Lip(b_i) Lip(a_i) (κ_i + Λ_i): each block with its own constant."""
    product: float
    """Σ κ_i M_0^i + M_0^N L_0 with M_0 = max Lip(a_i) Lip(b_i): Theorem 3.4, corrected."""


def robustness_bound(network: Equation3) -> RobustnessBound:
    """Theorem 3.4 for a network of known blocks."""
    blocks = [lipschitz_bound(a) * lipschitz_bound(b) for a, b in zip(network.encoder, network.decoder, strict=True)]
    middle = recursion = lipschitz_bound(network.middle)
    for kappa, block in zip(reversed(network.kappas), reversed(blocks), strict=True):
        recursion = block * (abs(kappa) + recursion)
    return RobustnessBound(recursion, _product(network.kappas, max(blocks), middle))


def _product(kappas: Sequence[float], m0: float, middle: float) -> float:
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


def robustness_rows(sizes: Sequence[tuple[int, int]] = ((3, 1), (6, 2)), width: int = 64, seed: int = 0) -> list[Row]:
    """Theorem 3.4: both bounds, the measured Jacobian norm (largest of 8 places) and the gain of noise."""
    rows = []
    for count, layers in sizes:
        for name, method in COMPARED.items():
            network = Equation3.random(
                method.curve(count),
                width=width,
                layers=layers,
                generator=torch.Generator().manual_seed(seed),
                dtype=torch.float64,
            )
            x = torch.randn(8, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
            bound, measured = robustness_bound(network), jacobian_norm(network, x)
            rows.append(
                {
                    "N": count,
                    "l": layers,
                    "κ_i": name,
                    "product bound": bound.product,
                    "recursion": bound.recursion,
                    "measured": measured,
                    "bound/measured": bound.product / measured,
                    "noise gain": noise_gain(network, x, sigma=0.1),
                }
            )
    return rows
