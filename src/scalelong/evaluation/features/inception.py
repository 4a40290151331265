"""Inception's features by torch-fidelity, for FIDs that can be compared with published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import FeatureError, MissingDependencyError
from ...files import file_digest

SHA256 = "6726825d"
"""The first digits of the sha256 of weights-inception-2015-12-05-6726825d.pth, which torch-fidelity publishes."""


class InceptionFeatures:
    """The 2048 features of the pooling layer. The file's hash is checked before it is loaded."""

    name = "inception"

    def __init__(self, weights: str | Path, sha256: str = SHA256) -> None:
        path = Path(weights).expanduser()
        if not path.is_file():
            raise FeatureError(
                f"there are no Inception weights at {path}; they are weights-inception-2015-12-05-6726825d.pth of "
                f"torch-fidelity's release v0.2.0"
            )
        found = file_digest(path)
        if not found.startswith(sha256):
            raise FeatureError(f"{path} is refused: its sha256 begins with {found[:12]} and must begin with {sha256}")
        self.digest = found
        self._model = _load(path)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[1] != 3:
            raise FeatureError(f"Inception takes images of 1 or 3 channels, not {images.shape[1]}")
        (features,) = self._model(images)
        return features


def _load(path: Path) -> Any:
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import (  # pyright: ignore[reportMissingImports]
            FeatureExtractorInceptionV3,
        )
    except ImportError as error:
        raise MissingDependencyError("torch-fidelity", "eval", "Inception FID") from error
    model = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path))
    # In training mode its normalisation would use the statistics of each batch.
    return model.eval()
