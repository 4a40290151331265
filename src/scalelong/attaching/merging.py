"""Merges that the author of a network names himself, in the place of a concatenation or an addition:

    x = torch.cat([x, skip], dim=1)     becomes     x = sl.merge(x, skip, i)
    x = x + skip                        becomes     x = sl.merge(x, skip, i, how="add")

`scale_skips_` then scales exactly these, numbered by i (1 is the outermost). Without a scaling, `merge` is the plain
operation.

How does a plain function know the scaling? Hooks on the scaled model, and on each module around one of its merges, note
that they run. The note holds for calls inside of that forward alone: `merge` looks for its frame up the stack. A block
that activation checkpointing computes again in the backward runs its hooks again.
"""

import sys
import threading
from types import FrameType
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ..errors import InvalidConfigError, SkipMismatchError
from .actions import Action, ForwardCounter


def merge(x: Tensor, skip: Tensor, i: int, how: Literal["cat", "add"] = "cat", dim: int = 1) -> Tensor:
    """Merge long skip i (1 is the outermost) into the main path x: `torch.cat([x, skip], dim)`, or x + skip.

    `dim` is the axis of the channels, for additions as well: 1 for images, -1 for tokens (B, L, C).
    A model that calls it is scaled at these merges and no others. The same i may be merged several times in a forward:
    levels with shared weights, a U that runs twice.
    """
    if how not in ("cat", "add"):
        raise InvalidConfigError(f"how must be 'cat' or 'add', got {how!r}")
    actions = _actions_now()
    if actions:
        x, skip = actions.apply((i, "main"), x), actions.apply((i, "skip"), skip)
    merged = torch.cat([x, skip], dim) if how == "cat" else x + skip
    return actions.apply((i, "merged"), merged) if actions else merged


class NamedMerges:
    """What a scaled model does at its merges, by number and operand ("skip", "main", "merged")."""

    def __init__(self, actions: dict[tuple[int, str], Action], counter: ForwardCounter) -> None:
        self.actions, self.counter = actions, counter

    def apply(self, place: tuple[int, str], tensor: Tensor) -> Tensor:
        action = self.actions.get(place)
        return tensor if action is None or self.counter.mode.is_off else action(tensor)


# Which model is running. Each thread has a stack of its own; code that is being compiled has another.

_RUNNING = threading.local()
_COMPILING: list[NamedMerges] = []


def _actions_now() -> NamedMerges | None:
    if torch.compiler.is_compiling():
        return _COMPILING[-1] if _COMPILING else None
    stack: list[tuple[NamedMerges, FrameType]] = getattr(_RUNNING, "stack", [])
    while stack:
        frame, in_checkpoint = sys._getframe(2), False
        while frame is not None and frame is not stack[-1][1]:
            in_checkpoint |= frame.f_code.co_filename == torch.utils.checkpoint.__file__
            frame = frame.f_back
        if in_checkpoint and frame is not None and not stack[-1][0].counter.mode.is_off:
            raise SkipMismatchError(
                "activation checkpointing would compute a merge again outside of the module in whose forward it stands,"
                " without its scaling: give the checkpoint a module (checkpoint(self.block, x, skip)), not a function"
            )
        if frame is not None:
            return stack[-1][0]
        stack.pop()  # a forward that ended with an exception
    return None


class EnterMerges:
    """A forward pre-hook of a module around a named merge."""

    def __init__(self, merges: NamedMerges, is_model: bool) -> None:
        self.merges, self.is_model = merges, is_model

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        if torch.compiler.is_compiling():
            if self.is_model:
                _COMPILING.clear()
            _COMPILING.append(self.merges)
            return
        if not hasattr(_RUNNING, "stack"):
            _RUNNING.stack = []
        _RUNNING.stack.append((self.merges, sys._getframe(1)))


class LeaveMerges:
    """The forward hook to it."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        stack = _COMPILING if torch.compiler.is_compiling() else getattr(_RUNNING, "stack", None)
        if stack:
            stack.pop()


def enter_merges_(host: nn.Module, merges: NamedMerges, modules: set[str]) -> None:
    """Hooks on the model and on all modules around these."""
    names = {".".join(name.split(".")[:n]) for name in modules for n in range(len(name.split(".")) + 1)}
    for name in sorted(names):
        module = host.get_submodule(name)
        module.register_forward_pre_hook(EnterMerges(merges, not name), prepend=True)
        module.register_forward_hook(LeaveMerges())
