"""What is done at a merge: multiply an operand, whole or as a slice; and the forward hooks that do it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SkipMismatchError
from ..scaling.base import SkipScaling
from .trace import TreePath as Path

# What happens to a tensor on its way into a merge. Plain objects, so that copies and pickles of a model keep them.


class Action:
    """Checks that the tensor is the planned one: the plan holds for the path that was traced, and for no other."""

    def __init__(self, label: str, axis: int, channels: int) -> None:
        self.label, self.axis, self.channels = label, axis, channels

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise SkipMismatchError(f"{self.label}: expected a tensor, found {type(tensor).__name__}")
        if tensor.dim() <= self.axis or tensor.shape[self.axis] != self.channels:
            raise SkipMismatchError(
                f"{self.label}: expected {self.channels} channels on axis {self.axis}, found the shape "
                f"{tuple(tensor.shape)}. The plan holds for the inputs that it was made with: unscale_ the model and "
                f"scale it with example_inputs like these"
            )
        return self.apply(tensor)

    def apply(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError


class Multiply(Action):
    """One operand times a constant."""

    def __init__(self, label: str, axis: int, channels: int, factor: float) -> None:
        super().__init__(label, axis, channels)
        self.factor = factor

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self.factor


class Gate(Action):
    """The skip as its method scales it."""

    def __init__(self, label: str, axis: int, channels: int, scaling: SkipScaling, index: int) -> None:
        super().__init__(label, axis, channels)
        self.scaling, self.index = scaling, index

    def apply(self, tensor: Tensor) -> Tensor:
        return self.scaling.scale(tensor, self.index)


class MultiplySlices(Action):
    """Slices of a concatenation times constants, in one multiplication by a vector over the channels.

    That is cheaper than to split and concatenate again, and safe with gradients, unlike a change in place.
    """

    def __init__(self, label: str, axis: int, channels: int, factors: list[tuple[int, int, float]]) -> None:
        super().__init__(label, axis, channels)
        self.factors = factors
        self._vectors: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def apply(self, tensor: Tensor) -> Tensor:
        return tensor * self._vector(tensor)

    def _vector(self, tensor: Tensor) -> Tensor:
        # A compiled graph has its own constants, and a fake tensor must not be remembered for a real one.
        if torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter):
            return self._new_vector(tensor)
        key = (tensor.device, tensor.dtype, tensor.dim())
        if key not in self._vectors:
            with torch.inference_mode(False), torch.no_grad():
                self._vectors[key] = self._new_vector(tensor)
        return self._vectors[key]

    def _new_vector(self, tensor: Tensor) -> Tensor:
        values = torch.ones(self.channels, dtype=tensor.dtype, device=tensor.device)
        for start, length, factor in self.factors:
            values[start : start + length] = factor
        shape = [1] * tensor.dim()
        shape[self.axis] = self.channels
        return values.view(shape)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_vectors": {}}


class GateSlice(Action):
    """The slice of a concatenation that is the skip, as its method scales it."""

    def __init__(
        self, label: str, axis: int, channels: int, start: int, length: int, scaling: SkipScaling, index: int
    ) -> None:
        super().__init__(label, axis, channels)
        self.start, self.length = start, length
        self.scaling, self.index = scaling, index

    def apply(self, tensor: Tensor) -> Tensor:
        after = self.channels - self.start - self.length
        before, skip, behind = tensor.split([self.start, self.length, after], dim=self.axis)
        return torch.cat([before, self.scaling.scale(skip, self.index), behind], dim=self.axis)


# Hooks that edit one or more tensors among the arguments or in the result of a module.


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
    # Plain containers by plain means: the compiler can follow those.
    result: Any = {**value} if type(value) is dict else [*value] if type(value) is list else copy.copy(value)
    result[step] = changed
    return result
