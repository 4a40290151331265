"""The kinds of merges: one class each. A new kind is a new class, and one entry in `KINDS`.

A merge is an operation that joins two or more tensors which depend on the inputs. Its kind says which of its tensors
are joined, whether they lie side by side along the channels or are summed, and so what a skip is a part of:

    Concatenation     torch.cat and all that end in it (concat, hstack, einops.pack)
    SliceAssignment   buffer[:, :c] = x, one part after the other
    Addition          +, +=, torch.add, sub, addcmul, sum([...]), functools.reduce
    StackedSum        torch.stack([...]).sum(0), or .mean(0)
    Interpolation     torch.lerp
    OtherJoin         everything else: seen, so that no skip is overlooked, but not scaled
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MergeKind:
    name: str
    """As it is called in plans and patterns."""
    operations: frozenset[str]
    joins_channels: bool
    """The operands lie side by side in the result, so that a skip is a slice of it."""
    is_scalable: bool = True

    def axis(self, arguments: Sequence[Any], options: dict[str, Any], ndim: int) -> int | None:  # noqa: ARG002
        """The axis along which the operands are joined; None if they are summed."""
        return None

    def positions(self, name: str, shapes: Sequence[Shape], tracked: Sequence[bool]) -> tuple[int, ...]:  # noqa: ARG002
        """Which of the tensors among the arguments are operands."""
        return tuple(range(len(shapes)))


class Concatenation(MergeKind):
    def __init__(self) -> None:
        super().__init__("cat", frozenset({"cat"}), joins_channels=True)

    def axis(self, arguments: Sequence[Any], options: dict[str, Any], ndim: int) -> int | None:
        return int(arguments[1] if len(arguments) > 1 else options.get("dim", 0)) % max(ndim, 1)


class SliceAssignment(MergeKind):
    """Not one operation but several writes into one buffer; they are put together when somebody reads it."""

    def __init__(self) -> None:
        super().__init__("slice", frozenset({"slices"}), joins_channels=True)


class Addition(MergeKind):
    def __init__(self) -> None:
        names = ("add", "sub", "rsub", "addcmul", "addcdiv")
        super().__init__("add", frozenset(names + tuple(f"{name}_" for name in names)), joins_channels=False)

    def positions(self, name: str, shapes: Sequence[Shape], tracked: Sequence[bool]) -> tuple[int, ...]:
        if not name.startswith("addc"):
            return (0, 1)
        # x + a * b: a factor of either a or b is a factor of the product. The one that is a feature is the operand.
        feature = [place for place in (1, 2) if place < len(shapes) and tracked[place] and shapes[place] == shapes[0]]
        return (0, feature[0]) if feature else (0, 1)


class StackedSum(MergeKind):
    """The stack is a merge only if it is summed or averaged over the new axis at once; see `Trace.settle`."""

    def __init__(self) -> None:
        super().__init__("stack", frozenset({"stack"}), joins_channels=False)


class Interpolation(MergeKind):
    def __init__(self) -> None:
        super().__init__("lerp", frozenset({"lerp", "lerp_"}), joins_channels=False)

    def positions(self, name: str, shapes: Sequence[Shape], tracked: Sequence[bool]) -> tuple[int, ...]:  # noqa: ARG002
        return (0, 1)


class OtherJoin(MergeKind):
    def __init__(self) -> None:
        super().__init__("other", frozenset(), joins_channels=False, is_scalable=False)


KINDS: tuple[MergeKind, ...] = (Concatenation(), SliceAssignment(), Addition(), StackedSum(), Interpolation())
OTHER = OtherJoin()
SLICES = KINDS[1]
_BY_OPERATION = {operation: kind for kind in KINDS for operation in kind.operations}


def kind_of(operation: str) -> MergeKind:
    return _BY_OPERATION.get(operation, OTHER)
