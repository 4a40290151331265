"""The source of the functions that a module runs: from a running code to its function, and to the text of it.

The text must be the one that runs: a file can change after it was imported.
"""

import ast
import functools
import hashlib
import linecache
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ..errors import UnreachableSkipError
from .expressions import Operand, Position, edit_for, first_line, position_of

# From a running code to its function.


def function_of(module: nn.Module, code: CodeType) -> FunctionType | None:
    """The function of a module, its class or their decorators that runs this code."""
    return next((function for function in _functions(module) if function.__code__ is code), None)


def find_function(module: nn.Module, method: str, owner: str, digest: str) -> FunctionType:
    """The function that was planned. Plans of older versions know only the name of the method."""
    named = [
        function
        for function in _functions(module)
        if (function.__qualname__ == owner if owner else function.__name__ == method)
    ]
    for function in named:
        if syntax_tree(function) is not None and source_digest(function) == digest:
            return function
    found = "is not the one that was planned" if named else "is not there any more"
    raise UnreachableSkipError(
        f"the source of {type(module).__name__}.{method} {found}: find the skips again, after a reload if the source "
        f"was edited"
    )


def _functions(module: nn.Module) -> Iterator[FunctionType]:
    """All functions of a module: its methods, what it keeps itself, and what decorators wrap."""
    seen: set[int] = set()
    for value in attributes_of(module).values():
        yield from functions_in(value, seen)
    for chain in inherited(module).values():
        yield from chain[1:]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What can be exchanged for this module alone: its attributes and methods. `super().forward` finds others."""
    found: dict[str, Any] = {}
    for owner in (module, *(base for base in type(module).__mro__ if base not in (nn.Module, object))):
        found = {**{name: value for name, value in vars(owner).items() if not name.startswith("__")}, **found}
    return {name: value for name, value in found.items() if name not in ("_parameters", "_buffers", "_modules")}


def inherited(module: nn.Module) -> dict[str, list[FunctionType]]:
    """Methods that call `super()`, by name: each with those of the base classes that it reaches so."""
    found: dict[str, list[FunctionType]] = {}
    for base in type(module).__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            chain = found.setdefault(name, [])
            if isinstance(value, FunctionType) and (not chain or "__class__" in chain[-1].__code__.co_freevars):
                chain.append(value)
    own = vars(module)
    return {name: chain for name, chain in found.items() if len(chain) > 1 and name not in own and name[:2] != "__"}


def functions_in(value: Any, seen: set[int] | None = None, depth: int = 6) -> Iterator[FunctionType]:
    """The functions in a value, behind decorators, partials and tables."""
    seen = set() if seen is None else seen
    if depth == 0 or id(value) in seen or isinstance(value, Tensor | nn.Module | str | int | float | type):
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, FunctionType):
        yield value
        inside = [_content(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, MethodType | staticmethod):
        inside = [value.__func__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args]
    elif type(value) is dict and len(value) <= 256:
        inside = list(value.values())
    elif type(value) in (list, tuple) and len(value) <= 256:
        inside = list(value)
    for item in inside:
        yield from functions_in(item, seen, depth - 1)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


# From a function to its text. The text must be the one that runs: a file can change after it was imported.


def can_rewrite(module: nn.Module, code: CodeType, position: Position, operand: Operand) -> bool:
    """Whether there is such an expression in the source of the function that runs this code."""
    function = function_of(module, code)
    tree = syntax_tree(function) if function is not None else None
    if tree is None or not (tree.args.posonlyargs or tree.args.args):
        return False
    here = [node for node in ast.walk(tree) if position_of(node, tree) == position]
    return any(edit_for(node, operand) is not None for node in here)


def source_digest(function: FunctionType) -> str:
    tree = syntax_tree(function)
    if tree is None:
        raise UnreachableSkipError(
            f"there is no source of {function.__qualname__}, or it changed since it was imported"
        )
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def syntax_tree(function: FunctionType) -> ast.FunctionDef | None:
    """The definition of a function in its file; None if there is none that compiles to the code which runs."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    if not any(_same_code(found, code) for found in _compiled_functions(text, code.co_filename)):
        return None
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and first_line(node) == code.co_firstlineno:
            return node
    return None


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@functools.lru_cache(maxsize=256)
def _compiled_functions(text: str, filename: str) -> tuple[CodeType, ...]:
    try:
        whole = compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return ()
    found, front = [], [whole]
    while front:
        inner = [constant for constant in front.pop().co_consts if isinstance(constant, CodeType)]
        found += inner
        front += inner
    return tuple(found)


def _same_code(one: CodeType, other: CodeType) -> bool:
    if (one.co_name, one.co_firstlineno, one.co_names) != (other.co_name, other.co_firstlineno, other.co_names):
        return False
    if one.co_code != other.co_code or one.co_varnames != other.co_varnames or one.co_freevars != other.co_freevars:
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _same_code(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )
