"""Why a model cannot be exported."""

from ..errors import ScaleLongError


class ExportError(ScaleLongError, ValueError):
    """The model cannot be written in this format, or not at this place; the message says why."""
