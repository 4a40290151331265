"""Scale inside a method: for merges that are no argument or result of any module, such as `x = self.up(x) + skip`.

The method's syntax tree is changed at the merge and compiled anew, and the module gets a class of its own that
inherits from its class. The class says how to build itself again, so that copies and pickles keep the scaling.
"""

import ast
import copy
import copyreg
import hashlib
import inspect
import linecache
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..errors import SkipMismatchError, UnreachableSkipError
from .actions import Action

Position = tuple[int, int, int, int]
Operand = int | str | None
"""Of an addition: its number. Of a call: "#1", a keyword, or "#1=keyword" for either. None: the value."""
Spot = tuple[Position, Operand]
"""An expression, and what in it is scaled."""
Recipe = tuple[tuple[str, str, tuple[Spot, ...]], ...]
"""For each method: its name, a hash of its source, and the spots."""


_ADDITIONS = ("add", "sub", "lerp")


class Invocation:
    """One run of a rewritten method. It counts, because an expression in a loop merges another skip each time."""

    def __init__(self, actions: list[list[Action | None]]) -> None:
        self.actions = actions
        self.executions = [0] * len(actions)

    def __call__(self, spot: int, tensor: Tensor) -> Tensor:
        execution = self.executions[spot]
        self.executions[spot] = execution + 1
        if execution >= len(self.actions[spot]):
            raise SkipMismatchError(
                f"a merge runs more often than in the forward that was planned ({len(self.actions[spot])} times); "
                f"unscale_ the model and scale it with example_inputs like these"
            )
        action = self.actions[spot][execution]
        return tensor if action is None else action(tensor)


def begin(module: nn.Module, method: str) -> Invocation:
    return Invocation(module._scalelong_actions[method])  # pyright: ignore[reportIndexIssue, reportArgumentType]


def can_rewrite(module: nn.Module, code: CodeType, position: Position, operand: Operand) -> bool:
    """Whether there is such an expression in the source of the module."""
    function = _find_function(type(module), code)
    tree = _syntax_tree(code) if function is not None else None
    if function is None or tree is None:
        return False
    here = [node for node in ast.walk(tree) if _position(node, tree) == position]
    if operand is None:
        return any(isinstance(node, ast.Call) for node in here)
    return any(_operand(node, operand, function.__globals__) is not None for node in here)


def rewrite_(
    module: nn.Module, spots: dict[str, tuple[Spot, ...]], actions: dict[str, list[list[Action | None]]]
) -> None:
    """Give the module a class whose methods call the actions at the spots."""
    original = type(module)
    recipe = tuple((method, source_digest(original, method), places) for method, places in sorted(spots.items()))
    module.__class__ = _rewritten_class(original, recipe)
    module.__dict__["_scalelong_actions"] = actions


def restore_(module: nn.Module) -> None:
    module.__class__ = type(module).__dict__["_scalelong_original"]
    del module.__dict__["_scalelong_actions"]


def require_restorable(module: nn.Module) -> None:
    if "_scalelong_original" not in type(module).__dict__:
        raise UnreachableSkipError(
            f"{type(module).__name__} was given another class after its long skips were scaled (by FSDP, perhaps); "
            f"its scaling cannot be undone"
        )


def require_same_source(module: nn.Module, method: str, digest: str) -> None:
    if source_digest(type(module), method) != digest:
        raise UnreachableSkipError(
            f"the source of {type(module).__name__}.{method} is not the one that was planned: find the skips again"
        )


def is_rewritten(module: nn.Module) -> bool:
    return "_scalelong_actions" in module.__dict__


@cache
def _rewritten_class(original: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce,
        "_scalelong_original": original,
        "_scalelong_recipe": recipe,
    }
    for method, _, spots in recipe:
        namespace[method] = _rewritten_method(original, method, spots)
    metaclass: Any = type(original)
    return metaclass(original.__name__, (original,), namespace)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    original: Any = type(self)._scalelong_original  # pyright: ignore[reportAttributeAccessIssue]
    constructor, _, *rest = original.__reduce_ex__(self, protocol)
    if constructor is not copyreg.__newobj__:  # pyright: ignore[reportAttributeAccessIssue]
        raise UnreachableSkipError(f"{type(self).__name__} copies itself in its own way: unscale_ the model first")
    return (_rebuild, (original, type(self)._scalelong_recipe), *rest)  # pyright: ignore[reportAttributeAccessIssue]


def _rebuild(original: type[nn.Module], recipe: Recipe) -> nn.Module:
    for method, digest, _ in recipe:
        if source_digest(original, method) != digest:
            raise UnreachableSkipError(
                f"the source of {original.__name__}.{method} has changed since this model was saved: its scaled skips "
                f"cannot be placed. Load the weights into a new model and scale that"
            )
    rewritten = _rewritten_class(original, recipe)
    return rewritten.__new__(rewritten)


def _rewritten_method(original: type[nn.Module], method: str, spots: tuple[Spot, ...]) -> Any:
    owner, function = _find_method(original, method)
    tree = copy.deepcopy(_syntax_tree(function.__code__))
    assert tree is not None
    editor = _Editor(tree, spots, function.__globals__, owner.__name__)
    body = editor.visit(tree)
    if editor.missing:
        raise UnreachableSkipError(f"the merges of {original.__name__}.{method} are not where they were planned")
    decorators, body.decorator_list, body.returns = body.decorator_list, [], None
    arguments = body.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    first = (arguments.posonlyargs + arguments.args)[0].arg
    at = 1 if ast.get_docstring(body) is not None else 0
    body.body.insert(at, ast.parse(f"__scalelong__ = __scalelong_begin__({first}, {method!r})").body[0])
    free = function.__code__.co_freevars
    factory = ast.parse(f"def factory(__scalelong_begin__, {', '.join(free)}):\n    return {body.name}")
    factory.body[0].body.insert(0, body)  # pyright: ignore[reportAttributeAccessIssue]
    names: dict[str, Any] = {}
    exec(
        compile(ast.fix_missing_locations(factory), function.__code__.co_filename, "exec"), function.__globals__, names
    )
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    rewritten = names["factory"](begin, *cells)
    rewritten.__defaults__, rewritten.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    rewritten.__annotations__, rewritten.__qualname__ = dict(function.__annotations__), function.__qualname__
    for decorator in reversed(decorators):
        expression = ast.fix_missing_locations(ast.Expression(decorator))
        rewritten = eval(compile(expression, function.__code__.co_filename, "eval"), function.__globals__)(rewritten)
    return rewritten


class _Editor(ast.NodeTransformer):
    def __init__(self, tree: ast.AST, spots: tuple[Spot, ...], names: dict[str, Any], class_name: str) -> None:
        self.tree, self.spots, self.names, self.class_name = copy.copy(tree), spots, names, class_name
        self.missing = set(range(len(spots)))

    def visit(self, node: ast.AST) -> Any:
        position = _position(node, self.tree)
        found = [(number, operand) for number, (place, operand) in enumerate(self.spots) if place == position]
        visited: Any = super().visit(node)
        for number, operand in found:
            if operand is None and isinstance(node, ast.Call):
                visited = _wrapped(number, visited)
                self.missing.discard(number)
            elif operand is not None and (place := _operand(node, operand, self.names)) is not None:
                _replace(place, number)
                self.missing.discard(number)
        return visited

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
        # Private names, __x, are written out as the compiler does inside of the class.
        private = name.startswith("__") and not name.endswith("__")
        return f"_{self.class_name.lstrip('_')}{name}" if private else name


def _wrapped(number: int, expression: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("__scalelong__", ast.Load()), [ast.Constant(number), expression], [])


def _replace(place: tuple[Any, Any], number: int) -> None:
    owner, key = place
    if isinstance(owner, list):
        owner[key] = _wrapped(number, owner[key])
    else:
        setattr(owner, key, _wrapped(number, getattr(owner, key)))


def _operand(node: ast.AST, operand: int | str, names: dict[str, Any]) -> tuple[Any, Any] | None:
    """Where an expression holds an operand: (a node, its field) or (a list, a position)."""
    if isinstance(operand, str):
        return _call_argument(node, operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return node, ("left", "right")[operand]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        return (node, "value") if operand == 1 else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.rstrip("_") in _ADDITIONS:
        of_module = isinstance(node.func.value, ast.Name) and isinstance(names.get(node.func.value.id), ModuleType)
        if not of_module and operand == 0:
            return node.func, "value"
        return _call_argument(node, f"#{operand if of_module else operand - 1}")
    return None


def _call_argument(node: ast.AST, argument: str) -> tuple[Any, Any] | None:
    if not isinstance(node, ast.Call):
        return None
    place, _, keyword = (
        argument.rpartition("=") if argument.startswith("#") and "=" in argument else (argument, "", argument)
    )
    for given in node.keywords:
        if given.arg == keyword:
            return given, "value"
    position = int(place[1:]) if place.startswith("#") else len(node.args)
    if position >= len(node.args) or any(isinstance(given, ast.Starred) for given in node.args[: position + 1]):
        return None
    return node.args, position


def _position(node: Any, tree: Any) -> Position | None:
    """Relative to the first line of the method, so that text above it does not matter."""
    if not hasattr(node, "col_offset"):
        return None
    first = _first_line(tree)
    return node.lineno - first, node.end_lineno - first, node.col_offset, node.end_col_offset


def _first_line(function: Any) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _find_function(cls: type, code: CodeType) -> FunctionType | None:
    """The function of a class or its bases that has this code, under decorators that tell what they wrap."""
    for base in cls.__mro__:
        for attribute in base.__dict__.values():
            function = inspect.unwrap(attribute) if callable(attribute) else None
            if isinstance(function, FunctionType) and function.__code__ is code:
                return function
    return None


def _find_method(cls: type, name: str) -> tuple[type, FunctionType]:
    for base in cls.__mro__:
        if name in base.__dict__ and isinstance(function := inspect.unwrap(base.__dict__[name]), FunctionType):
            return base, function
    raise UnreachableSkipError(f"{cls.__name__} has no method {name}")


def _syntax_tree(code: CodeType) -> ast.FunctionDef | None:
    """The definition of a function in its file; None where there is no source."""
    tree = _parsed("".join(linecache.getlines(code.co_filename)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        if _first_line(node) == code.co_firstlineno:
            return node
    return None


@cache
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def source_digest(cls: type, method: str) -> str:
    tree = _syntax_tree(_find_method(cls, method)[1].__code__)
    if tree is None:
        raise UnreachableSkipError(f"there is no source of {cls.__name__}.{method}")
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
