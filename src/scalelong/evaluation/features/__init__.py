"""What images are compared by: a small classifier made here, Inception, or anyone's extractor."""

from .base import FeatureExtractor, load_extractor
from .classifier import train_classifier
from .inception import InceptionFeatures

__all__ = ["FeatureExtractor", "InceptionFeatures", "load_extractor", "train_classifier"]
