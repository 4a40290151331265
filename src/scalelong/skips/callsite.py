"""Where in the source of a model an operation or a module call stands."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

# Frames of these are not the model's own text: what counts is who called them.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_HELPERS = ("einops", "accelerate/hooks")


def is_model_code(code: CodeType) -> bool:
    file = code.co_filename
    return not file.startswith(_LIBRARIES) and not any(helper in file for helper in _HELPERS)


@dataclass(frozen=True)
class Frame:
    code: CodeType
    instruction: int
    module: str | None
    """The module whose method this is, by name; None for a plain function."""
    invocation: int
    """Tells one run of the function from another."""

    @property
    def position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First line, last line, first column, last column of the expression."""
        return list(self.code.co_positions())[self.instruction // 2]


@dataclass(frozen=True)
class CallSite:
    """The expression, and the plain functions that led to it from the nearest method of a module (the last frame)."""

    frames: tuple[Frame, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((frame.code.co_filename, frame.position) for frame in self.frames)

    @property
    def method(self) -> Frame | None:
        """The method in whose text the expression stands, perhaps inside of a nested function or comprehension."""
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


class CallSites:
    """Looks at the Python stack. Frames are kept, so that their identities are unique, but not their variables."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._frames: dict[int, FrameType] = {}
        self._running: list[FrameType] = []

    def current(self, frame: FrameType | None = None) -> CallSite | None:
        """The call site of whoever called torch, or of a frame; None if no method of a module did."""
        frames = []
        frame = frame or sys._getframe(1)
        while frame is not None:
            if is_model_code(frame.f_code):
                owner = self._owner(frame)
                frames.append(Frame(frame.f_code, frame.f_lasti, owner, self._identity(frame)))
                if owner is not None:
                    return CallSite(tuple(frames))
            frame = frame.f_back
        return None

    def release(self) -> None:
        """Let go of the variables of functions that have returned."""
        still_running = []
        for frame in self._running:
            try:
                frame.clear()
            except RuntimeError:
                still_running.append(frame)
        self._running = still_running

    def _identity(self, frame: FrameType) -> int:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = frame
            self._running.append(frame)
        return id(frame)

    def _owner(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if not code.co_argcount:
            return None
        first = frame.f_locals.get(code.co_varnames[0])
        return self._names.get(first) if isinstance(first, nn.Module) else None
