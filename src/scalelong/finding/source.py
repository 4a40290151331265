"""The source of the functions that a module runs, and how it is changed so that what it merges is scaled.

`a + b` becomes `a + __scalelong__(0, b)`. The text must be the one that runs: a file can change after it was imported.
"""

import ast
import copy
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
RUN = "__scalelong__"
"""What the new code calls."""
# Keywords of torch's additions, by the number of the operand.
_KEYWORDS = {"input": 0, "self": 0, "other": 1, "end": 1, "tensor1": 1, "tensor2": 2}


def first_line(function: Any) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def position_of(node: Any, tree: Any) -> Position | None:
    """Relative to the first line of the function, so that text above it does not matter."""
    if not hasattr(node, "col_offset"):
        return None
    first = first_line(tree)
    return node.lineno - first, node.end_lineno - first, node.col_offset, node.end_col_offset


def insert_first(function: Any, statement: ast.stmt) -> None:
    function.body.insert(1 if ast.get_docstring(function) is not None else 0, statement)


class Editor(ast.NodeTransformer):
    """Changes the sites, and what a compiler inside a class body would do to private names."""

    def __init__(self, tree: ast.FunctionDef, sites: list[EditSite], class_name: str, super_name: str = "") -> None:
        self.tree, self.sites, self.class_name = copy.copy(tree), sites, class_name
        self.super_name = super_name
        """If given: `super()` becomes a call of this function with what `super()` gives."""
        self.missing = set(range(len(sites)))

    def visit(self, node: ast.AST) -> Any:
        position = position_of(node, self.tree)
        numbers = [number for number, (place, _) in enumerate(self.sites) if place == position]
        visited: Any = super().visit(node)
        # An operand is changed where it stands, before its expression is wrapped or gets a statement before it.
        for number in sorted(numbers, key=lambda n: (self.sites[n][1] is None, self.sites[n][1] == 0)):
            made = scale_operand(visited, self.sites[number][1], number)
            if made is not None:
                visited = made
                self.missing.discard(number)
        return visited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = set(self.missing)
        self.generic_visit(node)
        if self.missing != before and position_of(node, self.tree) != position_of(self.tree, self.tree):
            # The default is evaluated where the function is defined: it knows this definition from the others.
            node.args.kwonlyargs.append(ast.arg(RUN))
            node.args.kw_defaults.append(ast.parse(f"{RUN}.function()", mode="eval").body)
            insert_first(node, ast.parse(f"{RUN} = {RUN}.start()").body[0])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_super = isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args
        if is_super and self.super_name:
            return ast.copy_location(ast.Call(ast.Name(self.super_name, ast.Load()), [node], []), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        node.attr = self._mangled(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._mangled(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation, node.arg = None, self._mangled(node.arg)
        return node

    def _mangled(self, name: str) -> str:
        private = name.startswith("__") and not name.endswith("__") and self.class_name
        return f"_{self.class_name.lstrip('_')}{name}" if private else name


def scale_operand(node: Any, operand: Operand, number: int) -> Any:
    """Scale an operand of this expression by the site of this number: what stands in its place then.

    None if it has no such operand.
    """
    if isinstance(node, ast.BinOp) and operand in (0, 1):
        side = "left" if operand == 0 else "right"
        setattr(node, side, _call("", number, getattr(node, side)))
        return node
    if isinstance(node, ast.AugAssign) and operand == 1:
        node.value = _call("", number, node.value)
        return node
    if isinstance(node, ast.AugAssign) and operand == 0:  # `skip += x`: the skip is scaled in place before
        load = copy.deepcopy(node.target)
        load.ctx = ast.Load()
        return [ast.Expr(_call("in_place", number, load)), node]
    if not isinstance(node, ast.Call):
        return None
    if operand is None:
        return _call("", number, node)
    if isinstance(operand, Argument):
        return _scale_argument(node, operand, number)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "reduce" or (name == "sum" and isinstance(node.func, ast.Name)):
        return _scale_summand(node, operand, number, 0 if name == "sum" else 1)
    return _scale_in_call(node, operand, number, name)


def _scale_argument(node: ast.Call, argument: Argument, number: int) -> ast.Call | None:
    for given in node.keywords:
        if argument.keyword and given.arg == argument.keyword:
            given.value = _call("", number, given.value)
            return node
    position = -1 if argument.position is None else argument.position
    if position not in _plain_positions(node):
        return None
    node.args[position] = _call("", number, node.args[position])
    return node


def _scale_summand(node: ast.Call, operand: int, number: int, place: int) -> ast.Call | None:
    """`sum(list, start)`, `functools.reduce(add, list, start)`."""
    start = next((given for given in node.keywords if given.arg in ("start", "initial")), None)
    from_start = start is not None or len(node.args) > place + 1
    if place not in _plain_positions(node) or operand not in (0, 1):
        return None
    node.args[place] = _call("summands", number, ast.Constant(operand), node.args[place], ast.Constant(from_start))
    if start is not None and operand == 0:
        start.value = _call("start_of_sum", number, start.value)
    elif from_start and operand == 0:
        node.args[place + 1] = _call("start_of_sum", number, node.args[place + 1])
    return node


def _scale_in_call(node: ast.Call, operand: int, number: int, name: str) -> ast.Call | None:
    """`x.add(skip)`, `torch.add(x, skip)`, `self.functional.add(x, skip)`: which of these it is, shows when it runs."""
    by_keyword = [given for given in node.keywords if _KEYWORDS.get(given.arg or "") == operand]
    positions = _plain_positions(node)
    if isinstance(node.func, ast.Attribute):
        in_place = ast.Constant(name.endswith("_") and not name.endswith("__"))
        node.func.value = _call("receiver", number, ast.Constant(operand), node.func.value, in_place)
    elif not by_keyword and not positions:
        return None
    for given in by_keyword:
        given.value = _call("", number, given.value)
    for place in () if by_keyword else positions:
        node.args[place] = _call("argument", number, ast.Constant(operand), ast.Constant(place), node.args[place])
    return node


def _plain_positions(node: ast.Call) -> list[int]:
    """The arguments whose position is known: those before any `*values`."""
    starred = [place for place, given in enumerate(node.args) if isinstance(given, ast.Starred)]
    return list(range(min(starred, default=len(node.args))))


def _call(method: str, number: int, *arguments: Any) -> ast.Call:
    function: ast.expr = ast.Name(RUN, ast.Load())
    if method:
        function = ast.Attribute(function, method, ast.Load())
    return ast.Call(function, [ast.Constant(number), *arguments], [])


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
        inside = [value.__func__]
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
    """True if there is such an expression in the source of the function."""
    tree = syntax_tree(function)
    if tree is None or not (tree.args.posonlyargs or tree.args.args):
        return False
    here = [node for node in ast.walk(tree) if position_of(node, tree) == position]
    return any(scale_operand(copy.deepcopy(node), operand, 0) is not None for node in here)


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
