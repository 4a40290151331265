"""Upper bounds of the Lipschitz constants of blocks: linear layers, convolutions, activations, norms, chains of them.

What it tells a user: no perturbation of a block's input can grow by more. A module without a proven bound raises
NoBoundError, because a guess is not a bound.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ScaleLongError
from .network import Equation3, RandomLinear
from .spectral import convolution_bound, linear_bound

Shape = tuple[int, ...]


class NoBoundError(ScaleLongError, ValueError):
    """No Lipschitz bound is known for a module."""


def lipschitz_bound(module: nn.Module, input_shape: Shape = ()) -> float:
    """A number L with ‖module(x) - module(y)‖ ≤ L‖x - y‖ for all x, y, in eval mode.

    `input_shape` is that of one input without its batch axis; convolutions need it.
    """
    # The exact type, because a subclass may compute anything, and no hooks, because they may change anything.
    bound = BOUNDS.get(type(module))
    if bound is None:
        raise NoBoundError(
            f"no Lipschitz bound is known for {type(module).__name__}. Known are linear layers, convolutions, norms, "
            f"pooling, common activations and nn.Sequential of these. (Attention has none: it is not Lipschitz.) "
            f"Measure instead with scalelong.theory.jacobian_norm"
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoBoundError(f"this {type(module).__name__} has forward hooks, which may do anything to its values")
    return bound(module, tuple(input_shape))


def output_shape(module: nn.Module, shape: Shape) -> Shape:
    """The shape of one output, found by a forward of zeros."""
    parameter = next(module.parameters(), None)
    probe = torch.zeros(1, *shape, dtype=None if parameter is None else parameter.dtype)
    training = module.training
    with torch.no_grad():
        output = module.eval()(probe)
    module.train(training)
    return tuple(output.shape[1:])


def _random_linear(module: RandomLinear, _: Shape) -> float:
    if module.signs is not None:
        raise NoBoundError("an ensemble of random networks has no single bound; build one network, with ensemble=None")
    return linear_bound(module.weight)


def _convolution(module: nn.Conv2d, shape: Shape) -> float:
    if len(shape) != len(module.kernel_size) + 1:
        raise NoBoundError(f"the bound of {module} needs input_shape=(channels, sizes...), got {shape}")
    return convolution_bound(module, shape[1:])


def _chain(module: nn.Sequential, shape: Shape) -> float:
    bound = 1.0
    for part in module:
        bound *= lipschitz_bound(part, shape)
        shape = output_shape(part, shape) if shape else shape
    return bound


def _batch_norm(module: nn.BatchNorm2d, _: Shape) -> float:
    if module.running_var is None:
        raise NoBoundError("a batch norm without running statistics depends on the other images of the batch")
    deviation = (module.running_var.double() + module.eps).sqrt()
    weight = torch.ones_like(deviation) if module.weight is None else module.weight.detach().double().abs()
    return float((weight / deviation).max())


def _norm(module: nn.LayerNorm | nn.GroupNorm, _: Shape) -> float:
    # The derivative of (x - mean)/√(var + ε) is at most a projection over √(var + ε), and the variance may be 0.
    if not module.eps > 0:
        raise NoBoundError(f"{module} divides by a deviation that may be 0")
    weight = 1.0 if module.weight is None else float(module.weight.detach().double().abs().max())
    return weight / math.sqrt(module.eps)


def _pool(module: nn.AvgPool2d | nn.MaxPool2d, _: Shape) -> float:
    dilated = getattr(module, "dilation", 1) not in (1, (1,), (1, 1), (1, 1, 1))
    if module.kernel_size != module.stride or dilated or getattr(module, "divisor_override", None):
        raise NoBoundError(f"the bound of a pooling needs windows that do not overlap (stride = kernel): {module}")
    # Each input enters one window, where a mean or a maximum changes by no more than the norm of the change.
    return 1.0


def _equation3(module: Equation3, shape: Shape) -> float:
    from .robustness import robustness_bound

    return robustness_bound(module, shape).recursion


def _constant(value: float) -> Callable[[Any, Shape], float]:
    return lambda _module, _shape: value


BOUNDS: dict[type[nn.Module], Callable[[Any, Shape], float]] = {
    nn.Linear: lambda module, _: linear_bound(module.weight),
    RandomLinear: _random_linear,
    Equation3: _equation3,
    nn.Sequential: _chain,
    nn.LeakyReLU: lambda module, _: max(1.0, abs(module.negative_slope)),
    nn.ELU: lambda module, _: max(1.0, abs(module.alpha)),
    nn.LayerNorm: _norm,
    nn.GroupNorm: _norm,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), _pool),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), _pool),
    # Dropout is the identity in eval mode.
    **dict.fromkeys((nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d), _constant(1.0)),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Softsign, nn.LogSigmoid), _constant(1.0)),
    # The largest slopes of the other activations, rounded up.
    nn.Sigmoid: _constant(0.25),
    nn.SiLU: _constant(1.1),
    nn.GELU: _constant(1.13),
    nn.Mish: _constant(1.09),
    nn.Hardswish: _constant(1.5),
    nn.SELU: _constant(1.7581),
}
"""The rule for each type of module: add your own to cover a module that you know the constant of."""
