"""Images for training: folders, archives, tables, arrays, and two sets that come with the package."""

from ..errors import (
    BrokenImagesError,
    DataError,
    DataNotFoundError,
    DuplicateNameError,
    LabelError,
    MetadataError,
    MixedSizesError,
    NoImagesError,
    UnknownSplitError,
    UnreadableDataError,
    UnsafeArchiveError,
)
from .dataset import Batch, BrokenImage, ImageData, MemoryData, batches, to_float
from .load import DATASETS, load_data

__all__ = [
    "DATASETS",
    "Batch",
    "BrokenImage",
    "BrokenImagesError",
    "DataError",
    "DataNotFoundError",
    "DuplicateNameError",
    "ImageData",
    "LabelError",
    "MemoryData",
    "MetadataError",
    "MixedSizesError",
    "NoImagesError",
    "UnknownSplitError",
    "UnreadableDataError",
    "UnsafeArchiveError",
    "batches",
    "load_data",
    "to_float",
]
