"""Scores that can be trusted: Fréchet distance, precision and recall, with intervals and with their protocol."""

from ..errors import EvaluationError, FeatureError, InvalidSamplesError, ProtocolMismatchError
from .bootstrap import Score, frechet_score, share_score
from .features import FeatureExtractor, InceptionFeatures, load_extractor, train_classifier
from .frechet import Moments, MomentsSum, frechet_distance
from .judge import score_images
from .neighbours import precision_recall
from .protocol import Protocol, Scores, comparison, require_comparable
from .reference import Reference, export_npz, reference_of
from .subjects import score_folder, score_run
from .validate import validate_samples

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
