"""Optional packages, and objects by "package.module:name".

`import scalelong` needs torch alone. Code that needs more asks for it where it is used; the error names the extra to
install:

    plt = needs("matplotlib.pyplot", "report", "drawing figures")
"""

import pkgutil
import sys
from importlib import import_module
from typing import Any

from .errors import InvalidConfigError, MissingDependencyError, ScaleLongError

# The name to install, where it is not the name to import.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "pillow_heif": "pillow-heif",
    "torch_fidelity": "torch-fidelity",
    "yaml": "pyyaml",
}


def needs(module: str, extra: str | None, purpose: str) -> Any:
    """An optional module, or MissingDependencyError: "PURPOSE needs the package ..., install scalelong[EXTRA]".

    The extra has the package (tests/test_packaging.py); None says that no extra has it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # A package that is installed and lacks the module, or fails on the way: the error gives the reason.
        absent = (error.name or "").partition(".")[0] == package and sys.modules.get(package) is None
        named = DISTRIBUTIONS.get(package, package)
        raise MissingDependencyError(named, extra, purpose, None if absent else str(error)) from error


def load_object(spec: str, what: str = "object", error: type[ScaleLongError] = InvalidConfigError) -> Any:
    """The object that "package.module:name" names; the name may have dots. What fails is raised as `error`."""
    if not all(spec.partition(":")):
        raise error(f"unknown {what} {spec!r}: it must look like package.module:name")
    try:
        return pkgutil.resolve_name(spec)
    except Exception as failure:  # a module of the user's own may fail in any way while it is imported
        raise error(
            f"the {what} {spec!r} cannot be imported: {type(failure).__name__}: {failure}. Is its folder in "
            f"PYTHONPATH? Check the name"
        ) from failure
