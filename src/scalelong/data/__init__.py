"""Images for training, by number: folders, archives, tables, arrays, embedded sets, and data set objects.

load          load_data: one function for every source; public sets by name, and Hugging Face's `datasets`
dataset       what every source becomes: ImageData, annotations; batches of it
decode        from the bytes of an image file to pixels
folders       folders and zips of images: parts such as "train" and "test", labels, captions
stream        decoded into memory, when they are fetched, or once into the image cache
objects       any Dataset object, and tables of `datasets`
builtin       digits, garments, portraits and drawn shapes, which come with the package
"""

from ..errors import (
    BrokenImagesError as BrokenImagesError,
    DataError as DataError,
    DataNotFoundError as DataNotFoundError,
    MetadataError as MetadataError,
    MixedSizesError as MixedSizesError,
    UnreadableDataError as UnreadableDataError,
    UnsafeArchiveError as UnsafeArchiveError,
)
from .dataset import (
    Annotations as Annotations,
    Batch as Batch,
    BrokenImage as BrokenImage,
    ImageData as ImageData,
    MemoryData as MemoryData,
    batches as batches,
    require_both_sides as require_both_sides,
    split_rows as split_rows,
    to_float as to_float,
)
from .decode import UndecodableError as UndecodableError, open_image as open_image
from .load import DATASETS as DATASETS, load_data as load_data
from .stream import MappedData as MappedData
