"""Scale inside a function: for merges that are no argument or result of any module, such as `x = self.up(x) + skip`.

The syntax tree of the function is changed at the merge and compiled again. The new function is bound to the module in
hand alone: it stands in the module's `__dict__`, in front of the method of its class. No class, no other module, no
function and no global variable changes, and `take_off` leaves nothing of it.

    x = self.up(x) + skip              x = self.up(x) + __scalelong__(0, skip)
    x = torch.cat([x, skip], 1)        x = __scalelong__(0, torch.cat([x, skip], 1))
    x = torch.add(x, skip)             x = __scalelong__.call(((0, 1),), torch, "add", x, skip)
    skip += x                          __scalelong__.in_place(0, skip); skip += x
    x = sum([x, skip])                 x = __scalelong__.sum(((0, 1),), 0, sum, [x, skip])
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
    EditSite,
    attributes_of,
    find_function,
    functions_in,
    has_operand,
    inherited,
    list_of_a_sum,
    position_of,
    syntax_tree,
)
from ..tracing import Argument
from .actions import REWRITES, Action, ForwardCounter, Pass, running_backward

RUN, _START, _SUPER = "__scalelong__", "__scalelong_start__", "__scalelong_super__"
Actions = list[Action | Pass]
"""What happens at a site, by execution: an expression in a loop merges a different skip each time."""
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
        made = object.__new__(RewrittenMethod)
        made.__dict__.update({**self.__dict__, "module": copy.deepcopy(self.module, memo)})
        return made

    def __reduce__(self) -> Any:
        return RewrittenMethod, (self.module, self.name, self.sites)


# From a method to one with other code.


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
    if isinstance(value, MethodType):
        return MethodType(_exchanged(value.__func__, old, new), value.__self__)
    if isinstance(value, staticmethod):
        return staticmethod(_exchanged(value.__func__, old, new))
    if isinstance(value, functools.partial):
        args = [_exchanged(item, old, new) for item in value.args]
        return functools.partial(_exchanged(value.func, old, new), *args, **value.keywords)
    if isinstance(value, dict):
        return {name: _exchanged(item, old, new) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_exchanged(item, old, new) for item in value)
    cells = [_cell(cell, old, new) for cell in value.__closure__ or ()]
    made = _function_like(value, value.__code__, tuple(cells))
    made.__dict__.update({name: _exchanged(item, old, new) for name, item in vars(value).items()})
    return made


def _cell(cell: CellType, old: FunctionType, new: FunctionType) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    exchanged = _exchanged(content, old, new)
    return cell if exchanged is content else CellType(exchanged)


def _function_like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    made.__dict__.update(vars(function))
    return made


def _rewritten(
    function: FunctionType, place: Place, sites: list[EditSite], exchanged: dict[Any, FunctionType] | None = None
) -> FunctionType:
    """The function with other code, which calls the actions or finds exchanged methods by `super()`."""
    code = _rewritten_code(function, place, sites, _SUPER if exchanged else "")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[_START] = CellType(start_call)
    cells[_SUPER] = CellType(lambda found: _Super(found, exchanged or {}))
    if not set(code.co_freevars) <= set(cells):
        raise UnreachableSkipError(
            f"{function.__qualname__} uses variables around it in a way that cannot be rewritten"
        )
    return _function_like(function, code, tuple(cells[name] for name in code.co_freevars))


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
    _insert_first(body, f"{RUN} = {_START}({first}, {place!r})")
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


class Editor(ast.NodeTransformer):
    """Changes the sites, and what a compiler inside a class body would do to private names."""

    def __init__(self, tree: ast.FunctionDef, sites: list[EditSite], class_name: str, super_name: str = "") -> None:
        self.tree, self.sites, self.class_name = copy.copy(tree), sites, class_name
        self.super_name = super_name
        """If given: `super()` becomes a call of this function with what `super()` gives."""
        self.missing = set(range(len(sites)))

    def visit(self, node: ast.AST) -> Any:
        position = position_of(node, self.tree)
        here = {number: operand for number, (place, operand) in enumerate(self.sites) if place == position}
        operands = {number: operand for number, operand in here.items() if has_operand(node, operand)}
        visited: Any = super().visit(node)
        if not operands:
            return visited
        self.missing -= operands.keys()
        if isinstance(visited, ast.Call):
            return _scaled_call(visited, operands)
        before: list[ast.stmt] = []
        for number, operand in operands.items():
            if isinstance(visited, ast.BinOp):
                side = "left" if operand == 0 else "right"
                setattr(visited, side, _run("", number, getattr(visited, side)))
            elif operand == 1:
                visited.value = _run("", number, visited.value)
            else:  # `skip += x`: the skip is scaled in place before
                load = copy.deepcopy(visited.target)
                load.ctx = ast.Load()
                before.append(ast.Expr(_run("in_place", number, load)))
        return [*before, visited] if before else visited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = set(self.missing)
        self.generic_visit(node)
        if self.missing != before and position_of(node, self.tree) != position_of(self.tree, self.tree):
            # The default is evaluated where the function is defined: it knows this definition from the others.
            node.args.kwonlyargs.append(ast.arg(RUN))
            node.args.kw_defaults.append(ast.parse(f"{RUN}.function()", mode="eval").body)
            _insert_first(node, f"{RUN} = {RUN}.start()")
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


def _scaled_call(node: ast.Call, operands: dict[int, int | Argument | None]) -> ast.Call:
    """A call with some of its operands scaled, or (None) its value."""
    value = [number for number, operand in operands.items() if operand is None]
    given = [(number, operand) for number, operand in operands.items() if operand is not None]
    which: Any = tuple((n, (o.position, o.keyword) if isinstance(o, Argument) else o) for n, o in given)
    plain = ast.Constant(which)
    place = list_of_a_sum(node)
    if given and place is not None:
        node.args[:0] = [plain, ast.Constant(place), node.func]
        node.func = _method("sum")
    elif given:
        owner, name = (node.func.value, node.func.attr) if isinstance(node.func, ast.Attribute) else (node.func, "")
        node.args[:0] = [plain, owner, ast.Constant(name)]
        node.func = _method("call")
    return _run("", value[0], node) if value else node


def _run(method: str, number: int, *arguments: Any) -> ast.Call:
    return ast.Call(_method(method), [ast.Constant(number), *arguments], [])


def _method(name: str) -> ast.expr:
    run = ast.Name(RUN, ast.Load())
    return ast.Attribute(run, name, ast.Load()) if name else run


def _insert_first(function: Any, statement: str) -> None:
    function.body.insert(1 if ast.get_docstring(function) is not None else 0, ast.parse(statement).body[0])


# What the new code calls.


def start_call(module: Any, place: Place) -> "RewrittenCall":
    """What the new code calls first, with the module that runs it."""
    rewrites = getattr(module, REWRITES, None)
    actions = None if rewrites is None or rewrites.counter.mode.is_off else rewrites.actions.get(place)
    return RewrittenCall([] if actions is None else actions)


class RewrittenCall:
    """One run of a rewritten function. It counts the executions of each site; without actions it changes nothing."""

    def __init__(self, actions: list[Actions]) -> None:
        self.actions = actions
        self.executions = [0] * len(actions)

    def __call__(self, site: int, value: Any) -> Any:
        """The value as it enters the merge."""
        if not self.actions:
            return value
        action = self._next(site)
        # A result such as that of einops.pack: the tensor, and how to unpack it.
        items: list[Any] = [*value] if isinstance(value, tuple | list) else []
        tensors = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
        if len(tensors) != 1:
            return action(value)  # pyright: ignore[reportArgumentType]
        items[tensors[0]] = action(items[tensors[0]])
        return type(value)(items)

    def in_place(self, site: int, value: Any) -> Any:
        """The same, for an operand that the merge overwrites: all who hold the tensor see the sum."""
        return value.copy_(self._next(site)(value)) if self.actions else value

    def call(self, sites: tuple[tuple[int, Any], ...], owner: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """`owner.name(...)` with some operands scaled: the tensors of an addition, by number, or arguments."""
        values, is_bound = [*args], isinstance(owner, Tensor)
        for site, operand in sites if self.actions else ():
            if isinstance(operand, int):
                position = operand - is_bound
                keyword = next((key for key in kwargs if _KEYWORDS.get(key) == operand), "")
            else:
                position, keyword = operand
            if keyword in kwargs:
                kwargs[keyword] = self(site, kwargs[keyword])
            elif position == -1:
                is_in_place = name.endswith("_") and not name.endswith("__")
                owner = (self.in_place if is_in_place else self)(site, owner)
            elif isinstance(operand, int) and not is_bound and values and isinstance(values[0], list | tuple):
                items = [*values[0]]  # a function that adds what is in a list
                items[operand] = self(site, items[operand])
                values[0] = items if isinstance(values[0], list) else tuple(items)
            elif position is not None and position < len(values):
                values[position] = self(site, values[position])
            else:
                raise SkipMismatchError(f"the operand {operand} of a merge is not among the arguments of {name}")
        return (getattr(owner, name) if name else owner)(*values, **kwargs)

    def sum(self, sites: tuple[tuple[int, int], ...], place: int, add: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`sum(list, start)`, `reduce(function, list, start)`: addition n joins what is there, and part n."""
        before, values, start = args[:place], args[place], [*args[place + 1 :], *kwargs.values()]
        starts = isinstance(start[0], Tensor) if start else False
        parts = [*start, *values] if starts else [*values]
        for site, operand in sites if self.actions else ():
            for n in range(1, len(parts)):
                if operand == 1:
                    parts[n] = self(site, parts[n])
                elif n == 1:
                    parts[0] = self(site, parts[0])
                else:
                    self(site, None)  # a partial sum
        return add(*before, parts[1:], parts[0]) if starts else add(*before, parts, *start)

    def function(self) -> "InnerFunction":
        """For a function that is defined inside this one."""
        return InnerFunction(self)

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


# Keywords of torch's additions, by the number of the operand.
_KEYWORDS = {"input": 0, "self": 0, "other": 1, "end": 1, "tensor1": 1, "tensor2": 2}


class InnerFunction:
    """A function inside a rewritten one. Activation checkpointing calls it again in the backward, in any order."""

    def __init__(self, outer: RewrittenCall) -> None:
        self.outer = outer
        self.calls: list[InnerCall] = []
        self.defined_in = -1 if torch.compiler.is_compiling() else running_backward()

    def start(self) -> "InnerCall":
        # A call from a backward that began after the definition computes again what was computed before.
        again = not torch.compiler.is_compiling() and running_backward() != self.defined_in and bool(self.calls)
        if again and len(self.calls) > 1:
            raise SkipMismatchError(
                "a function inside a method runs for several long skips, and activation checkpointing computes it "
                "again: which of them it is cannot be told. Define it again for each skip, or make it a module"
            )
        call = InnerCall(self.outer, self.calls[0] if again else None)
        if not again:
            self.calls.append(call)
        return call


class InnerCall(RewrittenCall):
    """One run of a function inside a rewritten one. It counts with that one, or repeats an earlier run."""

    def __init__(self, outer: RewrittenCall, repeated: "InnerCall | None") -> None:
        super().__init__(outer.actions)
        self.outer, self.repeated = outer, repeated
        self.taken: list[list[int]] = [[] for _ in outer.actions]

    def _next(self, site: int) -> Action | Pass:
        if self.repeated is None:
            self.taken[site].append(self.outer.executions[site])
            return self.outer._next(site)
        before, execution = self.repeated.taken[site], self.executions[site]
        self.executions[site] = execution + 1
        if execution >= len(before):
            raise SkipMismatchError("a merge runs more often when it is computed again than in its forward")
        return self._action(site, before[execution])
