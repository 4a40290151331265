"""Named errors. Each says what was looked for, what was found, and what to do."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .skips.plan import SkipPlan


class ScaleLongError(Exception):
    """Base of all errors that scalelong raises on purpose."""


class InvalidConfigError(ScaleLongError, ValueError):
    """A configuration has a value that is not allowed."""


class InvalidInputError(ScaleLongError, ValueError):
    """A model was called with inputs that do not fit it."""


class MissingDependencyError(ScaleLongError, ImportError):
    """An optional package is needed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'scalelong[{extra}]'"
        )


class CheckoutNeededError(ScaleLongError, ImportError):
    """The command works in a checkout of the repository only."""


class AlreadyScaledError(ScaleLongError, RuntimeError):
    """The model's long skips are scaled already; scaling twice would square the coefficients."""


class NotScaledError(ScaleLongError, RuntimeError):
    """The model's long skips are not scaled."""


class NoLongSkipsError(ScaleLongError, ValueError):
    """No long skip connection was found in the model."""


class ScalingMismatchError(ScaleLongError, ValueError):
    """A saved scaling does not fit the model it is loaded into."""


class AmbiguousSkipsError(ScaleLongError, ValueError):
    """There is more than one way to read the long skips of a model. `plan` holds all candidates."""

    def __init__(self, message: str, plan: "SkipPlan | None" = None) -> None:
        super().__init__(message)
        self.plan = plan


class UnreachableSkipError(ScaleLongError, RuntimeError):
    """A long skip was found, but there is no place where it can be scaled."""


class SkipMismatchError(ScaleLongError, RuntimeError):
    """A scaled model runs in another way than the plan of its long skips says."""


class ExampleInputsError(ScaleLongError, ValueError):
    """Example inputs are needed to find the long skips, or the model cannot run on those that were given."""


class UnsupportedModelError(ScaleLongError, TypeError):
    """This kind of object cannot be scaled."""


class NotFreshError(ScaleLongError, RuntimeError):
    """Weights that would be overwritten do not look as if they were just initialised."""


class CancelledScalingWarning(UserWarning):
    """A normalisation right behind the merges cancels most of a constant scaling."""


# What can be wrong with data, by name. Each error says what was looked for, what was found, and what to do.


class DataError(ScaleLongError):
    """Base of the errors about data."""


class DataNotFoundError(DataError, FileNotFoundError):
    """No data set is at the place, or goes by the name, that was given."""


class UnknownSplitError(DataError, ValueError):
    """The data set does not have the part ("train", "test", ...) that was asked for."""


class NoImagesError(DataError, ValueError):
    """The place exists, but holds no images."""


class UnreadableDataError(DataError, ValueError):
    """A file is damaged, of an unknown format, or lacks the columns or arrays that are needed."""


class MixedSizesError(DataError, ValueError):
    """The images differ in size and no common size was asked for."""


class BrokenImagesError(DataError, ValueError):
    """More images are broken than allowed."""


class LabelError(DataError, ValueError):
    """Labels are missing, too many, or not what labels can be."""


class MetadataError(DataError, ValueError):
    """Captions or labels beside the images do not fit the images."""


class DuplicateNameError(DataError, ValueError):
    """The same image is named twice."""


class UnsafeArchiveError(DataError, ValueError):
    """An archive holds paths that leave it, links, or more data than its size can honestly hold."""


# What can be wrong with scores, by name.


class EvaluationError(ScaleLongError, ValueError):
    """Base of the errors about evaluation."""


class InvalidSamplesError(EvaluationError):
    """The images cannot be scored: too few, of another size, not finite, or out of range."""


class ProtocolMismatchError(EvaluationError):
    """Two scores were made in different ways, so they cannot be compared."""


class FeatureError(EvaluationError):
    """The features cannot be computed: weights are missing, damaged or do not fit."""


# Why a model cannot be exported.


class ExportError(ScaleLongError, ValueError):
    """The model cannot be written in this format, or not at this place; the message says why."""


# What can go wrong in a run, by name.


class RunFolderError(ScaleLongError, ValueError):
    """The run folder holds something else, or a run with another configuration or other data."""


class RunLockedError(ScaleLongError, RuntimeError):
    """Another process works on the run folder."""


class CheckpointError(ScaleLongError, RuntimeError):
    """A checkpoint cannot be written or read."""


class NonFiniteError(ScaleLongError, ArithmeticError):
    """The loss or the gradient became infinite or NaN. The message says where."""
