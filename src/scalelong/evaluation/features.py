"""Features, from which scores are computed, and their statistics over the real images.

random         an untrained convolution network: no download, any images, and it tells noise from photographs
inception      for FIDs that can be compared with published ones

Whether they can be trusted for a data set is measured, not believed: `anchors.py`. A hash of the weights goes into
every score.
"""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import ImageData, to_float
from ..errors import EvaluationError
from ..files import at_home, cached_bytes, digest, file_digest, write_bytes
from ..optional import load_object, needs
from .scores import Moments, MomentsSum

logger = logging.getLogger(__name__)


class RandomFeatures:
    """Three convolutions with random weights, each followed by |x|; the root of its mean over the image.

    Random filters answer to edges, colours and textures at three scales. Classifiers do worse: they have learned to
    ignore whatever does not tell their classes apart, and that noise is no image is among it.
    """

    name = "random"
    widths = (64, 128, 256)

    def __init__(self, channels: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._filters = []
        for width in self.widths:
            filters = torch.randn(width, channels, 3, 3, generator=generator)
            # Keeps the size of the signal from layer to layer (He et al., 2015).
            self._filters.append(filters * (2 / (9 * channels)) ** 0.5)
            channels = width
        self.digest = digest(b"abs, stride 2, mean, root" + b"".join(part.numpy().tobytes() for part in self._filters))

    @property
    def device(self) -> torch.device:
        return self._filters[0].device

    def to(self, device: torch.device | str) -> Self:
        self._filters = [filters.to(device) for filters in self._filters]
        return self

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        x = to_float(images)
        for filters in self._filters:
            # Reflected borders: zeros would be edges that no image has.
            padded = F.pad(x, (1, 1, 1, 1), mode="reflect" if min(x.shape[2:]) > 1 else "replicate")
            x = F.conv2d(padded, filters, stride=2 if min(x.shape[2:]) > 4 else 1).abs()
        # The root draws the few images of very high contrast in, which would be far from all others.
        return x.mean(dim=(2, 3)).sqrt()


# Inception's features by torch-fidelity, for FIDs that can be compared with published ones.

SHA256 = "6726825d"
"""The first digits of the sha256 of weights-inception-2015-12-05-6726825d.pth, which torch-fidelity publishes."""


class InceptionFeatures:
    """The 2048 features of the pooling layer. The file's hash is checked before it is loaded."""

    name = "inception"

    def __init__(self, weights: str | Path, sha256: str = SHA256) -> None:
        path = at_home(weights, "feature_weights")
        self.digest = file_digest(path)
        if not self.digest.startswith(sha256):
            raise EvaluationError(f"{path} is refused: its sha256 must begin with {sha256}, not {self.digest[:12]}")
        fidelity = needs("torch_fidelity.feature_extractor_inceptionv3", "eval", "Inception FID")
        model = fidelity.FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048"], feature_extractor_weights_path=str(path)
        )
        self._model = model.eval()  # in training mode its normalisation would use the statistics of each batch

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    def to(self, device: torch.device | str) -> Self:
        self._model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        if images.shape[1] not in (1, 3):
            raise EvaluationError(f"Inception takes 1 or 3 channels, not {images.shape[1]}: choose other `features`")
        return self._model(images.expand(-1, 3, -1, -1))[0]


# The view that scores have of features, and the way from a name to an extractor.

BATCH = 256
FEATURES = ("random", "inception")


@runtime_checkable
class FeatureExtractor(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str:
        """A hash of all that decides the features: weights and preprocessing."""
        ...

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to features (B, D). Images are on `device`, if the extractor has one, or on the CPU."""
        ...


def load_extractor(
    spec: str,
    data: ImageData,
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
) -> FeatureExtractor:
    """A name of FEATURES, or "package.module:factory" for your own. Inception needs the path of its weights.

    A factory is called with the data set, and returns an object with `name`, `digest` and a call like that above.
    device: where the features are computed (default: the accelerator, if there is one). Yours decide by themselves.
    """
    if spec == "random":
        return RandomFeatures(data.channels).to(device or default_device())
    if spec == "inception":
        if weights is None:
            raise EvaluationError(
                "Inception needs the path of its weights, weights-inception-….pth, as `feature_weights`"
            )
        return InceptionFeatures(weights).to(device or default_device())
    if ":" not in spec:
        raise EvaluationError(
            f"unknown features {spec!r}; known: auto, {', '.join(FEATURES)}, or package.module:factory"
        )
    made = load_object(spec, "feature extractor", EvaluationError)(data)
    if not isinstance(made, FeatureExtractor) or not callable(made):
        raise EvaluationError(f"{spec} must return an object with name, digest and a call, got {type(made).__name__}")
    return made


def default_device() -> torch.device:
    """The accelerator of this process, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


@torch.no_grad()
def features_of(extractor: FeatureExtractor, images: Tensor) -> Tensor:
    """Features of many images, batch by batch, on the extractor's device."""
    device = torch.device(getattr(extractor, "device", "cpu"))
    features = torch.cat([extractor(part.to(device)).detach().cpu().double() for part in images.split(BATCH)])
    if features.dim() != 2 or len(features) != len(images):
        raise EvaluationError(
            f"{extractor.name} must give (B, D) and gave {tuple(features.shape)} for {len(images)} images"
        )
    if not bool(torch.isfinite(features).all()):
        raise EvaluationError(f"{extractor.name} gave features that are not finite: choose other `features`")
    return features


# What samples are compared with: moments and features of a data set, kept on disk under its fingerprint.

FORMAT = 2
MOST_FEATURES = 10_000
"""The largest number of features, evenly spread over the data, that is kept for precision and recall."""


@dataclass(frozen=True)
class Reference:
    """`data` is the fingerprint of the data set, `digest` that of the features."""

    data: str
    digest: str
    moments: Moments
    features: Tensor
    """Of every `stride`-th image, float32 (m, D)."""
    file: Path

    @property
    def stride(self) -> int:
        return _stride(self.moments.n)


def _stride(images: int) -> int:
    return max(1, -(-images // MOST_FEATURES))


def reference_of(data: ImageData, extractor: FeatureExtractor) -> Reference:
    from safetensors.torch import load

    about = {"data": data.fingerprint(), "features": extractor.digest, "format": FORMAT}
    content, file = cached_bytes("statistics", about, "statistics.safetensors", lambda: _compute(data, extractor))
    found = load(content)
    moments = Moments(found["mean"], found["covariance"], int(found["images"]))
    return Reference(about["data"], about["features"], moments, found["features"], file)


def _compute(data: ImageData, extractor: FeatureExtractor) -> bytes:
    from safetensors.torch import save

    logger.info(f"computing the {extractor.name} features of {len(data)} images of {data.name}, once")
    total, kept, stride = MomentsSum(), [], _stride(len(data))
    for rows in torch.arange(len(data)).split(BATCH):
        features = features_of(extractor, data.fetch(rows).images)
        total.add(features)
        kept.append(features[rows % stride == 0].float())
    moments = total.moments()
    tensors = {"mean": moments.mean, "covariance": moments.covariance, "features": torch.cat(kept)}
    return save({**tensors, "images": torch.tensor(moments.n)})


def export_npz(reference: Reference, path: str | PathLike[str]) -> None:
    """`mu` and `sigma`, as pytorch-fid and the U-ViT authors store them."""
    import numpy as np

    content = io.BytesIO()
    np.savez(content, mu=reference.moments.mean.numpy(), sigma=reference.moments.covariance.numpy())
    write_bytes(Path(path), content.getvalue())
