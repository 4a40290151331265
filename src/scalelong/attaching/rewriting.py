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

import torch
from torch import Tensor, nn

from ..errors import SkipMismatchError, UnreachableSkipError
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
from .actions import REWRITES, Action, ForwardCounter, Pass, running_backward

Actions = list[Action | Pass]
"""What happens at a site, by execution: an expression in a loop merges a different skip each time."""
_START, _SUPER = "__scalelong_start__", "__scalelong_super__"

Place = tuple[str, str, str]
"""A function of a module: method, owner and digest of its source, as plans name it."""


class Rewrites:
    """The rewritten functions of one module. Lives in its `__dict__`, so that copies and pickles keep the scaling."""

    def __init__(
        self, module: nn.Module, places: dict[Place, dict[EditSite, Actions]], counter: ForwardCounter
    ) -> None:
        self.counter = counter
        self.actions = {place: list(sites.values()) for place, sites in places.items()}
        by_name: dict[str, dict[Place, list[EditSite]]] = {}
        for place, sites in places.items():
            function = find_function(module, *place)
            for name, value in attributes_of(module).items():
                if any(found is function for found in (*functions_in(value), *inherited(module).get(name, ()))):
                    by_name.setdefault(name, {})[place] = list(sites)
        self.made: dict[str, Any] = {}
        """The attributes of the module that are exchanged."""
        for name, sites in by_name.items():
            is_table = isinstance(attributes_of(module)[name], dict | list | tuple)
            make = _rewritten_attribute if is_table else RewrittenMethod
            self.made[name] = make(module, name, sites)
        self.replaced = {name: module.__dict__[name] for name in by_name if name in module.__dict__}
        """What the module itself had there; methods of its class are not here."""

    def put_on(self, module: nn.Module) -> None:
        module.__dict__.update({**self.made, REWRITES: self})

    def take_off(self, module: nn.Module) -> None:
        del module.__dict__[REWRITES]
        for name, made in self.made.items():
            # A wrapper that came later keeps the rewritten method, which without its actions computes what it did.
            if module.__dict__.get(name) is made:
                del module.__dict__[name]
                if name in self.replaced:
                    module.__dict__[name] = self.replaced[name]


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


# What the new code calls.


class RewrittenCall:
    """One run of a rewritten function. It counts the executions of each site."""

    def __init__(self, actions: list[Actions]) -> None:
        self.actions = actions
        self.executions = [0] * len(actions)
        self.as_method = [False] * len(actions)
        self.pending = [0] * len(actions)

    def __call__(self, site: int, value: Any) -> Any:
        """The value as it enters the merge."""
        return value if self._is_foreign(site) else _applied(self._next(site), value)

    def in_place(self, site: int, value: Any) -> Any:
        """The same, for an operand that the merge overwrites: all who hold the tensor see the sum."""
        if self._is_foreign(site):
            return value
        return value.copy_(self._next(site)(value))

    def receiver(self, site: int, operand: int, value: Any, in_place: bool) -> Any:
        """`value.add(...)`: operand 0, if it is a tensor; otherwise a module or an object whose arguments are added."""
        if self._is_foreign(site):
            return value
        self.as_method[site] = isinstance(value, Tensor)
        if not self.as_method[site] or operand != 0:
            return value
        return self.in_place(site, value) if in_place else self(site, value)

    def argument(self, site: int, operand: int, position: int, value: Any) -> Any:
        """The argument at this position of a call, if that is the operand; or the list that holds it."""
        if self._is_foreign(site):
            return value
        if position == 0 and not self.as_method[site] and isinstance(value, list | tuple):
            return self.item(site, operand, value)
        return self(site, value) if position + self.as_method[site] == operand else value

    def item(self, site: int, operand: int, values: Any) -> Any:
        """A list of which one item is scaled."""
        if self._is_foreign(site):
            return values
        items = [*values]
        if operand < len(items):
            items[operand] = self(site, items[operand])
        return tuple(items) if isinstance(values, tuple) else items

    def summands(self, site: int, operand: int, values: Any, from_start: bool) -> Any:
        """A list that is summed up one by one: the second operand of each addition is an item, the first what is there.

        Without a start that is the first item.
        """
        if self._is_foreign(site):
            return values
        items = [*values]
        first = 0 if from_start else 1
        self.pending[site] = len(items) - first
        if operand == 1:
            for position in range(first, len(items)):
                items[position] = self(site, items[position])
        elif not from_start and len(items) > 1:
            items[0] = self.start_of_sum(site, items[0])
        return items

    def start_of_sum(self, site: int, value: Any) -> Any:
        value = self(site, value)
        for _ in range(1, self.pending[site]):
            self(site, None)  # the first operand of the others is a partial sum
        return value

    def function(self) -> "InnerFunction":
        """For a function that is defined inside this one."""
        return InnerFunction(self)

    def _is_foreign(self, site: int) -> bool:
        return site >= len(self.actions)

    def _next(self, site: int) -> Action | Pass:
        execution = self.executions[site]
        self.executions[site] = execution + 1
        return self._action(site, execution)

    def _action(self, site: int, execution: int) -> Action | Pass:
        actions = self.actions[site]
        if execution >= len(actions):
            raise SkipMismatchError(
                f"a merge runs more often than in the forward that was planned ({len(actions)} times); unscale_ the "
                f"model and scale it with example_inputs like these"
            )
        return actions[execution]


class InnerFunction:
    """A function inside a rewritten one. Activation checkpointing calls it again in the backward, in any order."""

    def __init__(self, outer: RewrittenCall) -> None:
        self.outer = outer
        self.calls: list[InnerRewrittenCall] = []
        self.defined_in = -1 if torch.compiler.is_compiling() else running_backward()

    def start(self) -> "InnerRewrittenCall":
        # A call from a backward that began after the definition computes again what was computed before.
        again = not torch.compiler.is_compiling() and running_backward() != self.defined_in and bool(self.calls)
        if again and len(self.calls) > 1:
            raise SkipMismatchError(
                "a function inside a method runs for several long skips, and activation checkpointing computes it "
                "again: which of them it is cannot be told. Define it again for each skip, or make it a module"
            )
        call = InnerRewrittenCall(self.outer, self.calls[0] if again else None)
        if not again:
            self.calls.append(call)
        return call


class InnerRewrittenCall(RewrittenCall):
    """One run of a function inside a rewritten one. It counts with that one, or repeats an earlier run."""

    def __init__(self, outer: RewrittenCall, repeated: "InnerRewrittenCall | None") -> None:
        super().__init__(outer.actions)
        self.outer, self.repeated = outer, repeated
        self.taken: list[list[int]] = [[] for _ in outer.actions]

    def _next(self, site: int) -> Action | Pass:
        if self.repeated is None:
            self.taken[site].append(self.outer.executions[site])
            return self.outer._next(site)
        before = self.repeated.taken[site]
        execution = self.executions[site]
        self.executions[site] = execution + 1
        if execution >= len(before):
            raise SkipMismatchError("a merge runs more often when it is computed again than in its forward")
        return self._action(site, before[execution])


def start_invocation(module: Any, place: tuple[str, str, str]) -> RewrittenCall:
    """What the new code calls first, with the module that runs it."""
    rewrites = getattr(module, REWRITES, None)
    actions = None if rewrites is None or rewrites.counter.mode.is_off else rewrites.actions.get(place)
    return RewrittenCall([] if actions is None else actions)


def _applied(action: Any, value: Any) -> Any:
    # A result such as that of einops.pack: the tensor, and how to unpack it.
    items: list[Any] = [*value] if isinstance(value, tuple | list) else []
    tensors = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
    if len(tensors) != 1:
        return action(value)
    items[tensors[0]] = action(items[tensors[0]])
    return type(value)(items)
