"""Images for training, by number: folders, archives, tables, arrays, embedded sets, and data set objects.

load          load_data: one function for every source
dataset       what every source becomes: ImageData, annotations
workers       batches, fetched here or by worker processes
decode        from the bytes of an image file to pixels
files         folders and archives of images; parts such as "train" and "test"
annotations   labels and captions
stream        encoded images by number; decoded into memory, or when they are fetched
mapped        the image cache
tables        Hugging Face's `datasets`: hub, parquet, saved folders
objects       any Dataset object
builtin       digits, garments and drawn shapes, which come with the package
"""

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
from .builtin import COLOURS as COLOURS, PLACES as PLACES, SHAPES as SHAPES, caption as caption
from .dataset import (
    Annotations as Annotations,
    Batch as Batch,
    BrokenImage as BrokenImage,
    ImageData as ImageData,
    MemoryData as MemoryData,
    require_both_sides as require_both_sides,
    split_rows as split_rows,
)
from .decode import (
    UndecodableError as UndecodableError,
    open_image as open_image,
)
from .load import (
    DATASETS as DATASETS,
    load_data as load_data,
)
from .mapped import MappedData as MappedData
from .workers import (
    batches as batches,
    to_float as to_float,
)
