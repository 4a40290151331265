"""Linear classifiers on features, for a whole grid of penalties at once.

    ridge      min_W  ‖X W - Y‖² / n + λ ‖W‖²          Y: one-hot labels; one eigenvalue problem for all λ
    logistic   min_W  mean cross-entropy + λ ‖W‖² / 2   L-BFGS, from the largest λ to the smallest

X are features with mean 0 and deviation 1 over the images that are fitted; the intercept is not penalised. In terms of
scikit-learn, ridge is `RidgeClassifier(alpha=n λ)` behind `StandardScaler`. All in float64: the smallest λ leaves the
problem close to singular.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import FeatureError

PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""λ. At the largest one every weight is a few hundredths of what least squares give."""

Fit = Callable[[Tensor, Tensor, int, Sequence[Tensor], Sequence[float]], list[list[Tensor]]]
"""(features, labels, classes, other features, penalties) to predicted labels of the others: by penalty, then by set."""

ITERATIONS, TOLERANCE = 200, 1e-7


def ridge(
    features: Tensor,
    labels: Tensor,
    classes: int,
    others: Sequence[Tensor],
    penalties: Sequence[float] = PENALTIES,
) -> list[list[Tensor]]:
    """Predictions of the closed form. With more features than images, from the n × n side of the problem."""
    x, rest = standardised(features, others)
    n = len(x)
    one_hot = F.one_hot(labels, classes).double()
    mean = one_hot.mean(0)
    y = one_hot - mean
    if x.shape[1] <= n:
        values, vectors = torch.linalg.eigh(x.T @ x / n)
        projected = vectors.T @ (x.T @ y) / n
        seen = [other @ vectors for other in rest]
    else:
        values, vectors = torch.linalg.eigh(x @ x.T / n)
        projected = vectors.T @ y
        seen = [other @ x.T @ vectors / n for other in rest]
    values = values.clamp_min(0)[:, None]
    found = []
    for penalty in penalties:
        weights = projected / (values + penalty)
        found.append([(side @ weights + mean).argmax(1) for side in seen])
    return found


def logistic(
    features: Tensor,
    labels: Tensor,
    classes: int,
    others: Sequence[Tensor],
    penalties: Sequence[float] = PENALTIES,
) -> list[list[Tensor]]:
    x, rest = standardised(features, others)
    weights = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    found: dict[float, list[Tensor]] = {}
    for penalty in sorted(set(penalties), reverse=True):
        minimise_logistic_(weights, bias, x, labels, penalty)
        with torch.no_grad():
            found[penalty] = [(side @ weights + bias).argmax(1) for side in rest]
    return [found[penalty] for penalty in penalties]


def minimise_logistic_(weights: Tensor, bias: Tensor, x: Tensor, labels: Tensor, penalty: float) -> None:
    """In place, from where they are."""
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=ITERATIONS,
        history_size=20,
        tolerance_grad=TOLERANCE,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weights + bias, labels) + penalty / 2 * weights.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # pyright: ignore[reportArgumentType]


CLASSIFIERS: dict[str, Fit] = {"ridge": ridge, "logistic": logistic}


def standardised(features: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Mean 0 and deviation 1 by the fitted images. A feature that is the same for all of them becomes zero."""
    x = features.double()
    if not bool(torch.isfinite(x).all()):
        raise FeatureError(
            "the features of a layer are not all finite, so nothing can be fitted to them: look at the network's losses"
        )
    mean, deviation = x.mean(0), x.std(0, unbiased=False)
    # What rounding leaves of a constant is no feature.
    flat = deviation <= 1e-9 * mean.abs().clamp_min(1e-12)
    gain = torch.where(flat, torch.zeros_like(deviation), 1 / deviation.clamp_min(1e-300))
    return (x - mean) * gain, [(other.double() - mean) * gain for other in others]
