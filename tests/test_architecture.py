"""The layout: which package imports which, and in what direction. `python tests/test_architecture.py` draws it.

Each package imports only what stands before it in LAYERS. Functions import only what is optional or slow. An import
under TYPE_CHECKING does not run, so it may look up, but each such look is listed.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "scalelong"

LAYERS = [
    ["_version", "lazy"],
    ["errors"],
    ["optional"],
    ["files", "console", "randomness"],
    ["config"],
    ["noise"],
    ["scaling", "tracing"],
    ["finding"],
    ["attaching"],
    ["models"],
    ["theory", "mup"],
    ["muon"],
    ["stability"],
    ["data"],
    ["diffusion"],
    ["runs"],
    ["evaluation"],
    ["training"],
    ["experiments"],
    ["report", "export"],
    ["cli"],
    ["__main__"],
]
"""From the ground to the roof. Packages of one layer do not import each other. The root itself holds names only."""

HEIGHT = {package: height for height, layer in enumerate(LAYERS) for package in layer}

# Looks upwards that only type checkers take, and why.
FOR_TYPES: dict[tuple[str, str], str] = {
    ("errors", "finding"): "AmbiguousSkipsError carries the plan with all candidates",
}

SLOW_BY_DESIGN = {"cli"}
"""These import the work where it is done, so that `--help` answers at once."""


class Import(NamedTuple):
    source: str  # a module, such as "finding.plan"
    target: str
    place: str  # "module", "function" or "types"

    @property
    def packages(self) -> tuple[str, str]:
        return self.source.partition(".")[0], self.target.partition(".")[0]


def modules() -> dict[str, Path]:
    """Names without "scalelong."; a package goes by its own name. The root is left out: it loads names on demand."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and "code" not in parts:  # export/code holds files for the exported folder
            found[name] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, place: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                inner = "function"
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "types"
            if isinstance(child, ast.ImportFrom):
                for target in targets(child):
                    yield Import(name, target, place)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.startswith("scalelong."):
                        yield Import(name, alias.name.removeprefix("scalelong."), place)
            yield from visit(child, inner)

    def targets(node: ast.ImportFrom) -> list[str]:
        if node.level == 0:
            if (node.module or "").partition(".")[0] != "scalelong":
                return []
            base = (node.module or "").removeprefix("scalelong").lstrip(".")
        else:
            parts = package.split(".") if package else []
            above = parts[: len(parts) - (node.level - 1)]
            base = ".".join([*above, *([node.module] if node.module else [])])
        inside = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
        return sorted({module if module in known else base for module in inside} - {""})

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "module")


def all_imports() -> list[Import]:
    known = modules()
    return [found for name, path in known.items() for found in imports_of(name, path, known)]


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


def is_upward(found: Import) -> bool:
    source, target = found.packages
    return source != target and HEIGHT[target] >= HEIGHT[source]


def test_every_package_has_its_place(imports):
    assert {name.partition(".")[0] for name in modules()} == set(HEIGHT)


def test_imports_go_down(imports):
    assert [found for found in imports if found.place != "types" and is_upward(found)] == []


def test_looks_upward_for_types_are_few(imports):
    upward = {found.packages for found in imports if found.place == "types" and is_upward(found)}
    assert upward == set(FOR_TYPES), "an import for types goes up, or an exception is no longer needed"


def test_functions_import_what_is_optional_or_slow(imports):
    """A module of our own is neither, except for the commands."""
    inside = [found for found in imports if found.place == "function"]
    assert [found for found in inside if found.packages[0] not in SLOW_BY_DESIGN] == []


MOST_PAST = 2
"""Imports past the `__init__` of a package that are left: two names that a module shares with what it holds."""


def past_doors(found: list[Import]) -> list[Import]:
    """Imports of a module of a different package, where its `__init__` could give the name."""
    return [entry for entry in found if entry.packages[0] != entry.packages[1] and "." in entry.target]


def test_names_come_through_the_doors_of_packages(imports):
    assert len(past_doors(imports)) <= MOST_PAST


def test_doors_give_names_to_type_checkers():
    """A package with py.typed gives only what is imported as `Name as Name`."""
    for door in (path for path in SOURCE.glob("*/__init__.py*") if path.parent.name != "cli"):
        for node in ast.parse(door.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                assert [alias.name for alias in node.names if alias.asname is None] == [], door


def test_no_module_imports_in_a_circle(imports):
    """Of all imports that run, at the top of a module or in a function."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        if found.place != "types" and found.source != found.target:
            graph.setdefault(found.source, set()).add(found.target)
    TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_the_wheel_does_not_import_the_workshops():
    """benchmarks/ and research/ stand beside the wheel; the command line finds them by name, in a checkout."""
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"benchmarks", "research", "tests"}, path


def direct_edges(found: list[Import]) -> set[tuple[str, str]]:
    """Package pairs, without those that follow from others: what one must see to understand the rest."""
    edges = {entry.packages for entry in found if entry.place != "types" and entry.packages[0] != entry.packages[1]}
    reach: dict[str, set[str]] = {}
    for package in sorted(HEIGHT, key=lambda package: HEIGHT[package]):
        below = {target for source, target in edges if source == package}
        reach[package] = below | {further for target in below for further in reach.get(target, ())}
    return {
        (source, target)
        for source, target in edges
        if not any(target in reach[other] for other in {t for s, t in edges if s == source} - {target})
    }


def mermaid(found: list[Import]) -> str:
    """The graph of packages: an arrow means "imports"; arrows that follow from others are left out."""
    hidden = {"_version", "__main__"}
    edges = sorted(pair for pair in direct_edges(found) if not hidden & set(pair))
    return "\n".join(["graph BT", *(f"  {source} --> {target}" for source, target in edges)])


if __name__ == "__main__":
    everything = all_imports()
    across = [entry for entry in everything if entry.packages[0] != entry.packages[1]]
    print(f"{' < '.join(', '.join(layer) for layer in LAYERS)}\n\n{mermaid(everything)}\n")
    print(f"{len(past_doors(everything))} of {len(across)} imports from other packages go past a door")
