"""Which node of the record a tensor is: through views, writes in place, aliases and subclasses of Tensor.

A tensor is known by itself where it came out of an operation. Besides, every piece of memory has a history of
writes: its creation, and what was changed in place. So a write through one view is seen by all others that overlap
with it, and an alias that no operation made (`x.data`, a subclass around a plain tensor) is still found.

Addresses of memory are used again as soon as it is free, and then a new tensor would be taken for an old one. Hence
every piece of memory in the history is held by a weak reference: the memory itself is freed, its name stays taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary


class Extent(NamedTuple):
    """The elements of its memory that a tensor covers."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Extent":
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def first_and_last(self) -> tuple[int, int]:
        last = self.offset + sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))
        return self.offset, last

    def corner(self) -> tuple[int, ...]:
        """The index of the first element along each axis of the whole memory."""
        rest, index = self.offset, [0] * len(self.strides)
        for axis in sorted(range(len(self.strides)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis] > 0:
                index[axis], rest = divmod(rest, self.strides[axis])
        return tuple(index)

    def intervals(self, other: "Extent") -> list[tuple[int, int, int, int]] | None:
        """Along each axis (first, last + 1) of both, if they lie on the same grid."""
        if self.strides != other.strides:
            return None
        pairs = zip(self.corner(), self.sizes, other.corner(), other.sizes, strict=True)
        return [(a, a + length, b, b + other_length) for a, length, b, other_length in pairs]

    def overlaps(self, other: "Extent") -> bool:
        if 0 in self.sizes or 0 in other.sizes:
            return False
        axes = self.intervals(other)
        if axes is not None:
            return all(a < other_end and b < end for a, end, b, other_end in axes)
        (first, last), (other_first, other_last) = self.first_and_last, other.first_and_last
        return first <= other_last and other_first <= last

    def covers(self, other: "Extent") -> bool:
        axes = self.intervals(other)
        if axes is not None:
            return all(a <= b and other_end <= end for a, end, b, other_end in axes)
        (first, last), (other_first, other_last) = self.first_and_last, other.first_and_last
        elements = 1
        for size in self.sizes:
            elements *= size
        # Without gaps, every element between the first and the last is its own.
        return elements == last - first + 1 and first <= other_first and other_last <= last


@dataclass(frozen=True, slots=True)
class Write:
    time: int
    extent: Extent
    node: int | None
    """None: constants, which do not depend on the inputs."""


Assemble = Callable[[Tensor, list[Write], int | None], int]
"""Makes a node of a tensor whose parts were written one by one, newest first, over what it was before."""


class Identity:
    def __init__(self, assemble: Assemble) -> None:
        self._assemble = assemble
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._assembled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._writes: dict[int, list[Write]] = {}
        self._memory: dict[int, StorageWeakRef] = {}
        self._time = 0

    def node_of(self, tensor: Tensor) -> int | None:
        """The node of a tensor as it is now; None if it does not depend on the inputs."""
        since, node = self._known.get(tensor) or (-1, None)
        history = self._writes.get(_address(tensor), ())
        if not history or history[-1].time <= since:
            return node
        until, made = self._assembled.get(tensor) or (-1, None)
        if until == history[-1].time:
            return made
        extent, parts = Extent.of(tensor), []
        for write in reversed(history):
            if write.time <= since:
                break
            if write.extent.overlaps(extent):
                parts.append(write)
                if write.extent.covers(extent):
                    break
        if not parts:
            return node
        whole = parts[-1].extent.covers(extent)
        if len(parts) == 1 and whole and parts[0].extent == extent:
            return parts[0].node
        if all(part.node is None for part in parts) and (whole or node is None):
            return None
        made = self._assemble(tensor, parts, None if whole else node)
        self._assembled[tensor] = (history[-1].time, made)
        return made

    def has_seen(self, tensor: Tensor) -> bool:
        """True if the tensor, or another one in its memory, came out of an operation."""
        return tensor in self._known or _address(tensor) in self._writes

    def know(self, tensor: Tensor, node: int | None) -> None:
        """The tensor came out of an operation."""
        self._time += 1
        self._known[tensor] = (self._time, node)
        address = _address(tensor)
        if node is not None and address and address not in self._writes:
            self._remember(tensor, node)

    def write(self, tensor: Tensor, node: int | None) -> None:
        """An operation changed the tensor in place, and with it whatever lies in the same memory."""
        self._time += 1
        self._known[tensor] = (self._time, node)
        address = _address(tensor)
        if address and (node is not None or address in self._writes):
            self._remember(tensor, node)

    def _remember(self, tensor: Tensor, node: int | None) -> None:
        address = _address(tensor)
        if address not in self._memory:
            self._memory[address] = StorageWeakRef(tensor.untyped_storage())
        self._writes.setdefault(address, []).append(Write(self._time, Extent.of(tensor), node))


def _address(tensor: Tensor) -> int:
    """A name for the memory of a tensor, or 0 if it has none of its own (sparse tensors, wrappers of other tensors)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0
