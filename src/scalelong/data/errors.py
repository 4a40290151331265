"""What can be wrong with data, by name. Each error says what was looked for, what was found, and what to do."""

from ..errors import ScaleLongError


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
