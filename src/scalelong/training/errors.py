"""What can go wrong in a run, by name."""

from ..errors import ScaleLongError


class RunFolderError(ScaleLongError, ValueError):
    """The run folder holds something else, or a run with another configuration or other data."""


class RunLockedError(ScaleLongError, RuntimeError):
    """Another process works on the run folder."""


class CheckpointError(ScaleLongError, RuntimeError):
    """A checkpoint cannot be written or read."""


class NonFiniteError(ScaleLongError, ArithmeticError):
    """The loss or the gradient became infinite or NaN. The message says where."""
