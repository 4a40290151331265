"""What can be wrong with scores, by name."""

from ..errors import ScaleLongError


class EvaluationError(ScaleLongError, ValueError):
    """Base of the errors about evaluation."""


class InvalidSamplesError(EvaluationError):
    """The images cannot be scored: too few, of another size, not finite, or out of range."""


class ProtocolMismatchError(EvaluationError):
    """Two scores were made in different ways, so they cannot be compared."""


class FeatureError(EvaluationError):
    """The features cannot be computed: weights are missing, damaged or do not fit."""
