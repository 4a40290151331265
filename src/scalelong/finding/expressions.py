"""One function's syntax tree, changed so that what it merges is scaled: `a + b` becomes `a + __scalelong__(0, b)`."""

import ast
import copy
from collections.abc import Callable
from typing import Any

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
        # An operand is changed where it stands, before its expression is wrapped as a whole.
        for number in sorted(numbers, key=lambda n: self.sites[n][1] is None):
            edit = edit_for(node, self.sites[number][1])
            if edit is not None:
                visited = edit(visited, number)
                self.missing.discard(number)
        return visited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = set(self.missing)
        self.generic_visit(node)
        if self.missing != before and position_of(node, self.tree) != position_of(self.tree, self.tree):
            # The default is evaluated where the function is defined: it knows this definition from the others.
            node.args.kwonlyargs.append(ast.arg(RUN))
            node.args.kw_defaults.append(_expression(f"{RUN}.function()"))
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


Edit = Callable[[Any, int], Any]
"""Changes a node for a site of this number, and returns what stands in its place."""


def edit_for(node: ast.AST, operand: Operand) -> Edit | None:
    """How to scale an operand of this expression; None if it has no such operand."""
    if operand is None:
        return (lambda visited, number: _call("", number, visited)) if isinstance(node, ast.Call) else None
    if isinstance(operand, Argument):
        return _edit_argument(node, operand)
    if isinstance(node, ast.BinOp) and operand in (0, 1):
        return _edit_field(("left", "right")[operand])
    if isinstance(node, ast.AugAssign):
        return _edit_field("value") if operand == 1 else _edit_target if operand == 0 else None
    return _edit_call(node, operand) if isinstance(node, ast.Call) else None


def _edit_field(name: str) -> Edit:
    def edit(visited: Any, number: int) -> Any:
        setattr(visited, name, _call("", number, getattr(visited, name)))
        return visited

    return edit


def _edit_target(visited: Any, number: int) -> list[ast.stmt]:
    """`skip += x`: the skip is scaled in place before."""
    load = copy.deepcopy(visited.target)
    load.ctx = ast.Load()
    return [ast.Expr(_call("in_place", number, load)), visited]


def _edit_call(node: ast.Call, operand: int) -> Edit | None:
    """`x.add(skip)`, `torch.add(x, skip)`, `self.functional.add(x, skip)`, `sum([x, skip])`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    by_keyword = [k for k, given in enumerate(node.keywords) if _KEYWORDS.get(given.arg or "") == operand]
    is_method = isinstance(node.func, ast.Attribute)
    positions = _plain_positions(node)

    def edit(visited: Any, number: int) -> Any:
        if is_method:
            in_place = ast.Constant(name.endswith("_") and not name.endswith("__"))
            visited.func.value = _call("receiver", number, ast.Constant(operand), visited.func.value, in_place)
        for place in by_keyword:
            visited.keywords[place].value = _call("", number, visited.keywords[place].value)
        for place in () if by_keyword else positions:
            visited.args[place] = _call(
                "argument", number, ast.Constant(operand), ast.Constant(place), visited.args[place]
            )
        return visited

    if (name == "sum" and not is_method) or name == "reduce":
        return _edit_sum(node, operand, 0 if name == "sum" else 1)
    return edit if by_keyword or is_method or positions else None


def _edit_sum(node: ast.Call, operand: int, place: int) -> Edit | None:
    """`sum(list, start)`, `functools.reduce(add, list, start)`."""
    keywords = [k for k, given in enumerate(node.keywords) if given.arg in ("start", "initial")]
    from_start = bool(keywords) or len(node.args) > place + 1
    if place not in _plain_positions(node) or operand not in (0, 1):
        return None

    def edit(visited: Any, number: int) -> Any:
        values = visited.args[place]
        visited.args[place] = _call("summands", number, ast.Constant(operand), values, ast.Constant(from_start))
        if from_start and operand == 0:
            if keywords:
                visited.keywords[keywords[0]].value = _call("start_of_sum", number, visited.keywords[keywords[0]].value)
            else:
                visited.args[place + 1] = _call("start_of_sum", number, visited.args[place + 1])
        return visited

    return edit


def _edit_argument(node: ast.AST, argument: Argument) -> Edit | None:
    if not isinstance(node, ast.Call):
        return None
    # checkpoint(function, x, skip) passes its arguments on, after the function.
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    shift = argument.by_either and "checkpoint" in called

    def wrapped(value: Any, number: int) -> ast.Call:
        if argument.item is not None:
            return _call("item", number, ast.Constant(argument.item), value)
        return _call("", number, value)

    for given, found in enumerate(node.keywords):
        if argument.keyword and found.arg == argument.keyword:

            def edit_keyword(visited: Any, number: int, given: int = given) -> Any:
                visited.keywords[given].value = wrapped(visited.keywords[given].value, number)
                return visited

            return edit_keyword
    position = -1 if argument.position is None else argument.position + shift
    if position not in _plain_positions(node):
        return None

    def edit_position(visited: Any, number: int) -> Any:
        visited.args[position] = wrapped(visited.args[position], number)
        return visited

    return edit_position


def _plain_positions(node: ast.Call) -> list[int]:
    """The arguments whose position is known: those before any `*values`."""
    starred = [place for place, given in enumerate(node.args) if isinstance(given, ast.Starred)]
    return list(range(min(starred, default=len(node.args))))


def _call(method: str, number: int, *arguments: Any) -> ast.Call:
    function: ast.expr = ast.Name(RUN, ast.Load())
    if method:
        function = ast.Attribute(function, method, ast.Load())
    return ast.Call(function, [ast.Constant(number), *arguments], [])


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
