"""Scale inside a function: for merges that are no argument or result of any module, such as `x = self.up(x) + skip`.

The syntax tree of the function is changed at the merge and compiled again. The new function is bound to the module in
hand alone: it stands in the module's `__dict__`, in front of the method of its class. No class, no other module, no
function and no global variable changes, and `restore_` leaves nothing of it.

    x = self.up(x) + skip     becomes     x = self.up(x) + __scalelong__(0, skip)
"""

import ast
import copy
import functools
import inspect
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..errors import UnreachableSkipError
from ..finding import (
    RUN,
    Editor,
    EditSite,
    attributes_of,
    find_function,
    functions_in,
    inherited,
    insert_first,
    syntax_tree,
)
from .actions import ScalingSwitch
from .invocations import REWRITES, Actions, start_invocation

_START, _SUPER = "__scalelong_start__", "__scalelong_super__"

Place = tuple[str, str, str]
"""A function of a module: method, owner and digest of its source, as plans name it."""


class Rewrites:
    """The rewritten functions of one module. Lives in its `__dict__`, so that copies and pickles keep the scaling."""

    def __init__(self, places: dict[Place, dict[EditSite, Actions]], switch: ScalingSwitch) -> None:
        self.switch = switch
        self.sites = {place: list(sites) for place, sites in places.items()}
        self.actions = {place: list(sites.values()) for place, sites in places.items()}
        self.installed: dict[str, Any] = {}
        """The attributes of the module that were exchanged."""
        self.replaced: dict[str, Any] = {}
        """What the module itself had there; methods of its class are not here."""


class RewrittenMethod:
    """A method of one module with the code that scales."""

    def __init__(self, module: nn.Module, name: str, sites: dict[Place, list[EditSite]]) -> None:
        self.module, self.name, self.sites = module, name, sites
        value = _rewritten_attribute(module, name, sites)
        # Bound as Python binds it. A bound method of Python would be pickled as the method of the class.
        self.function: Any = value.__func__ if isinstance(value, MethodType | staticmethod) else value
        of_class = name not in vars(module) and not isinstance(value, staticmethod)
        self.takes_module = of_class or isinstance(value, MethodType)
        self.__signature__ = inspect.signature(getattr(module, name))
        self.__code__ = getattr(self.function, "__code__", None)  # torch.export asks for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs) if self.takes_module else self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RewrittenMethod":
        made = copy.copy(self)
        made.module = copy.deepcopy(self.module, memo)
        return made

    def __copy__(self) -> "RewrittenMethod":
        made = object.__new__(RewrittenMethod)
        made.__dict__.update(self.__dict__)
        return made

    def __reduce__(self) -> Any:
        return RewrittenMethod, (self.module, self.name, self.sites)


def rewrite_(module: nn.Module, places: dict[Place, dict[EditSite, Actions]], switch: ScalingSwitch) -> None:
    """Let functions of the module call the actions at the sites."""
    rewrites = Rewrites(places, switch)
    by_name: dict[str, dict[Place, list[EditSite]]] = {}
    for place, sites in rewrites.sites.items():
        function = find_function(module, *place)
        for name, value in attributes_of(module).items():
            if any(found is function for found in (*functions_in(value), *inherited(module).get(name, ()))):
                by_name.setdefault(name, {})[place] = sites
    for name, sites in by_name.items():
        is_table = isinstance(attributes_of(module)[name], dict | list | tuple)
        made = _rewritten_attribute(module, name, sites) if is_table else RewrittenMethod(module, name, sites)
        rewrites.installed[name] = made
    rewrites.replaced = {name: module.__dict__[name] for name in by_name if name in module.__dict__}
    module.__dict__.update({**rewrites.installed, REWRITES: rewrites})


def restore_(module: nn.Module) -> None:
    rewrites: Rewrites = module.__dict__.pop(REWRITES)
    for name, made in rewrites.installed.items():
        # A wrapper that came later keeps the rewritten method, which without its actions computes what it did before.
        if module.__dict__.get(name) is made:
            del module.__dict__[name]
            if name in rewrites.replaced:
                module.__dict__[name] = rewrites.replaced[name]


def is_rewritten(module: nn.Module) -> bool:
    return REWRITES in module.__dict__


def _rewritten_attribute(module: nn.Module, name: str, sites: dict[Place, list[EditSite]]) -> Any:
    value = attributes_of(module)[name]
    for place, wanted in sites.items():
        function = find_function(module, *place)
        made = _rewritten(function, place, wanted)
        chain = inherited(module).get(name, [])
        if any(found is function for found in chain[1:]):
            # A method of a base class: those that call it by `super()` find the new one there.
            number = next(n for n, found in enumerate(chain) if found is function)
            for caller in reversed(chain[:number]):
                made = _rewritten(caller, place, [], exchanged={function: made})
                function = caller
        value = _exchanged(value, function, made)
    return value


class _Super:
    """What `super()` gives, with methods exchanged."""

    def __init__(self, found: Any, exchanged: dict[Any, FunctionType]) -> None:
        self.found, self.exchanged = found, exchanged

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.found, name)
        made = self.exchanged.get(getattr(value, "__func__", None))
        return value if made is None else MethodType(made, value.__self__)


def _exchanged(value: Any, old: FunctionType, new: FunctionType) -> Any:
    """A copy of the value with one function exchanged, inside decorators, partials and tables."""
    if value is old:
        return new
    if not any(function is old for function in functions_in(value)):
        return value
    if isinstance(value, FunctionType):
        cells = [_cell(cell, old, new) for cell in value.__closure__ or ()]
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        made.__kwdefaults__, made.__qualname__ = value.__kwdefaults__, value.__qualname__
        made.__dict__.update({name: _exchanged(item, old, new) for name, item in vars(value).items()})
        return made
    if isinstance(value, MethodType):
        return MethodType(_exchanged(value.__func__, old, new), value.__self__)
    if isinstance(value, staticmethod):
        return staticmethod(_exchanged(value.__func__, old, new))
    if isinstance(value, functools.partial):
        args = [_exchanged(item, old, new) for item in value.args]
        return functools.partial(_exchanged(value.func, old, new), *args, **value.keywords)
    if isinstance(value, dict):
        return {name: _exchanged(item, old, new) for name, item in value.items()}
    return type(value)(_exchanged(item, old, new) for item in value)  # a list or a tuple


def _cell(cell: CellType, old: FunctionType, new: FunctionType) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    exchanged = _exchanged(content, old, new)
    return cell if exchanged is content else CellType(exchanged)


def _rewritten(
    function: FunctionType, place: Place, sites: list[EditSite], exchanged: dict[Any, FunctionType] | None = None
) -> FunctionType:
    """The function with other code, which calls the actions or finds exchanged methods by `super()`."""
    code = _rewritten_code(function, place, sites, _SUPER if exchanged else "")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[_START] = CellType(start_invocation)
    cells[_SUPER] = CellType(lambda found: _Super(found, exchanged or {}))
    if not set(code.co_freevars) <= set(cells):
        raise UnreachableSkipError(
            f"{function.__qualname__} uses variables around it in a way that cannot be rewritten"
        )
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(vars(function))
    return made


def _rewritten_code(function: FunctionType, place: Place, sites: list[EditSite], super_name: str) -> CodeType:
    original, found = function.__code__, syntax_tree(function)
    if found is None:
        raise UnreachableSkipError(f"the source of {function.__qualname__} changed since it was imported")
    tree = copy.deepcopy(found)
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    editor = Editor(tree, sites, owner, super_name)
    body: Any = editor.visit(tree)
    if editor.missing:
        raise UnreachableSkipError(f"the merges of {function.__qualname__} are not where they were planned")
    arguments = body.args
    first = (arguments.posonlyargs + arguments.args)[0].arg
    insert_first(body, ast.parse(f"{RUN} = {_START}({first}, {place!r})").body[0])
    free = ", ".join((*original.co_freevars, _START, _SUPER))
    factory: Any = ast.parse(f"def factory({free}):\n    return {body.name}")
    factory.body[0].body.insert(0, body)
    # Only its code is wanted. Nothing runs: decorators and defaults belong to the function, which stays.
    code = compile(ast.fix_missing_locations(factory), original.co_filename, "exec", dont_inherit=True)
    inner = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    rewritten = next(c for c in inner.co_consts if isinstance(c, CodeType) and c.co_name == body.name)
    if rewritten.co_firstlineno != original.co_firstlineno:
        raise UnreachableSkipError(f"{function.__qualname__} cannot be compiled again at its place")
    return rewritten.replace(co_qualname=original.co_qualname)
