"""What can go wrong while measuring."""

from scalelong.errors import ScaleLongError


class BenchmarkError(ScaleLongError, RuntimeError):
    """A contender failed, or a file of results cannot be used."""


class OfficialCheckoutError(ScaleLongError, ValueError):
    """The folder given as the authors' code is not a checkout of it, or lacks a package."""
