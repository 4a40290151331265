"""The view that scores have of features, and the way from a name to an extractor."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...data import ImageData
from ...errors import FeatureError

BATCH = 256


@runtime_checkable
class FeatureExtractor(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """A hash of all that decides the features: weights and preprocessing."""
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to features (B, D)."""
        ...


def load_extractor(
    spec: str, data: ImageData, weights: str | Path | None = None, say: Callable[[str], None] = print
) -> FeatureExtractor:
    """ "classifier", "inception" with the path of its weights, or "package.module:factory" for your own.

    A factory is called with the data set, and returns an object with `name`, `digest` and a call like that above.
    """
    from .classifier import train_classifier
    from .inception import InceptionFeatures

    if spec == "classifier":
        return train_classifier(data, say=say)
    if spec == "inception":
        if weights is None:
            raise FeatureError("Inception needs the path of its weights: --feature-weights weights-inception-….pth")
        return InceptionFeatures(weights)
    module, colon, name = spec.partition(":")
    if not colon:
        raise FeatureError(f"unknown features {spec!r}; known: classifier, inception, or package.module:factory")
    try:
        made = getattr(import_module(module), name)(data)
    except (ImportError, AttributeError) as error:
        raise FeatureError(f"the features {spec!r} cannot be imported: {error}") from error
    if not isinstance(made, FeatureExtractor) or not callable(made):
        raise FeatureError(f"{spec} must return an object with name, digest and a call, got {type(made).__name__}")
    return made


@torch.no_grad()
def features_of(extractor: FeatureExtractor, images: Tensor) -> Tensor:
    """Features of many images, batch by batch."""
    features = torch.cat([extractor(part).detach().cpu().double() for part in images.split(BATCH)])
    if features.dim() != 2 or len(features) != len(images):
        raise FeatureError(
            f"{extractor.name} must give (B, D) and gave {tuple(features.shape)} for {len(images)} images"
        )
    if not bool(torch.isfinite(features).all()):
        raise FeatureError(f"{extractor.name} gave features that are not finite")
    return features
