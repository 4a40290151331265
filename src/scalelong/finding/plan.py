"""The plan: where the long skips of a model are, and how each can be scaled. Its file is flat JSON."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any

from ..console import html_table, text_table
from ..errors import CannotReadError, InvalidConfigError
from ..files import fitting, in_words, parse_json, read_text, write_text
from ..scaling import SkipSite
from ..tracing import Argument

FORMAT = 1
_AGAIN = "make it again with find_skips or `scalelong find`"


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A place where one operand of a merge can be scaled."""

    kind: str
    """"argument" or "output" of a module, that is the operand itself; "concat argument" or "concat output", that is
    the concatenation, of which the operand is a slice; "rewrite": an expression in a method; "merge": the model calls
    `scalelong.merge`; "native"."""
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
    source: "SourcePlace | None" = None

    @property
    def side(self) -> str:
        """The side of the module on which the tensor is: "argument", "output", or "" for the other kinds."""
        side = self.kind.removeprefix("concat ")
        return side if side in ("argument", "output") else ""

    @property
    def is_slice(self) -> bool:
        """True if the operand is a part of that tensor, a concatenation."""
        return self.length < self.channels

    def __str__(self) -> str:
        if self.kind == "native":
            return "by the model itself"
        if self.kind == "merge":
            return f"sl.merge in {self.module or 'the model'}"
        if self.source is not None:
            return f"rewrite of {self.module or 'the model'}.{self.source.method}, line {self.source.line}"
        path = self.path[1:] if self.side == "argument" else self.path
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        return f"{self.kind} {steps or 'itself'} of {self.module or 'the model'}"


@dataclass(frozen=True, kw_only=True)
class SourcePlace:
    """One execution of an expression in the source of a method."""

    method: str
    digest: str
    """A hash of the source of the method."""
    line: int
    position: tuple[int, int, int, int]
    """First and last line, counted from the method's, first and last column of the expression."""
    operand: int | Argument | None
    """What is scaled: the operand of this number of an addition, an argument of a call, or (None) its value."""
    execution: int
    executions: int
    """This is the n-th of so many executions of the expression in one run of the method."""
    owner: str = ""
    """The qualified name of the function: a method of a base class, or one that the instance keeps."""


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
class PlannedMerge:
    """The operation in which the skip and the main path become one tensor."""

    kind: str
    """"cat", "add" or "lerp"."""
    location: str
    """File and line."""
    module: str = ""
    """The module in whose forward it runs."""
    occurrence: int = 0
    """It is the n-th merge at its location in that module in one forward."""
    operand: int = -1
    """Position of the skip among the operands; -1 where it is not known, for models that scale themselves."""
    main_operand: int = -1


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places where the operands of a merge can be scaled."""

    skip: Attachment | None
    main: Attachment | None = None
    """The main path, for methods that scale it."""
    exact: Attachment | None = None
    """The skip as it enters the merge, if `skip` lies before a crop, a pad or a factor of the model: for methods that
    look at the data."""
    merged: Attachment | None = None
    """The concatenation, with the channels of the skip in it: for methods that change it as a whole."""
    obstacle: str = ""
    """Why there is no place for the skip."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """The layers that read a merge: which can take a constant into their weights, and which norm cancels one."""

    behind_norm: tuple[FoldTarget, ...] = ()
    """All convolutions that read the skip, after the normalisation as well. Empty if something else reads it, too."""
    fold: tuple[FoldTarget, ...] = ()
    """The layers whose weights take a constant of the skip exactly."""
    unfoldable: str = ""
    """Why there are none."""
    norm: str = ""
    """The normalisation right after the merge."""
    norm_module: str = ""
    """The module that does it."""
    cancelled: float = 0.0
    """The share of the skip's channels for which that normalisation cancels a constant κ."""
    bypass: bool = False
    """True if another layer sees the merge without the normalisation (the shortcut of a residual block)."""

    @property
    def where(self) -> str:
        """The norm and its module, in words."""
        if not self.norm:
            return ""
        shortcut = ", but not in the shortcut" if self.bypass else ""
        return f"{self.norm}{f' in {self.norm_module}' if self.norm_module else ''}{shortcut}"


@dataclass(frozen=True, kw_only=True)
class LongSkip:
    index: int
    """i, from 1 (outermost) to N."""
    producer: str
    consumer: str
    """The module in which the skip is merged, or the one that gets the merged tensor."""
    shape: tuple[int, ...]
    site: SkipSite
    merge: PlannedMerge
    places: Places
    readers: Readers = Readers()

    @property
    def ends(self) -> str:
        """The two ends of the skip, in words."""
        return f"{self.producer or 'the model'} to {self.consumer or 'the model'}"

    @property
    def is_named(self) -> bool:
        """True if the model merges it by `scalelong.merge`."""
        return self.places.skip is not None and self.places.skip.kind == "merge"

    def replace(self, **changes: Any) -> "LongSkip":
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A place in the source whose merges are no long skips, although a reader could take them for some."""

    kind: str
    location: str
    count: int
    reason: str

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        return f"left out: {self.kind} at {self.location}{times}: {self.reason}"


@dataclass(frozen=True)
class SkipPlan:
    """The long skips of one model, outermost first. Print it; save it with `save`, and read it back with `load`."""

    model: str
    skips: tuple[LongSkip, ...]
    repeats: int = 1
    """How often each long skip occurs in one forward."""
    left_out: tuple[LeftOut, ...] = ()

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
        """The part of the plan that scaling methods see."""
        # Rows times columns of the features; tokens and vectors have none.
        are_maps = [len(skip.shape) > 3 and skip.site.channel_axis == 1 for skip in self.skips]
        sizes = [math.prod(s.shape[2:]) if is_map else None for s, is_map in zip(self.skips, are_maps, strict=True)]
        levels = [*sorted({size for size in sizes if size is not None}), None]
        return tuple(
            replace(s.site, norm=s.readers.where or s.site.norm, level=None if size is None else levels.index(size))
            for s, size in zip(self.skips, sizes, strict=True)
        )

    def select(self, indices: Sequence[int]) -> "SkipPlan":
        """A plan of these long skips alone, numbered again in this order, outermost first."""
        if not indices or len(set(indices)) != len(indices) or not {*indices} <= {*range(1, len(self) + 1)}:
            raise InvalidConfigError(
                f"select takes numbers from 1 to {len(self.skips)}, each once, got {list(indices)}"
            )
        chosen = [self.skips[index - 1] for index in indices]
        renumbered = [skip.replace(index=i, site=replace(skip.site, index=i)) for i, skip in enumerate(chosen, start=1)]
        return replace(self, skips=tuple(renumbered))

    def rows(self) -> list[dict[str, str]]:
        """The table of `print(plan)`: a row per long skip."""
        rows = []
        for skip in self.skips:
            readers, place = skip.readers, skip.places.skip
            shortcut = ", but not in the shortcut" if readers.bypass else ""
            folds = f"yes: {', '.join(t.module for t in readers.fold)}" if readers.fold else f"no: {readers.unfoldable}"
            row = {
                "i": str(skip.index),
                "producer": skip.producer or "the model",
                "merged in": skip.consumer or "the model",
                "kind": skip.merge.kind,
                "shape": "x".join(map(str, skip.shape)),
                "axis": str(skip.site.channel_axis),
                "scaled as": str(place) if place is not None else f"impossible: {skip.places.obstacle}",
                "norm cancels": f"{readers.cancelled:.0%} ({readers.norm}{shortcut})" if readers.norm else "-",
                "foldable": "yes" if place is not None and place.kind == "native" else folds,
            }
            rows.append(row)
        return rows

    def counted(self) -> str:
        """How many long skips there are, in words."""
        count = f"{len(self.skips)} long skip{'s' if len(self.skips) != 1 else ''}"
        repeated = f", each {self.repeats} times per forward" if self.repeats > 1 else ""
        return f"{count}{repeated}, outermost first"

    def __str__(self) -> str:
        table = text_table(self.rows(), left=True, rule=False)
        return "\n".join([f"{self.model}: {self.counted()}", table, *map(str, self.left_out)])

    def _repr_html_(self) -> str:
        return html_table(self.rows(), f"{self.model}: {self.counted()}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "repeats": self.repeats,
            "skips": [_entry(skip) for skip in self.skips],
            **({"left_out": [asdict(merge) for merge in self.left_out]} if self.left_out else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SkipPlan":
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r}, not {FORMAT}")
            skips = tuple(_skip(entry) for entry in values["skips"])
            left_out = tuple(fitting(LeftOut, merge) for merge in values.get("left_out", ()))
            known = {"model": values["model"], "skips": skips, "repeats": values["repeats"], "left_out": left_out}
            return fitting(cls, known)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidConfigError(f"this is no plan of long skips ({in_words(error)}); {_AGAIN}") from error

    @classmethod
    def from_json(cls, text: str) -> "SkipPlan":
        try:
            values = parse_json(text)
        except ValueError as error:
            raise InvalidConfigError(f"the plan is not JSON ({error}); {_AGAIN}") from error
        return cls.from_dict(values)

    def save(self, path: str | PathLike[str]) -> None:
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "SkipPlan":
        try:
            text = read_text(path)
        except CannotReadError as error:
            raise InvalidConfigError(f"the plan of long skips is missing: {error}") from error
        return cls.from_json(text)


# Files. An entry of a skip is flat and has the names of version 0.2, `name` or `name=field`.

_PARTS = {
    "merge": "merge=kind location merged_in=module occurrence operand main_operand",
    "places": "attachment=skip main direct=exact merged obstacle",
    "readers": "norm norm_module cancelled bypass fold unfoldable beyond=behind_norm",
}
_NAMES = {
    name: (part, inner or name)
    for part, names in _PARTS.items()
    for name, _, inner in (entry.partition("=") for entry in names.split())
}


def _entry(skip: LongSkip) -> dict[str, Any]:
    values = asdict(skip)
    entry = {name: values[name] for name in ("index", "producer", "consumer", "shape", "site")}
    entry |= {name: values[part][inner] for name, (part, inner) in _NAMES.items()}
    for name in ("attachment", "main", "direct", "merged"):
        place = getattr(skip.places, _NAMES[name][1])
        if place is not None and place.source is not None and isinstance(place.source.operand, Argument):
            entry[name]["source"]["operand"] = str(place.source.operand)
    return entry


def _skip(entry: dict[str, Any]) -> LongSkip:
    # "readers" is a list in plans of version 0.2 that nothing needs.
    values = {name: value for name, value in entry.items() if name not in _NAMES and name != "readers"}
    parts: dict[str, dict[str, Any]] = {"merge": {}, "places": {}, "readers": {}}
    for name, (part, inner) in _NAMES.items():
        if name in entry:
            parts[part][inner] = entry[name]
    places, readers = parts["places"], parts["readers"]
    for name in ("fold", "behind_norm"):
        readers[name] = tuple(fitting(FoldTarget, target) for target in readers.get(name, ()))
    values["site"], values["shape"] = fitting(SkipSite, values["site"]), tuple(values["shape"])
    values["merge"] = fitting(PlannedMerge, parts["merge"])
    values["places"] = fitting(Places, {n: _attachment(v) if n != "obstacle" else v for n, v in places.items()})
    values["readers"] = fitting(Readers, readers)
    return fitting(LongSkip, values)


def _attachment(entry: dict[str, Any] | None) -> Attachment | None:
    if entry is None:
        return None
    values = {**entry, "path": tuple(entry["path"])}
    if values["source"] is not None:
        source = {**values["source"], "position": tuple(values["source"]["position"])}
        if isinstance(source["operand"], str):
            source["operand"] = Argument.parse(source["operand"])
        values["source"] = fitting(SourcePlace, source)
    return fitting(Attachment, values)
