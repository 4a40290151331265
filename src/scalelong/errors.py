"""All named errors, by subject. Each says what was looked for, what was found, and what to do.

Every error that scalelong raises on purpose is a `ScaleLongError`; most are also the built-in error that fits, so that
`except ValueError` works. The command line prints them as one line.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .finding import SkipPlan


class ScaleLongError(Exception):
    """Base of all errors that scalelong raises on purpose."""


# What was asked for


class InvalidConfigError(ScaleLongError, ValueError):
    """A configuration has a value that is not allowed."""


def require(condition: bool, message: str) -> None:
    """Raise InvalidConfigError unless the condition holds."""
    if not condition:
        raise InvalidConfigError(message)


class InvalidInputError(ScaleLongError, ValueError):
    """A model was called with inputs that do not fit it."""


class MissingDependencyError(ScaleLongError, ImportError):
    """An optional package is needed; the message names the extra to install, or the package, if no extra has it."""

    def __init__(self, package: str, extra: str | None, purpose: str, reason: str | None = None) -> None:
        # A package that is there and cannot be imported is not mended by installing it: say what it said.
        state = "is not installed" if reason is None else f"cannot be imported ({reason})"
        what = package if extra is None else f"'scalelong[{extra}]'"
        super().__init__(f"{purpose} needs the package {package!r}, which {state}. Install it with: pip install {what}")


class CheckoutNeededError(ScaleLongError, ImportError):
    """The command works in a checkout of the repository only."""


# Files and folders


class FileAccessError(ScaleLongError, OSError):
    """The system refuses a file or folder. The message says why and what to do; `errno` is the system's reason."""


class CannotWriteError(FileAccessError):
    """A file or folder cannot be written."""


class CannotReadError(FileAccessError):
    """A file or folder cannot be read, or is damaged."""


class LinkRefusedError(FileAccessError):
    """A name inside a run folder is a symbolic link. It could lead to any file of this user, so it is not followed."""


class NotEnoughMemoryError(ScaleLongError, MemoryError):
    """The machine has not enough memory for what was asked."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory does not suffice. torch raises RuntimeError for it on a CPU."""
    known = ("can't allocate memory", "out of memory", "storage size")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in known)
    )


class FolderInUseError(ScaleLongError, FileExistsError):
    """A new folder was to be made where there is something already."""


class UntrustedCodeError(ScaleLongError, RuntimeError):
    """A run folder names Python code to be run, and nobody has said that the folder is to be trusted."""


# Long skips and their scaling


class AlreadyScaledError(ScaleLongError, RuntimeError):
    """The model's long skips, or its weights for μP, are already scaled; a second time would square the factors."""


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
    """A scaled model runs differently from the plan of its long skips."""


class VerificationError(ScaleLongError, RuntimeError):
    """A scaled model does not compute what it should: a skip has no effect, or something else is scaled."""


class ExampleInputsError(ScaleLongError, ValueError):
    """Example inputs are needed to find the long skips, or the model cannot run on the given ones."""


class UnsupportedModelError(ScaleLongError, TypeError):
    """A model or one of its layers is of a kind that cannot be scaled, folded or bounded."""


class UnclearParameterError(ScaleLongError, ValueError):
    """What a parameter is to μP (input, hidden, output, vector, finite) cannot be told from its module and shape."""


class FrozenGatesWarning(UserWarning):
    """Learned gates of the long skips are not trained."""


class UnscaledWeightsWarning(UserWarning):
    """A model with scaled long skips was given weights that do not say that they were trained with them."""


class CancelledScalingWarning(UserWarning):
    """A normalisation right after the merges cancels most of a constant scaling."""


# Data


class DataError(ScaleLongError):
    """Base of the errors about data."""


class DataNotFoundError(DataError, FileNotFoundError):
    """There is no data set of this name or at this place, no such part of it, or no image in it."""


class UnreadableDataError(DataError, ValueError):
    """A file is damaged, of an unknown format, or lacks the columns or arrays that are needed."""


class MixedSizesError(DataError, ValueError):
    """The images differ in size, and no common size was given."""

    smallest: int = 0
    """The shortest side of all."""
    found: str = ""
    """How many sizes there are, and from which to which."""


class BrokenImagesError(DataError, ValueError):
    """More images are broken than allowed."""


class MetadataError(DataError, ValueError):
    """Captions or labels are missing, named twice, or do not fit the images."""


class UnsafeArchiveError(DataError, ValueError):
    """An archive holds paths that leave it, links, or more data than its size can honestly hold."""


# Conditions and latents


class ConditionError(ScaleLongError, ValueError):
    """The model cannot be conditioned on this class or text."""


# Runs and their folders


class RunFolderError(ScaleLongError, ValueError):
    """A folder holds no run, something else, or a run or samples with a different configuration or different data."""


class RunLockedError(ScaleLongError, RuntimeError):
    """Another process works on the run folder."""


class CheckpointError(ScaleLongError, RuntimeError):
    """A checkpoint cannot be written or read."""


class NonFiniteError(ScaleLongError, ArithmeticError):
    """The loss or the gradient became infinite or NaN. The message says where."""


class CollapseError(ScaleLongError, ArithmeticError):
    """The loss went back to that of a network that knows nothing. The message says what left first."""


class RunFailedError(ScaleLongError, RuntimeError):
    """A run of a comparison, another process of this one, or the engine of a sweep (SLURM, Ray) failed."""


class UnfinishedError(ScaleLongError, RuntimeError):
    """A sweep was interrupted or only submitted: not all of its runs are finished. The same command goes on."""


# Scores, reports and exports


class EvaluationError(ScaleLongError, ValueError):
    """Images cannot be scored, or their features cannot be computed."""


class ProtocolMismatchError(EvaluationError):
    """Two scores were made in different ways, so they cannot be compared."""


class ExportError(ScaleLongError, ValueError):
    """The model cannot be written in this format or at this place; the message says why."""
