"""What an estimator answers: a κ, the range that it comes from, and why."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..console import html_lines
from ..errors import InvalidConfigError, SilentSkipsError
from ..noise import SCHEDULE, alpha_bars
from ..scaling.constant import BalancedScaling, ConstantScaling
from ..theory.moments import PAPER_SECOND_MOMENT, image_moments, noisy_batch
from ..theory.sensitivity import skip_sensitivities


@dataclass(frozen=True, kw_only=True)
class KappaChoice:
    """`kappa` is the pick, `low` and `high` the range that the estimator would accept."""

    kappa: float
    low: float
    high: float
    method: str
    skips: int
    reasons: tuple[str, ...]
    """How it was found, and every limit that was met, in words."""
    details: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it: targets, sensitivities, or the pilot's runs and their cost."""

    def scaling(self) -> ConstantScaling:
        """CS with this κ, for `scale_skips_`."""
        return ConstantScaling(self.kappa)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        head = f"κ = {self.kappa:.3f}, range {self.low:.3f} to {self.high:.3f} ({self.method}, {self.skips} long skips)"
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons)])

    def _repr_html_(self) -> str:
        return html_lines(str(self).splitlines())


# Estimator A: κ from the moments of the data, the noise schedule, and the number of long skips (Section 4.1).
#
# The output of Eq. (3) with unit gain has a squared norm of ‖x_t‖² Σ κ_j², its target is ε, so Σ κ_j² should lie
# between
# the mean and a high quantile of ‖ε‖²/‖x_t‖².

QUANTILE = 0.97
SMALLEST_KAPPA = 0.1
"""No estimator goes below: with κ = 0.1 the second skip has a hundredth of its power, and the third nearly nothing."""


class Targets(NamedTuple):
    """What Σ κ_j² should be: between the mean and the 97 % quantile of ‖ε‖²/‖x_t‖²."""

    mean: float
    high: float
    second_moment: float


def noise_ratio_targets(data: Tensor | None = None, schedule: Any = SCHEDULE) -> Targets:
    """The targets by the fast formula 1 / (1 - (1 - s) ᾱ_t), over all images and times; without data for s = 1/3."""
    moments = torch.tensor([PAPER_SECOND_MOMENT], dtype=torch.float64) if data is None else image_moments(data)
    bars, second_moment = alpha_bars(schedule), float(moments.mean())
    if len(moments) * len(bars) > 8_000_000:
        # Quantiles of s stand for the images: the ratio is a smooth function of s.
        moments = torch.quantile(moments[:8_000_000], torch.linspace(0, 1, 1001, dtype=torch.float64))
    norms = 1 - (1 - moments[:, None]) * bars[None, :]
    if not bool((norms > 0).all()):
        raise InvalidConfigError(
            "some images are all zero where the schedule has ᾱ_t = 1: x_t vanishes, no ratio exists; remove "
            "these images"
        )
    ratios = (1 / norms).flatten()
    position = max(1, round(QUANTILE * len(ratios)))
    return Targets(float(ratios.mean()), float(ratios.kthvalue(position).values), second_moment)


class Solution(NamedTuple):
    kappa: float
    limit: str | None
    """What stopped the search, in words, where the target cannot be met."""


def solve(total: Callable[[float], float], target: float, tolerance: float = 1e-4) -> Solution:
    """κ in [0.1, 1] with total(κ) = target, by bisection; the nearer end where there is none."""
    largest, smallest = total(1.0), total(SMALLEST_KAPPA)
    if largest <= target:
        return Solution(1.0, f"no κ reaches {target:.3g}: without scaling it is {largest:.3g}; capped at κ = 1")
    if smallest >= target:
        return Solution(
            SMALLEST_KAPPA, f"no κ goes down to {target:.3g}: κ = {SMALLEST_KAPPA} gives {smallest:.3g}; kept there"
        )
    low, high = SMALLEST_KAPPA, 1.0
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if total(middle) > target else (middle, high)
    return Solution((low + high) / 2, None)


def kappa_for_sum(target: float, skips: int) -> Solution:
    """κ with Σ_{j=1..N} κ^(2(j-1)) = target."""
    return solve(lambda kappa: sum(kappa ** (2 * j) for j in range(skips)), target, tolerance=1e-9)


def choose_from_moments(skips: int, data: Tensor | None = None, schedule: Any = SCHEDULE) -> KappaChoice:
    """Estimator A. Costs one pass over the data; without data it takes the paper's s = 1/3."""
    if skips < 1:
        raise InvalidConfigError(f"the number of long skips must be at least 1, got {skips}")
    targets = noise_ratio_targets(data, schedule)
    low, high = kappa_for_sum(targets.mean, skips), kappa_for_sum(targets.high, skips)
    source = "the paper's uniform data" if data is None else f"{len(data)} images"
    reasons = [
        f"E[x_0²] = {targets.second_moment:.3f} per dimension ({source}); ‖ε‖²/‖x_t‖² has the mean {targets.mean:.3f} "
        f"and the 97 % quantile {targets.high:.3f}",
        f"Σ κ^(2(j-1)) over {skips} skips is the mean at κ = {low.kappa:.3f}, the quantile at {high.kappa:.3f}",
        *[solution.limit for solution in (low, high) if solution.limit],
        PICK_REASON,
        *edge_reasons(high.kappa),
    ]
    return KappaChoice(
        kappa=round(high.kappa, 4),
        low=round(low.kappa, 4),
        high=round(high.kappa, 4),
        method="data",
        skips=skips,
        reasons=tuple(reasons),
        details=targets._asdict(),
    )


PICK_REASON = "the pick is the upper end: Section 4.1 asks for room for the long tail of the ratio"

MUCH = 0.8


def edge_reasons(kappa: float) -> list[str]:
    """What was seen where κ decides who survives: a κ near 1 is nearly no scaling."""
    if kappa < MUCH:
        return []
    return [
        "nothing here looks at the learning rate: a deep network at a rate that may break it survives more often with "
        "0.7 than with no scaling (docs/evidence/edge)"
    ]


# Estimator B: κ from the network itself, through the sensitivities w_j = E‖∂out/∂κ_j‖² of its output to its skips.
#
# Estimator A holds for a network in which all skips matter equally. Here skip j counts w_j/w_1, as measured.

BATCH = 32

ModelInputs = Callable[[Tensor, Tensor], tuple[Any, ...]]


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
    model: nn.Module, data: Tensor, schedule: Any = SCHEDULE, inputs: ModelInputs = default_inputs
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
        *edge_reasons(high.kappa),
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
    schedule: Any = SCHEDULE,
    inputs: ModelInputs = default_inputs,
) -> BalancedScaling:
    """BalancedScaling for this model: its skips' contributions, not their coefficients, fall as κ^(2(i-1))."""
    weights = sensitivities(model, example_arguments(data, schedule, inputs))
    return BalancedScaling(tuple(weight / weights[0] for weight in weights), kappa)
