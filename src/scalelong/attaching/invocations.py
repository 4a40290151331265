"""What a rewritten function calls: one invocation of it, with the actions of the module that runs it."""

from typing import Any

import torch
from torch import Tensor

from ..errors import SkipMismatchError
from .actions import Action, running_backward

Actions = list[Action | None]
"""What happens at a site, by execution: an expression in a loop merges another skip each time."""

REWRITES = "_scalelong_rewrites"
"""The attribute of a module that holds its rewritten functions."""


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
        """The same, for an operand that the merge overwrites: all who hold the tensor see the sum."""
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
        """For a function that is defined inside this one."""
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
    """A function inside a rewritten one. Activation checkpointing calls it again in the backward, in any order."""

    def __init__(self, outer: Invocation) -> None:
        self.outer = outer
        self.calls: list[InnerInvocation] = []
        self.defined_in = -1 if torch.compiler.is_compiling() else running_backward()

    def start(self) -> "InnerInvocation":
        # A call from a backward that began after the definition computes again what was computed before.
        again = not torch.compiler.is_compiling() and running_backward() != self.defined_in and bool(self.calls)
        if again and len(self.calls) > 1:
            raise SkipMismatchError(
                "a function inside a method runs for several long skips, and activation checkpointing computes it "
                "again: which of them it is cannot be told. Define it anew for each skip, or make it a module"
            )
        call = InnerInvocation(self.outer, self.calls[0] if again else None)
        if not again:
            self.calls.append(call)
        return call


class InnerInvocation(Invocation):
    """One run of a function inside a rewritten one. It counts with that one, or repeats an earlier run."""

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


def start_invocation(module: Any, place: tuple[str, str, str]) -> Invocation:
    """What the new code calls first, with the module that runs it."""
    rewrites = getattr(module, REWRITES, None)
    actions = None if rewrites is None or rewrites.switch.mode.is_off else rewrites.actions.get(place)
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
