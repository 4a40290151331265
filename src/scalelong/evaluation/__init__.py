"""Scores with intervals, anchors and their protocol: Fréchet distance, precision, recall, near-copies.

scores       what a score is (SCORES), how it is computed, and when two may be compared
features     random convolutions, Inception, your own extractor; statistics of the real images
anchors      what real images and noise score with the same features, and whether these can be trusted
judge        from a run, a folder or a model in training to scores
probe        linear probes over layers and noise levels, with their controls
"""

from ..errors import EvaluationError as EvaluationError, ProtocolMismatchError as ProtocolMismatchError
from .anchors import anchors_of as anchors_of, bad_images as bad_images, trusted_features as trusted_features
from .features import (
    FEATURES as FEATURES,
    FeatureExtractor as FeatureExtractor,
    InceptionFeatures as InceptionFeatures,
    RandomFeatures as RandomFeatures,
    Reference as Reference,
    default_device as default_device,
    export_npz as export_npz,
    features_of as features_of,
    load_extractor as load_extractor,
    reference_of as reference_of,
)
from .judge import (
    STORED as STORED,
    Scorer as Scorer,
    evaluation_prompts as evaluation_prompts,
    reference_data as reference_data,
    score_folder as score_folder,
    score_images as score_images,
    score_run as score_run,
    store as store,
    stored_scores as stored_scores,
)
from .probe import (
    PENALTIES as PENALTIES,
    TIMES as TIMES,
    LinearProbe as LinearProbe,
    linear_probe as linear_probe,
    probe_run as probe_run,
)
from .scores import (
    NOISE as NOISE,
    REAL as REAL,
    SCORES as SCORES,
    Anchors as Anchors,
    Evidence as Evidence,
    Moments as Moments,
    MomentsSum as MomentsSum,
    Protocol as Protocol,
    Score as Score,
    Scores as Scores,
    comparison as comparison,
    comparison_rows as comparison_rows,
    frechet_distance as frechet_distance,
    frechet_score as frechet_score,
    near_copies as near_copies,
    precision_recall as precision_recall,
    require_comparable as require_comparable,
    share_score as share_score,
)
