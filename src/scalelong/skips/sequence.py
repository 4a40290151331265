"""Which step of sampling a forward is: for caches, which must know whose results they may use again.

A step is one value of the time. Several forwards with the same time are one step, as in guidance; each has a slot of
its own, by its condition and, among forwards alike, by its order. A sequence of steps is one image, or one batch of
them. It ends when the time goes back. What cannot be told apart is refused.
"""

import inspect
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CacheError
from ..tracing import leaves
from .reruns import tensors_in

TIMES = ("timestep", "timesteps", "t", "time", "times", "sigma", "sigmas", "noise_level", "noise_labels")
"""What models call the argument that says how far sampling is."""

MOST = 64
"""Forwards alike in one step. More of them are no sampling, and each keeps results."""

Slot = tuple[int, int]
"""Which condition of a step, in the order of the first step, and which of the forwards with it."""


@dataclass
class Sequence:
    """The steps of one image, or of one batch of them."""

    thread: int
    step: int = -1
    forwards: int = 0
    begun: bool | None = None
    """Whether the time fell, or rose, to where this sequence began; None if there was none before."""
    time: tuple[float, ...] | None = None
    falling: bool | None = None
    """The direction of its time, from its second step on."""
    conditions: list["Condition"] = field(default_factory=list)
    """Those of the first step: at others there are no new ones."""
    used: dict[int, int] = field(default_factory=dict)
    """Forwards of this step, by condition."""
    before: dict[int, int] = field(default_factory=dict)
    """Those of the step before."""
    stale: bool = False
    """Whether something of this step came from the cache."""
    kept: dict[Slot, dict[tuple[str, int], Any]] = field(default_factory=dict)
    """What the inner modules returned at the last full step."""


class Steps:
    """Counts the steps of a model that samples. `times` are the names that its time may have."""

    def __init__(self, host: nn.Module, times: tuple[str, ...], passes: int | None) -> None:
        self.host, self.times, self.passes = host, times, passes
        self._sequence: Sequence | None = None
        self._slot: Slot = (0, 0)
        self._falling = True
        """The direction of the time in the sequences so far."""

    def advance(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward with these inputs begins. Returns their kind: what decides which modules run."""
        named = _named(self.host, args, kwargs)
        time = next((_numbers(value) for name, value in named if name in self.times), None)
        self._require_time(time, named)
        thread = threading.get_ident()
        sequence = self._sequence or Sequence(thread)
        move = _direction(sequence.time, time)
        if move is not None and not self._goes_on(sequence, move):
            self.close()
            sequence = Sequence(thread, begun=move if isinstance(move, bool) else None)
        self._sequence = sequence
        if sequence.thread != thread:
            raise CacheError("the steps of one image come from two threads; give each thread a model of its own")
        begins = time != sequence.time if self.passes is None else sequence.forwards % self.passes == 0
        if begins:
            _require_same_passes(sequence)
            sequence.before, sequence.used, sequence.stale = sequence.used, {}, False
            sequence.step += 1
        sequence.time = time
        sequence.forwards += 1
        image = _image(named, self.times)
        given = [(name, value) for name, value in named if name not in self.times]
        condition = Condition(_kind(given), [(name, value) for name, value in given if name != image])
        number = self._condition(sequence, condition, time is not None)
        self._slot = (number, sequence.used.get(number, 0))
        if self._slot[1] >= MOST:
            raise CacheError(
                f"{MOST} forwards at one time are no sampling: call reset() between images, or say how many forwards "
                f"are one step (passes=1)"
            )
        sequence.used[number] = self._slot[1] + 1
        return condition.kind

    @property
    def number(self) -> int:
        """Of the step, from 0."""
        return -1 if self._sequence is None else self._sequence.step

    @property
    def kept(self) -> Any:
        """What was kept for this forward at an earlier step; None if there is nothing."""
        return None if self._sequence is None else self._sequence.kept.get(self._slot)

    def keep(self, results: Any, fresh: bool) -> None:
        """The forward ended: its results are fresh, or were those that are kept."""
        if self._sequence is not None:
            self._sequence.kept[self._slot] = results
            self._sequence.stale |= not fresh

    def close(self) -> None:
        """The sequence ends. Raises if nobody knows whose results its last step used."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            _require_same_passes(sequence)

    def drop(self) -> None:
        """The sequence ends in the middle."""
        self._sequence = None

    def _goes_on(self, sequence: Sequence, move: bool | str) -> bool:
        """Whether a step in this direction belongs to the sequence.

        Two steps in a row against the direction so far turn it: the first of them begins a sequence, since it may be
        the first step of another image.
        """
        if not isinstance(move, bool):
            return False
        if sequence.falling is None and (move == self._falling or sequence.begun == move):
            sequence.falling = self._falling = move
        return sequence.falling == move

    def _require_time(self, time: Any, named: list[tuple[str, Any]]) -> None:
        if time is None and self.passes is None:
            raise CacheError(
                f"no argument of {type(self.host).__name__} says how far sampling is (its arguments: "
                f"{', '.join(name for name, _ in named)}; looked for {', '.join(self.times)}): name it with time=..., "
                f"or say how many forwards are one step with passes=1"
            )

    def _condition(self, sequence: Sequence, given: "Condition", timed: bool) -> int:
        """The number of a condition. After the first step there are no new ones."""
        for number, known in enumerate(sequence.conditions):
            if not known.differences(given):
                return number
        if sequence.step > 0:
            changed = min((known.differences(given) for known in sequence.conditions), key=len)
            advice = "" if timed else f"; if it is the time of sampling, say so: time={changed[-1]!r}"
            raise CacheError(
                f"{', '.join(changed)} changed in the middle of sampling, and what was kept belongs to what was "
                f"given before: call reset() where another image begins{advice}"
            )
        sequence.conditions.append(given)
        return len(sequence.conditions) - 1


def _direction(before: tuple[float, ...] | None, now: tuple[float, ...] | None) -> bool | str | None:
    """Whether the time falls; None if it stays or is not known, "mixed" if images differ in that."""
    if before is None or now is None or before == now:
        return None
    if len(before) != len(now):
        return "mixed"
    falls = {new < old for new, old in zip(now, before, strict=True) if new != old}
    return falls.pop() if len(falls) == 1 else "mixed"


def _require_same_passes(sequence: Sequence) -> None:
    """Of several forwards alike, which one is missing? What was taken from the cache may be that of another image."""
    for number, count in sequence.before.items():
        now = sequence.used.get(number, 0)
        if sequence.stale and 0 < now < count:
            raise CacheError(
                f"one step ran {count} forwards with the same condition and the next one {now}, so that nobody knows "
                f"whose cache was used: call reset() where another image begins, or say how many forwards are one step "
                f"(passes=1)"
            )


# What a forward was given


class Condition:
    """What a forward was given but image and time: names and values, and their state when they were given."""

    def __init__(self, kind: Any, named: list[tuple[str, Any]]) -> None:
        self.kind = kind
        self.values = {name: [_Given(leaf) for leaf in _leaves(value)] for name, value in named}

    def differences(self, other: "Condition") -> list[str]:
        """The names of what is not the same; [] if all is."""
        found = [name for name in {**self.values, **other.values} if not self._same(other, name)]
        return found or ([] if self.kind == other.kind else ["the size of its inputs"])

    def _same(self, other: "Condition", name: str) -> bool:
        mine, theirs = self.values.get(name, []), other.values.get(name, [])
        return len(mine) == len(theirs) and all(a.same(b) for a, b in zip(mine, theirs, strict=True))


class _Given:
    """A tensor or another value. A tensor that was written into since is not the same any more."""

    def __init__(self, value: Any) -> None:
        counts = isinstance(value, Tensor) and not value.is_inference()
        self.version = value._version if counts else 0
        # Without a count of writes, only a copy can tell.
        self.value = value.clone() if isinstance(value, Tensor) and not counts else value

    def same(self, other: "_Given") -> bool:
        a, b = self.value, other.value
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)
        if a is b or self._is_changed():
            return a is b and self.version == other.version
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))

    def _is_changed(self) -> bool:
        return not self.value.is_inference() and self.value._version != self.version


_PLAIN = (bool, int, float, complex, str, bytes)


def _leaves(value: Any) -> list[Any]:
    """The tensors in it, and numbers, texts and flags. Other objects count by their tensors alone."""
    flat = pytree.tree_leaves(value)
    found = [leaf for leaf in flat if isinstance(leaf, (Tensor, *_PLAIN))]
    return found + [t for leaf in flat if not isinstance(leaf, Tensor) for t in tensors_in(leaf)]


def _kind(values: list[Any]) -> Any:
    """Shapes and types of the tensors, and flags and texts, which may decide what a forward does."""
    tensors = tuple((path, tuple(t.shape), t.dtype, str(t.device)) for path, t in leaves(values))
    return tensors, tuple(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, bool | str))


def _named(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments by name, in the order of the signature; those of *args are args[0], args[1], ..."""
    try:
        signature = inspect.signature(host.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return [(f"args[{n}]", value) for n, value in enumerate(args)] + list(kwargs.items())
    named: list[tuple[str, Any]] = []
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named += [(f"{name}[{n}]", item) for n, item in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named += value.items()
        else:
            named.append((name, value))
    return named


def _image(named: list[tuple[str, Any]], times: tuple[str, ...]) -> str | None:
    """The name of the argument that is denoised: the first with a floating-point tensor that has positions."""
    for name, value in named:
        if name not in times and any(t.is_floating_point() and t.dim() > 1 for t in tensors_in(value)):
            return name
    return None


def _numbers(value: Any) -> tuple[float, ...] | None:
    """The times of a forward: one, or one for each image where they differ."""
    if isinstance(value, Tensor):
        numbers = value.detach().flatten().double().tolist()
        return tuple(numbers[:1] if len(set(numbers)) == 1 else numbers) or None
    return (float(value),) if isinstance(value, int | float) else None
