"""The plan: where the long skips of a model are and how each will be scaled. People read it before they trust it."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ..console import text_table
from ..errors import InvalidConfigError
from ..files import write_text
from ..scaling.base import SkipSite

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """Where one operand of a merge can be scaled."""

    kind: str
    """"argument" or "output" of a module, that is the operand itself; "concat argument" or "concat output", that is
    the concatenation, of which the operand is a slice; "rewrite": an expression in a method; "native"."""
    module: str
    path: tuple[int | str, ...] = ()
    """The way to the tensor in the arguments (positional, keywords) or in the output."""
    axis: int = 1
    """The channel axis of that tensor."""
    start: int = 0
    length: int = 0
    """The channels of the operand in that tensor."""
    channels: int = 0
    """All channels of that tensor."""
    source: "Source | None" = None

    def __str__(self) -> str:
        if self.kind == "native":
            return "by the model itself"
        if self.source is not None:
            return f"rewrite of {self.module or 'the model'}.{self.source.method}, line {self.source.line}"
        return f"{self.kind} {_way(self.path, self.kind)} of {self.module or 'the model'}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One execution of an expression in the source of a method."""

    method: str
    digest: str
    """A hash of the source of the method."""
    line: int
    position: tuple[int, int, int, int]
    """First and last line, counted from the method's, first and last column of the expression."""
    operand: int | str | None
    """Which operand of an addition is meant, or which argument of a call ("#1" or a keyword); None: its value."""
    execution: int
    executions: int
    """This is the n-th of so many executions of the expression in one run of the method."""


@dataclass(frozen=True, kw_only=True)
class FoldTarget:
    """A linear layer or convolution that takes the skip at these input channels, or whose whole output it is."""

    module: str
    start: int
    length: int
    main_start: int = 0
    main_length: int = 0
    """The channels of the main path."""
    output: bool = False


@dataclass(frozen=True, kw_only=True)
class LongSkip:
    index: int
    """i, from 1 (outermost) to N."""
    producer: str
    consumer: str
    """The module in which the skip is merged, or the one that gets the merged tensor."""
    merge: str
    """"cat", "add" or "lerp"."""
    shape: tuple[int, ...]
    site: SkipSite
    location: str
    """File and line of the merge."""
    attachment: Attachment | None
    main: Attachment | None = None
    """Where the main path can be scaled, for methods that do."""
    obstacle: str = ""
    """Why there is no attachment."""
    norm: str = ""
    """The normalisation right behind the merge."""
    cancelled: float = 0.0
    """The share of the skip's channels for which that normalisation cancels a constant κ."""
    bypass: bool = False
    """Whether another layer sees the merge without the normalisation (the shortcut of a residual block)."""
    fold: tuple[FoldTarget, ...] = ()
    unfoldable: str = ""
    """Why it cannot be folded."""
    readers: tuple[FoldTarget, ...] = ()
    """The linear layers and convolutions that take the merge as it is, such as the shortcut of a residual block."""
    beyond: tuple[FoldTarget, ...] = ()
    """The convolutions behind the normalisation as well: all that read the skip. Empty if something else does, too."""

    def replace(self, **changes: Any) -> "LongSkip":
        return replace(self, **changes)


@dataclass(frozen=True)
class SkipPlan:
    """The long skips of one model, outermost first. Print it; save it with `save`, and read it back with `load`."""

    model: str
    skips: tuple[LongSkip, ...]
    repeats: int = 1
    """How often each long skip occurs in one forward."""
    searched: str = field(default="", compare=False)

    def __len__(self) -> int:
        return len(self.skips)

    def __iter__(self) -> Iterator[LongSkip]:
        return iter(self.skips)

    def __getitem__(self, index: int) -> LongSkip:
        """The i-th long skip, counted from 1 as in the paper."""
        if not 1 <= index <= len(self.skips):
            raise IndexError(f"long skips are numbered from 1 to {len(self.skips)}, got {index}")
        return self.skips[index - 1]

    @property
    def sites(self) -> tuple[SkipSite, ...]:
        return tuple(skip.site for skip in self.skips)

    def select(self, indices: Sequence[int]) -> "SkipPlan":
        """A plan of these long skips alone, numbered anew in this order, outermost first."""
        unknown = sorted(set(indices) - set(range(1, len(self.skips) + 1)))
        if unknown or not indices or len(set(indices)) != len(indices):
            raise InvalidConfigError(
                f"select takes numbers from 1 to {len(self.skips)}, each once, got {list(indices)}"
            )
        chosen = [self.skips[index - 1] for index in indices]
        renumbered = [skip.replace(index=i, site=replace(skip.site, index=i)) for i, skip in enumerate(chosen, start=1)]
        return replace(self, skips=tuple(renumbered))

    def __str__(self) -> str:
        head = ("i", "producer", "merged in", "kind", "shape", "axis", "scaled as", "norm cancels", "foldable")
        rows: list[dict[str, str]] = [dict(zip(head, _row(skip), strict=True)) for skip in self.skips]
        table = text_table(rows, left=True, rule=False)
        count = f"{len(self.skips)} long skip{'s' if len(self.skips) != 1 else ''}"
        repeated = f", each {self.repeats} times per forward" if self.repeats > 1 else ""
        return "\n".join([f"{self.model}: {count}{repeated}, outermost first", table])

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "repeats": self.repeats,
            "skips": [asdict(skip) for skip in self.skips],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SkipPlan":
        if not isinstance(values, dict) or values.get("format") != FORMAT or "skips" not in values:
            raise InvalidConfigError(f"not a plan of long skips in format {FORMAT}")
        try:
            skips = tuple(_skip(entry) for entry in values["skips"])
            return cls(str(values["model"]), skips, int(values["repeats"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidConfigError(f"the plan is damaged: {error!r}") from error

    @classmethod
    def from_json(cls, text: str) -> "SkipPlan":
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise InvalidConfigError(f"the plan is not JSON: {error}") from error

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "SkipPlan":
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise InvalidConfigError(f"cannot read the plan {os.fspath(path)}: {error.strerror}") from error
        return cls.from_json(text)


def _row(skip: LongSkip) -> tuple[str, ...]:
    cancels = f"{skip.cancelled:.0%} ({skip.norm}{', but not in the shortcut' if skip.bypass else ''})"
    return (
        str(skip.index),
        skip.producer or "the model",
        skip.consumer or "the model",
        skip.merge,
        "x".join(map(str, skip.shape)),
        str(skip.site.channel_axis),
        str(skip.attachment) if skip.attachment is not None else f"impossible: {skip.obstacle}",
        cancels if skip.norm else "-",
        _foldable(skip),
    )


def _foldable(skip: LongSkip) -> str:
    if skip.attachment is not None and skip.attachment.kind == "native":
        return "yes"
    return "yes: " + ", ".join(target.module for target in skip.fold) if skip.fold else f"no: {skip.unfoldable}"


def _way(path: tuple[int | str, ...], kind: str) -> str:
    if kind.endswith("argument"):
        path = path[1:]
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path) or "itself"


def _skip(entry: dict[str, Any]) -> LongSkip:
    values = dict(entry)
    values["site"] = SkipSite(**values["site"])
    values["shape"] = tuple(values["shape"])
    values["attachment"] = _attachment(values["attachment"])
    values["main"] = _attachment(values["main"])
    for name in ("fold", "readers", "beyond"):
        values[name] = tuple(FoldTarget(**target) for target in values.get(name, ()))
    return LongSkip(**values)


def _attachment(entry: dict[str, Any] | None) -> Attachment | None:
    if entry is None:
        return None
    values = {**entry, "path": tuple(entry["path"])}
    if values["source"] is not None:
        values["source"] = Source(**{**values["source"], "position": tuple(values["source"]["position"])})
    return Attachment(**values)
