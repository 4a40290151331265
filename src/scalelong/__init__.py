"""Stable and faster training of U-shaped networks by scaling their long skip connections.

The public names stand in `__init__.pyi`, once. They are loaded at first use, so that the command line can answer
without importing torch.
"""

from ._version import __version__ as __version__
from .door import door

__getattr__, __dir__, __all__ = door(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
