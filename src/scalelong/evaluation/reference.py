"""What samples are compared with: moments and features of a data set, kept on disk under its fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..data import ImageData
from ..files import cache_folder, key_of, locked, write_bytes
from .features.base import BATCH, FeatureExtractor, features_of
from .frechet import Moments, MomentsSum

FORMAT = 1
MOST_FEATURES = 10_000
"""So many features, evenly spread over the data, are kept for precision and recall."""


@dataclass(frozen=True)
class Reference:
    """`data` is the fingerprint of the data set, `digest` that of the features."""

    data: str
    digest: str
    moments: Moments
    features: Tensor
    file: Path


def reference_of(data: ImageData, extractor: FeatureExtractor, say: Callable[[str], None] = print) -> Reference:
    about = {"data": data.fingerprint(), "features": extractor.digest, "format": FORMAT}
    folder = cache_folder("statistics") / key_of(about)
    file = folder / "statistics.safetensors"
    with locked(folder):
        found = _read(file, about)
        if found is None:
            say(f"computing the {extractor.name} features of {len(data)} images of {data.name}, once")
            write_bytes(file, _compute(data, extractor, about))
            found = _read(file, about)
            assert found is not None
    return found


def export_npz(reference: Reference, path: str | PathLike[str]) -> None:
    """`mu` and `sigma`, as pytorch-fid and the U-ViT authors store them."""
    import io

    import numpy as np

    content = io.BytesIO()
    np.savez(content, mu=reference.moments.mean.numpy(), sigma=reference.moments.covariance.numpy())
    write_bytes(Path(path), content.getvalue())


def _compute(data: ImageData, extractor: FeatureExtractor, about: dict[str, object]) -> bytes:
    total, kept, stride = MomentsSum(), [], max(1, -(-len(data) // MOST_FEATURES))
    for rows in torch.arange(len(data)).split(BATCH):
        features = features_of(extractor, data.fetch(rows).images)
        total.add(features)
        kept.append(features[rows % stride == 0].float())
    moments = total.moments()
    tensors = {"mean": moments.mean, "covariance": moments.covariance, "features": torch.cat(kept)}
    return save(tensors, metadata={"scalelong": json.dumps({**about, "n": moments.n})})


def _read(file: Path, about: dict[str, object]) -> Reference | None:
    """None if it is not there or cannot be read: then it is computed again."""
    try:
        with safe_open(file, framework="pt") as content:
            note = json.loads((content.metadata() or {})["scalelong"])
            mean, covariance, features = (content.get_tensor(name) for name in ("mean", "covariance", "features"))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if any(note.get(name) != value for name, value in about.items()):
        return None
    return Reference(note["data"], note["features"], Moments(mean, covariance, note["n"]), features, file)
