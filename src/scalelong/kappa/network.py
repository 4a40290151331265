"""Estimator B: κ from the network itself, through the sensitivities w_j = E‖∂out/∂κ_j‖² of its output to its skips.

Estimator A holds for a network in which all skips matter equally. Here skip j counts w_j/w_1, as measured.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import ScaleLongError
from ..scaling.constant import BalancedScaling, ConstantScaling
from ..theory.moments import noisy_batch
from ..theory.sensitivity import skip_sensitivities
from .choice import KappaChoice
from .moments import PICK_REASON, noise_ratio_targets, solve

BATCH = 32

ModelInputs = Callable[[Tensor, Tensor], tuple[Any, ...]]


class SilentSkipsError(ScaleLongError, RuntimeError):
    """The output of the network does not depend on its outermost long skip, so nothing can be compared with it."""


def default_inputs(noisy: Tensor, steps: Tensor) -> tuple[Any, ...]:
    """The arguments of a model that is called as model(x_t, t), with t from 0 to 999."""
    return noisy, steps


def example_arguments(data: Tensor, schedule: Any, inputs: ModelInputs) -> tuple[Any, ...]:
    """The arguments of the model for 32 noisy images."""
    batch = noisy_batch(data[:BATCH], schedule)
    return inputs(batch.inputs, batch.steps)


def sensitivities(model: nn.Module, inputs: tuple[Any, ...], kappa: float = 1.0) -> list[float]:
    """w_j under CS(κ); raises where w_1 is zero."""
    weights = skip_sensitivities(model, *inputs, scaling=ConstantScaling(kappa))
    if not weights[0] > 0:
        raise SilentSkipsError(
            "the output of this network does not change with its outermost long skip; its last layer is probably "
            "initialised to zero. Choose κ from the data or by a pilot, or train for a few steps first"
        )
    return weights


def choose_from_network(
    model: nn.Module, data: Tensor, schedule: Any = "ddpm", inputs: ModelInputs = default_inputs
) -> KappaChoice:
    """Estimator B. Costs about 20 N forwards of 32 images: norms make w depend on κ, so it is measured at each κ."""
    arguments = example_arguments(data, schedule, inputs)
    targets = noise_ratio_targets(data, schedule)
    measured: dict[float, list[float]] = {}

    def total(kappa: float) -> float:
        if kappa not in measured:
            measured[kappa] = sensitivities(model, arguments, kappa)
        weights = measured[kappa]
        return sum(weight / weights[0] * kappa ** (2 * j) for j, weight in enumerate(weights))

    low, high = solve(total, targets.mean, 2e-3), solve(total, targets.high, 2e-3)
    weights = [weight / measured[1.0][0] for weight in measured[1.0]]
    reasons = [
        f"‖ε‖²/‖x_t‖² has the mean {targets.mean:.3f} and the 97 % quantile {targets.high:.3f} on {len(data)} images",
        "without scaling the skips count w_j/w_1 = " + ", ".join(f"{weight:.2g}" for weight in weights),
        *[solution.limit for solution in (low, high) if solution.limit],
        PICK_REASON,
    ]
    return KappaChoice(
        kappa=round(high.kappa, 4),
        low=round(min(low.kappa, high.kappa), 4),
        high=round(high.kappa, 4),
        method="network",
        skips=len(weights),
        reasons=tuple(reasons),
        details={**targets._asdict(), "sensitivities": weights, "measurements": len(measured)},
    )


def balanced_scaling(
    model: nn.Module,
    data: Tensor,
    kappa: float = 0.7,
    schedule: Any = "ddpm",
    inputs: ModelInputs = default_inputs,
) -> BalancedScaling:
    """BalancedScaling for this model: its skips' contributions, not their coefficients, fall as κ^(2(i-1))."""
    weights = sensitivities(model, example_arguments(data, schedule, inputs))
    return BalancedScaling(tuple(weight / weights[0] for weight in weights), kappa)
