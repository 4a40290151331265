"""Improved precision and recall (Kynkäänniemi et al., 2019): how much of one set lies in the other's neighbourhood."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import EvaluationError

CHUNK = 1024


def precision_recall(real: Tensor, generated: Tensor, k: int = 3) -> tuple[Tensor, Tensor]:
    """For each generated feature whether it lies among the real ones, and the reverse: bool (n,) and bool (m,).

    Their means are precision and recall. The neighbourhood of a set is the union of balls around its features, each
    reaching to the k-th nearest other one.
    """
    for name, features in (("real", real), ("generated", generated)):
        if len(features) <= k:
            raise EvaluationError(
                f"precision and recall need more than k = {k} images, and there are {len(features)} {name} ones"
            )
    real, generated = real.double(), generated.double()
    return _covered(generated, real, _radii(real, k)), _covered(real, generated, _radii(generated, k))


def _radii(features: Tensor, k: int) -> Tensor:
    """Distances to the k-th nearest other feature. The nearest one of all is the feature itself."""
    found = [torch.cdist(part, features).kthvalue(k + 1, dim=1).values for part in features.split(CHUNK)]
    return torch.cat(found)


def _covered(points: Tensor, centres: Tensor, radii: Tensor) -> Tensor:
    return torch.cat([(torch.cdist(part, centres) <= radii).any(dim=1) for part in points.split(CHUNK)])
