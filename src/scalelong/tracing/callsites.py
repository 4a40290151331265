"""Where in the source of a model an operation or a module call stands, and in which runs of functions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

# Frames of these are not the model's own text: what counts is who called them.
_OWN = tuple(str(Path(__file__).parents[1] / package) for package in ("tracing", "finding", "attaching"))
_LIBRARIES = (str(Path(torch.__file__).parent), *_OWN)
_HELPERS = ("einops", "accelerate/hooks")


@cache
def is_model_code(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith(_LIBRARIES) and not any(helper in file for helper in _HELPERS)


def is_own_code(code: CodeType) -> bool:
    """Ours: in functions that were rewritten for another model of the same class."""
    return code.co_filename.startswith(_OWN)


@dataclass(eq=False, slots=True)
class Invocation:
    """One run of a function, torch's own included."""

    code: CodeType
    parent: "Invocation | None"
    depth: int
    module: str | None
    """The module whose method this is, by name; None for a plain function."""

    def is_inside(self, other: "Invocation") -> bool:
        at: Invocation | None = self
        while at is not None and at.depth > other.depth:
            at = at.parent
        return at is other


def common_scope(one: Invocation, other: Invocation) -> Invocation:
    """The innermost run of a function in which both took place."""
    while one is not other:
        deeper, shallower = (one, other) if one.depth > other.depth else (other, one)
        if deeper.parent is None:
            return deeper
        one, other = deeper.parent, shallower
    return one


@dataclass(frozen=True)
class Frame:
    code: CodeType
    instruction: int
    invocation: Invocation

    @property
    def module(self) -> str | None:
        return self.invocation.module

    @property
    def position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First line, last line, first column, last column of the expression."""
        return _positions(self.code)[self.instruction // 2]


@cache
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions())


@dataclass(frozen=True)
class CallSite:
    """The expression, and the plain functions that led to it from the nearest method of a module (the last frame)."""

    frames: tuple[Frame, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((frame.code.co_filename, frame.position) for frame in self.frames)

    @property
    def method(self) -> Frame | None:
        """The method in whose text the expression stands, perhaps inside a nested function or comprehension."""
        owner = self.frames[-1]
        return owner if self.frames[0].code in _nested(owner.code) else None

    @property
    def text(self) -> str:
        frame = self.frames[0]
        return f"{Path(frame.code.co_filename).name}:{frame.position[0]}"


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


class CallStack:
    """Looks at the Python stack. Only the frames of the last look are held, so that no variables are kept alive."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._frames: list[FrameType] = []
        self._invocations: list[Invocation] = []

    def look(self, frame: FrameType) -> Invocation:
        """The run of the innermost function. The same run is the same object at every look."""
        frames: list[FrameType] = []
        at: FrameType | None = frame
        while at is not None:
            frames.append(at)
            at = at.f_back
        frames.reverse()
        same = 0
        for old, new in zip(self._frames, frames, strict=False):
            if old is not new:
                break
            same += 1
        del self._frames[same:], self._invocations[same:]
        for new in frames[same:]:
            parent = self._invocations[-1] if self._invocations else None
            self._invocations.append(Invocation(new.f_code, parent, len(self._invocations), self._owner(new)))
            self._frames.append(new)
        return self._invocations[-1]

    def site(self, frame: FrameType) -> CallSite | None:
        """The call site of whoever called torch from this frame; None if no method of a module did."""
        self.look(frame)
        frames = []
        for at, invocation in zip(reversed(self._frames), reversed(self._invocations), strict=True):
            if at.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
                frames = []  # how a subclass of Tensor carries out an operation; the model's text is further out
            elif is_model_code(at.f_code):
                frames.append(Frame(at.f_code, at.f_lasti, invocation))
                if invocation.module is not None:
                    return CallSite(tuple(frames))
        return None

    def forget(self) -> None:
        self._frames, self._invocations = [], []

    def _owner(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if not code.co_argcount or not is_model_code(code):
            return None
        first = frame.f_locals.get(code.co_varnames[0])
        return self._names.get(first) if isinstance(first, nn.Module) else None
