"""How sensitive a network is in fact: the norm of its Jacobian, and its response to noise on the input (Figure 3 c).

What it tells a user: what the bounds of Theorem 3.4 only limit. Works for any model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .derivative import directional_derivative
from .spectral import power_iteration

Output = Callable[[Any], Tensor]


def as_tensor(result: Any, output: Output | None = None) -> Tensor:
    """The output as a tensor: a tensor as it is, of diffusers' outputs the sample, of a tuple the first entry."""
    if output is not None:
        return output(result)
    return result if isinstance(result, Tensor) else getattr(result, "sample", result[0])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and a forked random state within the block; afterwards every module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, training in modes:
            module.training = training


def jacobian_norm(
    model: nn.Module, x: Tensor, *rest: Any, steps: int = 50, seed: int = 0, output: Output | None = None
) -> float:
    """‖∂ model(x, *rest) / ∂x‖, the spectral norm at this place, by power iteration: an estimate from below.

    x is a batch of one, or the norm is that of the batch as a whole: the largest of its members.
    """
    start = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
    with evaluating(model), sdpa_kernel(SDPBackend.MATH):

        def function(inputs: Tensor) -> Tensor:
            return as_tensor(model(inputs, *rest), output)

        # One graph serves the transposed products of all steps.
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            result = function(leaf)

        def transposed(image: Tensor) -> Tensor:
            return torch.autograd.grad(result, leaf, image, retain_graph=True)[0]

        return power_iteration(lambda v: directional_derivative(function, x, v), transposed, start, steps)


def noise_gain(
    model: nn.Module, x: Tensor, *rest: Any, sigma: float, draws: int = 8, seed: int = 0, output: Output | None = None
) -> float:
    """√(E‖model(x + σ n) - model(x)‖² / E‖σ n‖²), n normal: by how much extra input noise is amplified (Figure 3 c)."""
    generator = torch.Generator().manual_seed(seed)
    moved = sent = 0.0
    with evaluating(model), torch.no_grad():
        clean = as_tensor(model(x, *rest), output)
        for _ in range(draws):
            noise = sigma * torch.randn(x.shape, generator=generator).to(x)
            moved += float((as_tensor(model(x + noise, *rest), output) - clean).double().square().sum())
            sent += float(noise.double().square().sum())
    return (moved / sent) ** 0.5
