"""Images from a trained run: in memory, or into a folder that can be continued."""

from ..diffusion.images import ImageMaker, Request, requests
from ..diffusion.solvers import SampleSettings
from .fill import fill_folder, folder_name
from .folder import SampleFolder, SampleFolderError

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
