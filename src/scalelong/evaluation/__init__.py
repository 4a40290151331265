"""Scores that can be trusted: Fréchet distance, precision and recall, with intervals and with their protocol."""

from ..errors import (
    EvaluationError as EvaluationError,
    FeatureError as FeatureError,
    InvalidSamplesError as InvalidSamplesError,
    ProtocolMismatchError as ProtocolMismatchError,
)
from .features import (
    FeatureExtractor as FeatureExtractor,
    InceptionFeatures as InceptionFeatures,
    Reference as Reference,
    export_npz as export_npz,
    load_extractor as load_extractor,
    reference_of as reference_of,
    train_classifier as train_classifier,
)
from .judge import (
    score_folder as score_folder,
    score_images as score_images,
    score_run as score_run,
)
from .scores import (
    Moments as Moments,
    MomentsSum as MomentsSum,
    Protocol as Protocol,
    Score as Score,
    Scores as Scores,
    comparison as comparison,
    comparison_rows as comparison_rows,
    frechet_distance as frechet_distance,
    frechet_score as frechet_score,
    precision_recall as precision_recall,
    require_comparable as require_comparable,
    share_score as share_score,
    validate_samples as validate_samples,
)
