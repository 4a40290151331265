"""Images from a trained run: in memory, or into a folder that can be continued."""

from .fill import fill_folder, folder_name
from .folder import SampleFolder, SampleFolderError
from .images import ImageMaker, Request, requests
from .settings import SampleSettings

__all__ = [
    "ImageMaker",
    "Request",
    "SampleFolder",
    "SampleFolderError",
    "SampleSettings",
    "fill_folder",
    "folder_name",
    "requests",
]
