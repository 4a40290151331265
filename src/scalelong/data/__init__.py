"""Images for training: folders, archives, tables, arrays, and two sets that come with the package."""

from ..errors import (
    BrokenImagesError as BrokenImagesError,
    DataError as DataError,
    DataNotFoundError as DataNotFoundError,
    DuplicateNameError as DuplicateNameError,
    LabelError as LabelError,
    MetadataError as MetadataError,
    MixedSizesError as MixedSizesError,
    NoImagesError as NoImagesError,
    UnknownSplitError as UnknownSplitError,
    UnreadableDataError as UnreadableDataError,
    UnsafeArchiveError as UnsafeArchiveError,
)
from .dataset import (
    Batch as Batch,
    BrokenImage as BrokenImage,
    ImageData as ImageData,
    MemoryData as MemoryData,
    batches as batches,
    require_both_sides as require_both_sides,
    to_float as to_float,
)
from .load import (
    DATASETS as DATASETS,
    load_data as load_data,
)
from .mapped import MappedData as MappedData
