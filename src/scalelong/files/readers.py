"""Reading: texts, JSON and YAML, values of the right types, digests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import CannotReadError
from ..optional import needs
from .access import StrPath, reading, require_regular

Made = TypeVar("Made")

MOST_TEXT = 64 * 1024**2
"""Bytes of the largest configuration, note or list of captions that is read."""


def read_bytes(path: StrPath, most: int | None = None) -> bytes:
    """A regular file of at most `most` bytes, or what the shell gives as /dev/stdin or /dev/fd/N."""
    if not str(path).startswith(("/dev/stdin", "/dev/fd/", "/proc/self/fd/")):
        require_regular(path, most)
    with reading(path), open(path, "rb") as file:
        return file.read() if most is None else file.read(most)


def read_text(path: StrPath, most: int = MOST_TEXT) -> str:
    """A text file in UTF-8."""
    content = read_bytes(path, most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CannotReadError(
            f"{path} is not text in UTF-8: byte {error.start} cannot be read; save it again"
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
        raise CannotReadError(
            f"{path} is not valid JSON ({error}): restore it from a copy, or make it again"
        ) from error


def fitting(kind: type[Made], values: Any) -> Made:
    """A dataclass from what a JSON file held. ValueError if an entry is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise ValueError(f"a JSON object is needed, and it is {str(values)[:60]!r}")
    known = {field.name: field for field in fields(kind) if field.init}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"a {kind.__name__} has no entry {unknown[0]!r}")
    needed = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"the entry {missing[0]!r} of a {kind.__name__} is missing")
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            raise ValueError(f"its entry {name!r} cannot be {str(values[name])[:60]!r}")
    return made


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(_fits(part, inner[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(part, inner[1]) for part in value.values())
    if isinstance(value, bool):
        return origin is bool
    return isinstance(value, int | float if origin is float else origin)


def read_fields(path: StrPath) -> dict[str, Any]:
    """The named values of a YAML file such as config.yaml. Dates stay texts: folders have such names."""
    yaml = needs("yaml", "train", "reading and writing configurations")
    text = read_text(path)

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    try:
        values = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CannotReadError(f"{path} is not valid YAML ({' '.join(str(error).split())}): correct it") from error
    if not isinstance(values, dict):
        raise CannotReadError(f"{path} must hold fields such as 'steps: 1000', and it holds {str(values)[:60]!r}")
    return values


# Digests


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: StrPath) -> str:
    require_regular(path)
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
