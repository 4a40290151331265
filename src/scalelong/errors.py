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


class VerificationError(ScaleLongError, RuntimeError):
    """A scaled model does not compute what it should: a skip has no effect, or something else is scaled."""


class ExampleInputsError(ScaleLongError, ValueError):
    """Example inputs are needed to find the long skips, or the model cannot run on those that were given."""


class UnsupportedModelError(ScaleLongError, TypeError):
    """This kind of object cannot be scaled."""


class NotFreshError(ScaleLongError, RuntimeError):
    """Weights that would be overwritten do not look as if they were just initialised."""


class CancelledScalingWarning(UserWarning):
    """A normalisation right behind the merges cancels most of a constant scaling."""
