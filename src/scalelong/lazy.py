"""A package whose names are written once, in its `__init__.pyi`, and loaded at first use.

    __getattr__, __dir__, __all__ = lazy_exports(__name__)

Type checkers read the stub, and so does this. Such a package can be imported without torch, as long as the
names that are used need none.
"""

import ast
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from its stub."""
    homes = {
        alias.asname or alias.name: node.module
        for node in ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = sorted(homes)

    def load(name: str) -> Any:
        if name in homes:
            if homes[name] is None:  # `from . import mup`: a package as a whole
                return import_module(f".{name}", package)
            return getattr(import_module(f".{homes[name]}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, lambda: names, names
