"""Hooks that edit one or more tensors among the arguments or in the result of a module."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import SkipMismatchError
from .actions import Action
from .trace import Path


class ArgumentHook:
    """A forward pre-hook."""

    def __init__(self) -> None:
        self.edits: list[tuple[Path, Action]] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        value: Any = (args, kwargs)
        for path, action in self.edits:
            value = edited(value, path, action, module)
        return value


class OutputHook:
    """A forward hook."""

    def __init__(self) -> None:
        self.edits: list[tuple[Path, Action]] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        for path, action in self.edits:
            output = edited(output, path, action, module)
        return output


def edited(value: Any, path: Path, action: Callable[[Tensor], Tensor], module: nn.Module) -> Any:
    """A copy of nested tuples, lists and dictionaries in which one tensor is changed."""
    if not path:
        return action(value)
    step, *rest = path
    try:
        changed = edited(value[step], tuple(rest), action, module)
    except (KeyError, IndexError, TypeError) as error:
        label = getattr(action, "label", "long skip")
        raise SkipMismatchError(
            f"{label}: {type(module).__name__} was called without it (looked for {path!r}). The plan holds for the "
            f"inputs that it was made with: unscale_ the model and scale it with example_inputs like these"
        ) from error
    if isinstance(value, tuple) and isinstance(step, int):
        items = [*value[:step], changed, *value[step + 1 :]]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    result: Any = copy.copy(value)
    result[step] = changed
    return result
