"""The network that the paper analyses, Eq. (3), for any blocks; and its random blocks, many seeds at a time.

UNet(x) = f_0(x),   f_i(x) = b_{i+1} ∘ [ κ_{i+1} · a_{i+1}∘x + f_{i+1}(a_{i+1}∘x) ],   f_N the middle block      (3)
"""

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError

GAINS = {"kaiming": 2.0, "unit": 1.0}


def block_gain(initialisation: str) -> float:
    """g in E‖a(x)‖² = g‖x‖² of a random block: 2 for Kaiming's N(0, 2/m), 1 where the last matrix is N(0, 1/m)."""
    if initialisation not in GAINS:
        raise InvalidConfigError(f"initialisation must be one of {', '.join(GAINS)}, got {initialisation!r}")
    return GAINS[initialisation]


class RandomLinear(nn.Module):
    """x ↦ W x with W_ij ~ N(0, variance): one matrix for x of (batch, m), or `seeds` matrices for (seeds, copies, m).

    With `seeds`, each of the copies flips the signs of the columns of W at random. That leaves N(0, variance) as it is,
    so every copy is a random matrix of its own right: many networks for the price of one.
    """

    signs: Tensor | None

    def __init__(
        self,
        width: int,
        variance: float,
        ensemble: tuple[int, int] | None,
        generator: torch.Generator | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        shape = (width, width) if ensemble is None else (ensemble[0], width, width)
        self.variance = variance
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype).mul_(variance**0.5))
        signs = None
        if ensemble is not None:
            signs = torch.randint(0, 2, (*ensemble, width), generator=generator).to(dtype).mul_(2).sub_(1)
        self.register_buffer("signs", signs)

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.signs is None else x * self.signs) @ self.weight.mT


def random_block(
    width: int,
    layers: int,
    initialisation: str,
    ensemble: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """W_l ReLU(W_{l-1} ... ReLU(W_1 x)), no ReLU after the last. `ensemble` = (seeds, copies)."""
    variances = [2 / width] * (layers - 1) + [block_gain(initialisation) / width]
    modules: list[nn.Module] = []
    for variance in variances:
        modules += [RandomLinear(width, variance, ensemble, generator, dtype), nn.ReLU()]
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
        ensemble: tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Theorem 3.1's network: blocks of `layers` matrices, Kaiming or unit gain; `ensemble` = (seeds, copies)."""
        if not all(math.isfinite(kappa) for kappa in kappas) or width < 1 or layers < 1:
            raise InvalidConfigError(
                f"coefficients must be finite, width and layers at least 1, got {tuple(kappas)}, {width} and {layers}"
            )

        def block() -> nn.Sequential:
            return random_block(width, layers, initialisation, ensemble, generator, dtype)

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
