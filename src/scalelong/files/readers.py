"""Reading: regular files of a sensible size, JSON and YAML of a sensible depth, values of the right types, digests."""

from __future__ import annotations

import builtins
import hashlib
import json
import math
import os
import stat
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from ..errors import (
    CannotReadError,
)
from ..optional import needs
from .access import StrPath, reading

if TYPE_CHECKING:
    pass

Made = TypeVar("Made")

MOST_TEXT = 64 * 1024**2
"""Bytes of the largest configuration, note or list of captions that is read."""


def require_regular(path: StrPath, most: int | None = None) -> int:
    """The size of a file. A folder, a pipe, a device or a file beyond `most` bytes is refused, without opening it.

    A pipe that nobody fills would block for ever, /dev/zero would fill the memory, and so would a sparse file.
    """
    with reading(path):
        found = os.stat(path)
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    if not stat.S_ISREG(found.st_mode):
        kind = kinds.get(stat.S_IFMT(found.st_mode), "device")
        raise CannotReadError(f"{path} is a {kind}, and a file is needed: give the path of a file")
    if most is not None and found.st_size > most:
        raise CannotReadError(
            f"{path} has {found.st_size} bytes, and at most {most} are read of such a file: is it the right one?"
        )
    return found.st_size


def read_bytes(path: StrPath, most: int | None = None) -> bytes:
    """A regular file of at most `most` bytes, or what the shell hands over as /dev/stdin or /dev/fd/N."""
    handed = str(path).startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/"))
    if not handed and require_regular(path, most) == 0:  # some files of /proc say 0, and block whoever reads them
        return b""
    with reading(path), open(path, "rb") as file:
        return file.read() if most is None else file.read(most)


def read_text(path: StrPath, most: int = MOST_TEXT) -> str:
    """A text file in UTF-8."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CannotReadError(
            f"{path} is not text in UTF-8: byte {error.start} cannot be read; save it anew"
        ) from error


def parse_json(text: str | bytes) -> Any:
    """json.loads, except that nesting which is too deep is a ValueError like any other fault."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def read_json(path: StrPath) -> Any:
    """What a JSON file holds; CannotReadError also if it is damaged."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise CannotReadError(f"{path} is not valid JSON ({error}): restore it from a copy, or make it anew") from error


def fitting(kind: type[Made], values: Any) -> Made:
    """A dataclass from what a JSON file held. ValueError, in words, if an entry is missing, unknown or of another type.

    Others edit such files. What does not fit is met here, and not as an error of Python in the middle of the work.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a JSON object is needed, and it is {str(values)[:60]!r}")
    hints, known = get_type_hints(kind), {field.name: field for field in fields(cast(Any, kind)) if field.init}
    for name in map(str, values):
        if name not in known:
            raise ValueError(f"it has an unknown entry {name[:60]!r}")
    for name, field in known.items():
        if name not in values:
            if field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"it has no entry {name!r}")
        elif not _fits(values[name], hints[name]):
            raise ValueError(f"its entry {name!r} cannot be {str(values[name])[:60]!r}")
    return kind(**values)


def misfit(function: Any, values: Mapping[str, Any]) -> str | None:
    """Of arguments from a file, the first whose type is not what a function asks for, in words; None if all fit.

    Libraries are not exact about types. This explains why something failed, and must not refuse what works.
    """
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return None
    for name, value in values.items():
        with suppress(TypeError):  # a hint that is not for looking at values
            if name in hints and not _fits(value, _any_length(hints[name])):
                return f"its entry {name!r} cannot be {str(value)[:60]!r}"
    return None


def _any_length(hint: Any) -> Any:
    """Others write tuple[int] for a tuple of any length."""
    inner = get_args(hint)
    if get_origin(hint) is tuple and Ellipsis not in inner:
        return tuple[inner[0], ...] if len(set(inner)) == 1 else hint
    if get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[tuple(_any_length(part) for part in inner)]  # noqa: UP007
    return hint


def _fits(value: Any, hint: Any) -> bool:
    inner = get_args(hint)
    match get_origin(hint) or hint:
        case typing.Any:
            return True
        case typing.Union | types.UnionType:
            return any(_fits(value, part) for part in inner)
        case typing.Literal:
            return value in inner
        case builtins.tuple | builtins.list as kind:
            if not isinstance(value, list | tuple):
                return False
            if kind is tuple and inner and inner[-1] is not Ellipsis:
                return len(value) == len(inner) and all(map(_fits, value, inner))
            return not inner or all(_fits(part, inner[0]) for part in value)
        case builtins.dict:
            return isinstance(value, dict) and all(_fits(part, (*inner, Any, Any)[1]) for part in value.values())
        case builtins.float:
            whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300
            return whole or isinstance(value, float)
        case builtins.int:
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        case types.NoneType | None:
            return value is None
        case kind:
            return isinstance(value, kind)


MOST_YAML = 10_000
"""Values of the largest configuration, aliases written out: ten short lines of them can stand for billions."""


def read_yaml(path: StrPath) -> Any:
    """What a YAML file holds: numbers, texts, lists and mappings. Dates stay texts: folders have such names."""
    yaml = needs("yaml", "train", "reading and writing configurations")
    text = read_text(path)

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        _require_shallow(yaml, Loader, text)
        loader = Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            if _written_out(yaml, root, {}) > MOST_YAML:
                raise CannotReadError(
                    f"{path} stands for more than {MOST_YAML} values, by aliases that repeat each other; a "
                    f"configuration is a few dozen lines: write them out"
                )
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split()).replace(
            "found unhashable key", "a list or a mapping stands where a name must"
        )
        raise CannotReadError(f"{path} is not valid YAML ({said}): correct it") from error


def read_fields(path: StrPath) -> dict[str, Any]:
    """A YAML file of named values, such as config.yaml."""
    values = read_yaml(path)
    if values is None:
        raise CannotReadError(f"{path} is empty: write fields such as 'steps: 1000' into it, or restore it from a copy")
    if not isinstance(values, dict):
        raise CannotReadError(f"{path} must hold fields such as 'steps: 1000', and it holds {str(values)[:60]!r}")
    return values


def _require_shallow(yaml: Any, loader: Any, text: str) -> None:
    """Before a loader written in C recurses until its stack ends, and the process with it."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 100:
            raise ValueError("it is nested too deeply")


def _written_out(yaml: Any, node: Any, known: dict[int, float]) -> float:
    """How many values a node stands for, aliases written out; infinite for one that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted: whoever comes back here has gone in a circle
        inner = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_written_out(yaml, part, known) for part in inner)
    return known[id(node)]


# Digests


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: StrPath) -> str:
    require_regular(path)
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
