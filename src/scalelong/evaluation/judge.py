"""From images to scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..data import ImageData
from ..errors import InvalidSamplesError
from .bootstrap import frechet_score, share_score
from .features.base import FeatureExtractor, features_of
from .neighbours import precision_recall
from .protocol import Protocol, Scores
from .reference import Reference
from .validate import validate_samples

NEIGHBOURS = 3


def score_images(
    images: Tensor,
    data: ImageData,
    extractor: FeatureExtractor,
    reference: Reference,
    *,
    subject: dict[str, Any],
    **made_by: Any,
) -> Scores:
    """`made_by` is what is known of how the images were made: the fields of Protocol from `sampler` on."""
    images = validate_samples(images, (data.channels, data.height, data.width))
    if len(images) <= NEIGHBOURS:
        raise InvalidSamplesError(f"at least {NEIGHBOURS + 1} images are needed, got {len(images)}")
    features = features_of(extractor, images)
    # As many real as generated ones, so that neither side's neighbourhoods are denser.
    count = min(len(features), len(reference.features))
    real = reference.features[:: max(1, len(reference.features) // count)][:count]
    precise, recalled = precision_recall(real, features[:count], NEIGHBOURS)
    protocol = Protocol(
        features=extractor.name,
        features_sha256=extractor.digest,
        data=data.name,
        data_sha256=reference.data,
        reference_images=reference.moments.n,
        images=len(images),
        neighbours=NEIGHBOURS,
        **made_by,
    )
    return Scores(
        protocol, frechet_score(reference.moments, features), share_score(precise), share_score(recalled), subject
    )
