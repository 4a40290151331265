"""The source of the functions that a module runs: from a running code to its function, and from that to its text."""

import ast
import functools
import hashlib
import linecache
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ..errors import UnreachableSkipError
from ..tracing import Argument

Position = tuple[int, int, int, int]
Operand = int | Argument | None
"""What is scaled: the operand of an addition with this number, an argument of a call, or (None) the value."""
EditSite = tuple[Position, Operand]
"""An expression, and what in it is scaled."""


def first_line(function: Any) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def position_of(node: Any, tree: Any) -> Position | None:
    """Relative to the first line of the function, so that text above it does not matter."""
    if not hasattr(node, "col_offset"):
        return None
    first = first_line(tree)
    return node.lineno - first, node.end_lineno - first, node.col_offset, node.end_col_offset


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
    """Attributes and methods, which can be exchanged for this module alone. `super().forward` finds others."""
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
    """The functions in a value, also inside decorators, partials and tables."""
    seen = set() if seen is None else seen
    if depth == 0 or id(value) in seen or isinstance(value, Tensor | nn.Module | str | int | float | type):
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, FunctionType):
        yield value
        inside = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    elif isinstance(value, MethodType | staticmethod):
        inside, depth = [value.__func__], depth + 1  # no deeper than its function
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args]
    elif type(value) in (dict, list, tuple) and len(value) <= 256:
        inside = value.values() if type(value) is dict else value
    for item in inside:
        yield from functions_in(item, seen, depth - 1)


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


# From a function to its text. The text must be the one that runs: a file can change after it was imported.


def can_rewrite(function: FunctionType, position: Position, operand: Operand) -> bool:
    """True if there is an expression in the source of the function with such an operand."""
    tree = syntax_tree(function)
    if tree is None or not (tree.args.posonlyargs or tree.args.args):
        return False
    return any(has_operand(node, operand) for node in ast.walk(tree) if position_of(node, tree) == position)


def has_operand(node: ast.AST, operand: Operand) -> bool:
    """Which of its arguments are the operands of a call, shows when it runs."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return operand in (0, 1)
    is_sum = isinstance(node, ast.Call) and isinstance(operand, int) and list_of_a_sum(node) is not None
    return operand in (0, 1) if is_sum else isinstance(node, ast.Call)


def list_of_a_sum(call: ast.Call) -> int | None:
    """The position of the list in `sum(list)` or `functools.reduce(add, list)`; None in other calls."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "reduce":
        return 1
    return 0 if name == "sum" and isinstance(call.func, ast.Name) else None


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
    if code not in _compiled_functions(text, code.co_filename):
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
