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
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

from torch import Tensor, nn

from ..errors import UnreachableSkipError
from .actions import Tally
from .edits import RUN, Editor, EditSite, Operand, Position, edit_for, first_line, insert_first, position_of
from .invocations import REWRITES, Actions, start_invocation

_START = "__scalelong_start__"

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
    module.__dict__[REWRITES] = Rewrites(edits, tally)


def guard_(module: nn.Module, tally: Tally) -> None:
    """Let the forward of the model look whether its hooks are still there, if its source is known."""
    known: Rewrites | None = module.__dict__.get(REWRITES)
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
            module.__dict__[REWRITES] = Rewrites([*edits, guard], tally)
        return


def restore_(module: nn.Module) -> None:
    module.__dict__.pop(REWRITES).remove()


def is_rewritten(module: nn.Module) -> bool:
    return REWRITES in module.__dict__


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
    code = _codes(function)[0]
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


# The new code.


def _rewritten_code(function: FunctionType, original: CodeType, sites: list[EditSite]) -> CodeType:
    found = syntax_tree(function)
    if found is None:
        raise UnreachableSkipError(f"the source of {function.__qualname__} changed since it was imported")
    tree = copy.deepcopy(found)
    owner = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    editor = Editor(tree, sites, owner)
    body: Any = editor.visit(tree)
    if editor.missing:
        raise UnreachableSkipError(f"the merges of {function.__qualname__} are not where they were planned")
    arguments = body.args
    first = (arguments.posonlyargs + arguments.args)[0].arg
    start = ast.parse(f"{RUN} = {_START}({first}, {_key(function)!r})").body[0]
    insert_first(body, start)
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
