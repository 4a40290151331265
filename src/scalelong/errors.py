"""Named errors. Each says what was looked for, what was found, and what to do."""


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
