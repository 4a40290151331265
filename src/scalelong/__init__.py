"""Stable and faster training of U-shaped networks by scaling their long skip connections.

The public names stand in `__init__.pyi`, once. They are loaded at first use, so that the command line can answer
without importing torch.
"""

import ast
import pkgutil
from importlib import import_module
from typing import Any

from ._version import __version__ as __version__

_HOMES = {
    alias.asname or alias.name: node.module
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
