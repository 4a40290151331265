"""Scale inside a function: for merges that are no argument or result of any module, such as `x = self.up(x) + skip`.

The syntax tree of the function is changed at the merge and compiled anew, and the function gets the new code. It stays
the same object, so whoever holds it (an instance with its own `forward`, a table of bound methods, `super().forward`, a
decorator, a compiled method) runs the new code, and no class changes. The actions belong to the instance: a module that
is not scaled finds none and computes what it did before.

    x = self.up(x) + skip     becomes     x = self.up(x) + __scalelong__(0, skip)
"""

import ast
import copy
import functools
import hashlib
import importlib
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor, nn

from ..errors import SkipMismatchError, UnreachableSkipError
from .actions import Action, Tally, running_backward

Position = tuple[int, int, int, int]
Operand = int | str | None
"""Of an addition: its number. Of a call: "#1", a keyword, "#1=keyword" for either, "#0[1]" for an item of a list. None:
the value."""
EditSite = tuple[Position, Operand]
"""An expression, and what in it is scaled."""
Actions = list[Action | None]
"""What happens at a site, by execution: an expression in a loop merges another skip each time."""

_REWRITES = "_scalelong_rewrites"
_START = "__scalelong_start__"
_RUN = "__scalelong__"
# Keywords of torch's additions, by the number of the operand.
_KEYWORDS = {"input": 0, "self": 0, "other": 1, "end": 1, "tensor1": 1, "tensor2": 2}


# What the new code calls.


class Invocation:
    """One run of a rewritten function. It counts the executions of each site."""

    def __init__(self, actions: list[Actions | None]) -> None:
        self.actions = actions
        self.executions = [0] * len(actions)
        self.as_method = [False] * len(actions)
        self.pending = [0] * len(actions)

    def __call__(self, site: int, value: Any) -> Any:
        """The value as it enters the merge."""
        return value if self._is_foreign(site) else _applied(self._next(site), value)

    def in_place(self, site: int, value: Any) -> Any:
        """The same, for an operand that the merge overwrites: whoever holds the tensor sees the sum."""
        if self._is_foreign(site):
            return value
        action = self._next(site)
        return value if action is None else value.copy_(action(value))

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
        """For a function that is defined inside of this one."""
        return InnerFunction(self)

    def _is_foreign(self, site: int) -> bool:
        return site >= len(self.actions) or self.actions[site] is None

    def _next(self, site: int) -> Action | None:
        execution = self.executions[site]
        self.executions[site] = execution + 1
        return self._action(site, execution)

    def _action(self, site: int, execution: int) -> Action | None:
        actions = self.actions[site] or []
        if execution >= len(actions):
            raise SkipMismatchError(
                f"a merge runs more often than in the forward that was planned ({len(actions)} times); unscale_ the "
                f"model and scale it with example_inputs like these"
            )
        return actions[execution]


class InnerFunction:
    """A function inside of a rewritten one. Activation checkpointing calls it again in the backward, in any order."""

    def __init__(self, outer: Invocation) -> None:
        self.outer = outer
        self.calls: list[InnerInvocation] = []
        self.defined_in = -1 if torch.compiler.is_compiling() else running_backward()

    def start(self) -> "InnerInvocation":
        # A call from a backward that began after the definition computes again what was computed before.
        again = not torch.compiler.is_compiling() and running_backward() != self.defined_in and bool(self.calls)
        if again and len(self.calls) > 1:
            raise SkipMismatchError(
                "a function inside of a method runs for several long skips, and activation checkpointing computes it "
                "again: which of them it is cannot be told. Define it anew for each skip, or make it a module"
            )
        call = InnerInvocation(self.outer, self.calls[0] if again else None)
        if not again:
            self.calls.append(call)
        return call


class InnerInvocation(Invocation):
    """One run of a function inside of a rewritten one. It counts with that one, or repeats an earlier run."""

    def __init__(self, outer: Invocation, repeated: "InnerInvocation | None") -> None:
        super().__init__(outer.actions)
        self.outer, self.repeated = outer, repeated
        self.taken: list[list[int]] = [[] for _ in outer.actions]

    def _next(self, site: int) -> Action | None:
        if self.repeated is None:
            self.taken[site].append(self.outer.executions[site])
            return self.outer._next(site)
        before = self.repeated.taken[site]
        execution = self.executions[site]
        self.executions[site] = execution + 1
        if execution >= len(before):
            raise SkipMismatchError("a merge runs more often when it is computed again than in its forward")
        return self._action(site, before[execution])


class _Unscaled(Invocation):
    """A run of a rewritten function for a module that is not scaled."""

    def __init__(self) -> None:
        super().__init__([])


def start_invocation(module: Any, key: str) -> Invocation:
    rewrites = getattr(module, _REWRITES, None)
    if rewrites is not None and rewrites.is_guarded:
        rewrites.tally.require_hooks()
    actions = None if rewrites is None or rewrites.tally.is_off else rewrites.tables.get(key)
    return _Unscaled() if actions is None else Invocation(actions)


def _applied(action: Any, value: Any) -> Any:
    if action is None:
        return value
    # A result such as that of einops.pack: the tensor, and how to unpack it.
    items: list[Any] = [*value] if isinstance(value, tuple | list) else []
    tensors = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
    if len(tensors) != 1:
        return action(value)
    items[tensors[0]] = action(items[tensors[0]])
    return type(value)(items)


# The rewriting of one module, and of a function that many modules share.


@dataclass
class FunctionEdits:
    """The edits of one function for one module."""

    function: Any
    digest: str
    sites: dict[EditSite, Actions]

    @property
    def key(self) -> str:
        return _key(self.function)


class Rewrites:
    """The rewritten functions of one module. Lives in its `__dict__`, so that copies and pickles keep the scaling."""

    def __init__(self, edits: list[FunctionEdits], tally: Tally) -> None:
        self.edits, self.tally = edits, tally
        # A function without sites is there to look after the hooks.
        self.is_guarded = any(not edit.sites for edit in edits)
        self.tables: dict[str, list[Actions | None]] = {}
        self.install()

    def install(self) -> None:
        self.tables = {edit.key: _patch(edit.function).add(self, edit.sites) for edit in self.edits}

    def remove(self) -> None:
        for edit in self.edits:
            _patch(edit.function).discard(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rewrites":
        pairs = [(edit, copy.deepcopy(list(edit.sites.values()), memo)) for edit in self.edits]
        return Rewrites(
            [
                FunctionEdits(edit.function, edit.digest, dict(zip(edit.sites, actions, strict=True)))
                for edit, actions in pairs
            ],
            copy.deepcopy(self.tally, memo),
        )

    def __reduce__(self) -> Any:
        return _unpickled, ([(edit.key, edit.digest, list(edit.sites.items())) for edit in self.edits], self.tally)


def _unpickled(entries: list[tuple[str, str, list[tuple[EditSite, Actions]]]], tally: Tally) -> Rewrites:
    edits = []
    for key, digest, sites in entries:
        named = _imported(key)
        function = next((f for f in named if syntax_tree(f) is not None and source_digest(f) == digest), None)
        if function is None and not sites:
            continue
        if function is None:
            raise UnreachableSkipError(
                f"the source of {key.partition(':')[2]} has changed since this model was saved: its scaled skips "
                f"cannot be placed. Load the weights into a new model and scale that"
            )
        edits.append(FunctionEdits(function, digest, dict(sites)))
    return Rewrites(edits, tally)


def rewrite_(module: nn.Module, places: dict[tuple[str, str, str], dict[EditSite, Actions]], tally: Tally) -> None:
    """Let functions of the module, by (method, owner, digest), call the actions at the sites."""
    edits = [
        FunctionEdits(find_function(module, method, owner, digest), digest, sites)
        for (method, owner, digest), sites in places.items()
    ]
    module.__dict__[_REWRITES] = Rewrites(edits, tally)


def guard_(module: nn.Module, tally: Tally) -> None:
    """Let the forward of the model look whether its hooks are still there, if its source is known."""
    known: Rewrites | None = module.__dict__.get(_REWRITES)
    edits = known.edits if known is not None else []
    forward = inspect.getattr_static(type(module), "forward")
    for function in _functions_in(forward, set(), 6):
        tree = syntax_tree(function) if function.__name__ == "forward" else None
        if tree is None or not (tree.args.posonlyargs or tree.args.args):
            continue
        if not any(edit.function is function for edit in edits):
            if known is not None:
                known.remove()
            guard = FunctionEdits(function, source_digest(function), {})
            module.__dict__[_REWRITES] = Rewrites([*edits, guard], tally)
        return


def restore_(module: nn.Module) -> None:
    module.__dict__.pop(_REWRITES).remove()


def is_rewritten(module: nn.Module) -> bool:
    return _REWRITES in module.__dict__


@dataclass
class _Patch:
    """A function with new code. Sites are only ever added, so that their numbers hold for every module."""

    function: Any
    original: CodeType
    sites: list[EditSite] = field(default_factory=list)
    codes: list[CodeType] = field(default_factory=list)
    users: "WeakSet[Rewrites]" = field(default_factory=WeakSet)

    def add(self, user: Rewrites, wanted: dict[EditSite, Actions]) -> list[Actions | None]:
        new = [site for site in wanted if site not in self.sites]
        if new or not self.codes:
            code = _rewritten_code(self.function, self.original, [*self.sites, *new])
            self.sites += new
            self.codes.append(code)
        self.users.add(user)
        finalize(user, self._restore_if_unused)
        self.function.__globals__[_START] = start_invocation
        self.function.__code__ = self.codes[-1]
        return [wanted.get(site) for site in self.sites]

    def discard(self, user: Rewrites) -> None:
        self.users.discard(user)
        self._restore_if_unused()

    def _restore_if_unused(self) -> None:
        if not any(True for _ in self.users) and any(self.function.__code__ is code for code in self.codes):
            self.function.__code__ = self.original


_PATCHES: "WeakKeyDictionary[FunctionType, _Patch]" = WeakKeyDictionary()


def _patch(function: FunctionType) -> _Patch:
    known = _PATCHES.get(function)
    if known is None or function.__code__ not in (known.original, *known.codes):
        known = _PATCHES[function] = _Patch(function, function.__code__)
    return known


def _codes(function: FunctionType) -> list[CodeType]:
    """All codes that a function has had through us, its own first."""
    known = _PATCHES.get(function)
    if known is None or function.__code__ not in (known.original, *known.codes):
        return [function.__code__]
    return [known.original, *known.codes]


# From a running code to its function.


def function_of(module: nn.Module, code: CodeType) -> FunctionType | None:
    """The function of a module, its class or their decorators that runs this code."""
    return next((function for function in _functions(module) if any(c is code for c in _codes(function))), None)


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
    """All functions of a module: methods of its class and bases, what it keeps itself, and what decorators wrap."""
    seen: set[int] = set()
    own = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
    for base in type(module).__mro__:
        if base is not nn.Module and base is not object:
            own += list(vars(base).values())
    for value in own:
        yield from _functions_in(value, seen, 6)


def _functions_in(value: Any, seen: set[int], depth: int) -> Iterator[FunctionType]:
    if depth == 0 or id(value) in seen or isinstance(value, Tensor | nn.Module | str | int | float | type):
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, FunctionType):
        yield value
        inside = [getattr(value, "__wrapped__", None), getattr(value, "_torchdynamo_orig_callable", None)]
        inside += [_content(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, MethodType | staticmethod | classmethod):
        inside = [value.__func__]
    elif isinstance(value, functools.partial | functools.partialmethod):
        inside = [value.func, *value.args]
    elif isinstance(value, property):
        inside = [value.fget]
    elif isinstance(value, dict):
        inside = list(value.values()) if len(value) <= 256 else []
    elif isinstance(value, list | tuple):
        inside = list(value) if len(value) <= 256 else []
    elif callable(value):
        inside = [getattr(value, "__wrapped__", None)]
    for item in inside:
        yield from _functions_in(item, seen, depth - 1)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _key(function: FunctionType) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _imported(key: str) -> list[FunctionType]:
    """The functions of this name in their module, decorators and what they wrap."""
    module, _, qualname = key.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError):
        return []
    return [function for function in _functions_in(found, set(), 6) if function.__qualname__ == qualname]


# From a function to its text. The text must be the one that runs: a file can change after it was imported.


def can_rewrite(module: nn.Module, code: CodeType, position: Position, operand: Operand) -> bool:
    """Whether there is such an expression in the source of the function that runs this code."""
    function = function_of(module, code)
    tree = syntax_tree(function) if function is not None else None
    if tree is None or not (tree.args.posonlyargs or tree.args.args):
        return False
    here = [node for node in ast.walk(tree) if _position(node, tree) == position]
    return any(_edit(node, operand) is not None for node in here)


def source_digest(function: FunctionType) -> str:
    tree = syntax_tree(function)
    if tree is None:
        raise UnreachableSkipError(
            f"there is no source of {function.__qualname__}, or it changed since it was imported"
        )
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def syntax_tree(function: FunctionType) -> ast.FunctionDef | None:
    """The definition of a function in its file; None if there is none that compiles to the code which runs."""
    code = _codes(function)[0]
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    if not any(_same_code(found, code) for found in _compiled_functions(text, code.co_filename)):
        return None
    for node in ast.walk(_parsed(text)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name and _first_line(node) == code.co_firstlineno:
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


def _first_line(function: Any) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


def _position(node: Any, tree: Any) -> Position | None:
    """Relative to the first line of the function, so that text above it does not matter."""
    if not hasattr(node, "col_offset"):
        return None
    first = _first_line(tree)
    return node.lineno - first, node.end_lineno - first, node.col_offset, node.end_col_offset


# The new code.


def _rewritten_code(function: FunctionType, original: CodeType, sites: list[EditSite]) -> CodeType:
    found = syntax_tree(function)
    if found is None:
        raise UnreachableSkipError(f"the source of {function.__qualname__} changed since it was imported")
    tree = copy.deepcopy(found)
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    editor = _Editor(tree, sites, owner)
    body: Any = editor.visit(tree)
    if editor.missing:
        raise UnreachableSkipError(f"the merges of {function.__qualname__} are not where they were planned")
    arguments = body.args
    first = (arguments.posonlyargs + arguments.args)[0].arg
    start = ast.parse(f"{_RUN} = {_START}({first}, {_key(function)!r})").body[0]
    _at_the_beginning(body, start)
    free = original.co_freevars
    factory: Any = ast.parse(f"def factory({', '.join(free)}):\n    return {body.name}")
    factory.body[0].body.insert(0, body)
    # Only its code is wanted. Nothing runs: decorators and defaults belong to the function, which stays.
    code = compile(ast.fix_missing_locations(factory), original.co_filename, "exec", dont_inherit=True)
    inner = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    rewritten = next(c for c in inner.co_consts if isinstance(c, CodeType) and c.co_name == body.name)
    if rewritten.co_freevars != free or rewritten.co_firstlineno != original.co_firstlineno:
        raise UnreachableSkipError(
            f"{function.__qualname__} uses variables around it in a way that cannot be rewritten"
        )
    return rewritten.replace(co_qualname=original.co_qualname)


def _at_the_beginning(function: Any, statement: ast.stmt) -> None:
    function.body.insert(1 if ast.get_docstring(function) is not None else 0, statement)


class _Editor(ast.NodeTransformer):
    """Changes the sites, and what a compiler inside of a class body would do to private names."""

    def __init__(self, tree: ast.FunctionDef, sites: list[EditSite], class_name: str) -> None:
        self.tree, self.sites, self.class_name = copy.copy(tree), sites, class_name
        self.missing = set(range(len(sites)))

    def visit(self, node: ast.AST) -> Any:
        position = _position(node, self.tree)
        numbers = [number for number, (place, _) in enumerate(self.sites) if place == position]
        visited: Any = super().visit(node)
        # An operand is changed where it stands, before its expression is wrapped as a whole.
        for number in sorted(numbers, key=lambda n: self.sites[n][1] is None):
            edit = _edit(node, self.sites[number][1])
            if edit is not None:
                visited = edit(visited, number)
                self.missing.discard(number)
        return visited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before = set(self.missing)
        self.generic_visit(node)
        if self.missing != before and _position(node, self.tree) != _position(self.tree, self.tree):
            # The default is evaluated where the function is defined: it knows this definition from the others.
            node.args.kwonlyargs.append(ast.arg(_RUN))
            node.args.kw_defaults.append(_expression(f"{_RUN}.function()"))
            _at_the_beginning(node, ast.parse(f"{_RUN} = {_RUN}.start()").body[0])
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


def _edit(node: ast.AST, operand: Operand) -> Edit | None:
    """How to scale an operand of this expression; None if it has no such operand."""
    if operand is None:
        return (lambda visited, number: _call("", number, visited)) if isinstance(node, ast.Call) else None
    if isinstance(operand, str):
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


def _edit_argument(node: ast.AST, argument: str) -> Edit | None:
    """ "#1", "skip", "#1=skip" or "#0[1]"."""
    if not isinstance(node, ast.Call):
        return None
    argument, _, item = argument.partition("[")
    place, _, keyword = argument.rpartition("=") if "=" in argument else (argument, "", argument)
    # checkpoint(function, x, skip) passes its arguments on, behind the function.
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    shift = "=" in argument and "checkpoint" in called

    def wrapped(value: Any, number: int) -> ast.Call:
        if item:
            return _call("item", number, ast.Constant(int(item.rstrip("]"))), value)
        return _call("", number, value)

    for given, found in enumerate(node.keywords):
        if found.arg == keyword:

            def edit_keyword(visited: Any, number: int, given: int = given) -> Any:
                visited.keywords[given].value = wrapped(visited.keywords[given].value, number)
                return visited

            return edit_keyword
    position = int(place[1:]) + shift if place.startswith("#") else -1
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
    function: ast.expr = ast.Name(_RUN, ast.Load())
    if method:
        function = ast.Attribute(function, method, ast.Load())
    return ast.Call(function, [ast.Constant(number), *arguments], [])


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
