"""Scores that can be trusted: Fréchet distance, precision and recall, with intervals and with their protocol."""

from ..errors import EvaluationError, FeatureError, InvalidSamplesError, ProtocolMismatchError
from .features import (
    FeatureExtractor,
    InceptionFeatures,
    Reference,
    export_npz,
    load_extractor,
    reference_of,
    train_classifier,
)
from .judge import score_folder, score_images, score_run
from .scores import (
    Moments,
    MomentsSum,
    Protocol,
    Score,
    Scores,
    comparison,
    frechet_distance,
    frechet_score,
    precision_recall,
    require_comparable,
    share_score,
    validate_samples,
)

__all__ = [
    "EvaluationError",
    "FeatureError",
    "FeatureExtractor",
    "InceptionFeatures",
    "InvalidSamplesError",
    "Moments",
    "MomentsSum",
    "Protocol",
    "ProtocolMismatchError",
    "Reference",
    "Score",
    "Scores",
    "comparison",
    "export_npz",
    "frechet_distance",
    "frechet_score",
    "load_extractor",
    "precision_recall",
    "reference_of",
    "require_comparable",
    "score_folder",
    "score_images",
    "score_run",
    "share_score",
    "train_classifier",
    "validate_samples",
]
