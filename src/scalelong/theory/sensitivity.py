"""How sensitive a network is in fact, measured on any model: its Jacobian, its gain of noise, its long skips.

Derivatives are exact where forward mode reaches, and central differences elsewhere. Arguments that a model takes by
name (its condition, mostly) go into `keywords`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..attaching import is_scaled, scale_skips_, unscale_, unscaled
from ..finding import ExampleInputs
from ..models import by_name, evaluating, output_tensor
from ..scaling import (
    ConstantScaling,
    FixedScaling,
    NoScaling,
    Scaling,
    SkipScaling,
    SkipSite,
    UniformScaling,
)

NOTHING: Mapping[str, Any] = MappingProxyType({})
Row = dict[str, Any]
COMPARED: Mapping[str, FixedScaling] = {"none": NoScaling(), "1/√2": UniformScaling(), "CS(0.7)": ConstantScaling(0.7)}


def jacobian_norm(
    model: nn.Module, x: Tensor, *rest: Any, steps: int = 50, keywords: Mapping[str, Any] = NOTHING
) -> float:
    """‖∂ model(x, *rest) / ∂x‖, the spectral norm at this place, by power iteration: an estimate from below.

    x is a batch of one, or the norm is that of the batch as a whole: the largest of its members.
    """
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    direction, norm = direction / direction.norm(), 0.0
    with evaluating(model), sdpa_kernel(SDPBackend.MATH):

        def function(inputs: Tensor) -> Tensor:
            return output_tensor(model(inputs, *rest, **keywords))

        # One graph serves the transposed products of all steps.
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            result = function(leaf)
        for _ in range(steps):  # v ← JᵀJv/‖JᵀJv‖
            image = _derivative(function, x, direction)
            previous, norm = norm, float(image.norm())
            back = torch.autograd.grad(result, leaf, image, retain_graph=True)[0]
            if float(back.norm()) == 0 or abs(norm - previous) <= 1e-10 * norm:
                break
            direction = back / back.norm()
    return norm


def noise_gain(
    model: nn.Module, x: Tensor, *rest: Any, sigma: float, draws: int = 8, keywords: Mapping[str, Any] = NOTHING
) -> float:
    """√(E‖model(x + σ n) - model(x)‖² / E‖σ n‖²), n normal: by how much extra input noise is amplified (Figure 3 c)."""
    generator = torch.Generator().manual_seed(0)
    moved = sent = 0.0
    with evaluating(model), torch.no_grad():
        clean = output_tensor(model(x, *rest, **keywords))
        for _ in range(draws):
            noise = sigma * torch.randn(x.shape, generator=generator).to(x)
            noisy = output_tensor(model(x + noise, *rest, **keywords))
            moved += float((noisy - clean).double().square().sum())
            sent += float(noise.double().square().sum())
    return (moved / sent) ** 0.5


def skip_sensitivities(
    model: nn.Module, *inputs: Any, scaling: FixedScaling | None = None, keywords: Mapping[str, Any] = NOTHING
) -> list[float]:
    """w_j = E‖∂out/∂κ_j‖² of each long skip, outermost first: how much the output depends on it.

    The long skips are scaled by `scaling` meanwhile (left out: not at all), and the model is left as it was. w_j is
    averaged over the batch. Costs N forwards. Eq. (3) with unit gain depends on all skips equally. Real networks do
    not, and scaling a skip with a small w_j changes little.
    """
    example = by_name(model, inputs, keywords) if keywords else inputs
    with _probing(model, scaling or NoScaling(), example) as probe, evaluating(model):

        def response(kappas: Tensor) -> Tensor:
            probe.kappas = kappas
            return output_tensor(model(*inputs, **keywords))

        point = probe.kappas
        directions = torch.eye(len(point), dtype=point.dtype, device=point.device)
        tangents = [_derivative(response, point, direction) for direction in directions]
    return [float(tangent.double().square().sum()) / len(tangent) for tangent in tangents]


def model_rows(model: nn.Module, x: Tensor, t: Tensor, sigmas: Sequence[float] = (0.05, 0.2)) -> list[Row]:
    """A real model under each method: Jacobian norm, gain of input noise (Figure 3 c), and w_j/w_1 of each skip."""
    rows = []
    for name, method in COMPARED.items():
        weights = skip_sensitivities(model, x, t, scaling=method)
        if not isinstance(method, NoScaling):
            scale_skips_(model, method, example_inputs=(x, t))
        row: Row = {"κ_i": name, "Jacobian": jacobian_norm(model, x, t)}
        row |= {f"gain σ={sigma:g}": noise_gain(model, x, t, sigma=sigma) for sigma in sigmas}
        rows.append(row | {f"w_{j}/w_1": weight / weights[0] for j, weight in enumerate(weights, start=1)})
        if not isinstance(method, NoScaling):
            unscale_(model)
    return rows


# Directional derivatives: d/ds function(point + s·direction) at s = 0


def _derivative(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    try:
        return _forward_derivative(function, point, direction)
    except RuntimeError:
        # Custom autograd functions and some fused kernels have no forward mode (NotImplementedError is a RuntimeError),
        # and that of group norm fails on tangents that are not contiguous. An error of the function itself comes again.
        return _difference_derivative(function, point, direction)


def _forward_derivative(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Exact, in one forward with dual numbers."""
    # The fused attention kernels know no forward mode; the plain one does.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        output = function(forward_ad.make_dual(point.detach(), direction.to(point)))
        tangent = forward_ad.unpack_dual(output).tangent
        return torch.zeros_like(output) if tangent is None else tangent.clone()


def _difference_derivative(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Central differences with a step relative to the point; needs nothing of the function but its values."""
    with torch.no_grad():
        # The cube root of the precision of the values balances truncation against rounding.
        precision = max(torch.finfo(point.dtype).eps, torch.finfo(function(point).dtype).eps)
        length = direction.norm().clamp(min=torch.finfo(point.dtype).tiny)
        step = float(precision ** (1 / 3) * point.norm().clamp(min=1.0) / length)
        return (function(point + step * direction) - function(point - step * direction)) / (2 * step)


# Coefficients of skips that can be differentiated


class _ProbeSkipScaling(SkipScaling):
    """Multiplies each skip by an entry of `kappas`, a tensor that a derivative can be taken with respect to."""

    kappas: Tensor

    def __init__(self, config: Scaling, sites: Sequence[SkipSite], kappas: Sequence[float]) -> None:
        super().__init__(config, sites)
        self.register_buffer("kappas", torch.tensor(kappas, dtype=torch.float64), persistent=False)

    def scale(self, skip: Tensor, index: int) -> Tensor:
        return skip * self.kappas[index - 1].to(skip.dtype)

    def coefficient(self, index: int) -> float:
        return float(self.kappas[index - 1])


@dataclass(frozen=True)
class _ProbeScaling(Scaling):
    """A constant method whose coefficients can be differentiated. For measuring; it is not a method to train with."""

    base: FixedScaling
    built: list[_ProbeSkipScaling] = field(default_factory=list, compare=False)

    name = "probe"

    def build(self, sites: Sequence[SkipSite]) -> _ProbeSkipScaling:
        self.built.append(_ProbeSkipScaling(self, sites, self.base.curve(len(sites))))
        return self.built[-1]


@contextmanager
def _probing(model: nn.Module, base: FixedScaling, inputs: ExampleInputs) -> Iterator[_ProbeSkipScaling]:
    """The model with probes on its long skips; afterwards it is as it was, scaled or not."""
    config = _ProbeScaling(base)
    with unscaled(model) if is_scaled(model) else nullcontext():
        scale_skips_(model, config, example_inputs=inputs)
        try:
            yield config.built[-1]
        finally:
            unscale_(model)
