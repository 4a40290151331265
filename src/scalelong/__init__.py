"""Keeps UNets, U-ViTs and other networks with long skip connections training; shows why, and proves it.

The public names stand in `__init__.pyi`, once. They are loaded at first use, so that the command line can answer
without importing torch.
"""

from ._version import __version__ as __version__
from .lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
