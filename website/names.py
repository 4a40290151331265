"""The public names of scalelong: those of the root, and those of each package's `__init__`.

They are read, not imported, so that the site is built without torch.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "scalelong"

_TITLES = {
    "finding": "Long skips: find",
    "attaching": "Long skips: scale, start, fold, tune",
    "scaling": "Scaling methods",
    "models": "Networks",
    "stability": "Stability: monitor, guard, diagnosis, range",
    "muon": "Muon",
    "mup": "Maximal update parametrisation (μP)",
    "theory": "Theory",
    "data": "Data",
    "diffusion": "Diffusion: conditions, inputs, samplers",
    "runs": "Runs: configuration, folder, checkpoint",
    "training": "Training",
    "evaluation": "Evaluation",
    "report": "Report",
    "export": "Export",
    "errors": "Errors and warnings",
}
"""The packages with names for users, in the order of the reference, and the titles of their pages. A package that is
not here is listed after these, by the first words of its docstring."""

MODULES = {"errors", "muon"}
"""These are one file each."""
INSIDE = {"cli", "config", "experiments", "files", "tracing"}
"""Packages without names for users: they serve the others."""


def _packages() -> dict[str, str]:
    """The packages of the reference that are there, with their titles."""
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | MODULES
    titles = {name: title for name, title in _TITLES.items() if name in there}
    for name in sorted(there - set(titles) - INSIDE):
        docstring = ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text())) or name
        titles[name] = re.split(r"[.:;,\n]", docstring)[0]
    return titles


PACKAGES = _packages()


@dataclass(frozen=True, kw_only=True)
class PublicName:
    """A name, as users write it."""

    path: str
    """"scalelong.find_skips", or "scalelong.data.load_data" for one that the root does not have."""
    package: str
    """The package that defines it: the page that it stands on."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@cache
def root_names() -> tuple[PublicName, ...]:
    """The names of `import scalelong`, from its stub. Whole packages (`sl.mup`) have a page of their own."""
    homes = _imports(SOURCE / "__init__.pyi")
    return tuple(
        PublicName(path=f"scalelong.{name}", package=home.split(".")[0])
        for name, home in homes.items()
        if home and not name.startswith("_")
    )


@cache
def package_names(package: str) -> tuple[PublicName, ...]:
    """The classes and functions of a package that explain themselves and that the root does not have.

    A package also gives constants and helpers to the other packages; these have no docstring, and no page.
    """
    at_root = {name.name for name in root_names()}
    if package in MODULES:
        names = [n.name for n in ast.parse((SOURCE / f"{package}.py").read_text()).body if isinstance(n, ast.ClassDef)]
    else:
        stub = SOURCE / package / "__init__.pyi"
        homes = _imports(stub if stub.exists() else stub.with_suffix(".py"))
        # What comes from another package stands on that package's page.
        own = {name: home for name, home in homes.items() if not home.startswith(".") and (SOURCE / package).is_dir()}
        names = [name for name, home in own.items() if name in _explained(SOURCE / package / f"{home}.py")]
    return tuple(
        PublicName(path=f"scalelong.{package}.{name}", package=package)
        for name in names
        if not name.startswith("_") and name not in at_root
    )


@cache
def public_names() -> tuple[PublicName, ...]:
    return (*root_names(), *(name for package in PACKAGES for name in package_names(package)))


def _imports(init: Path) -> dict[str, str]:
    """Public names of a package, and the module that each is imported from."""
    return {
        alias.asname or alias.name: "." * (node.level - 1) + (node.module or "")
        for node in ast.parse(init.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }


@cache
def _explained(module: Path) -> set[str]:
    """Names of classes and functions with a docstring."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {n.name for n in ast.parse(module.read_text()).body if isinstance(n, kinds) and ast.get_docstring(n)}
