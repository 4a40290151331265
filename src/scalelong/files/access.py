"""Reading files, and named errors for what the system refuses: the path, the reason and what to do.

with writing(path):              # CannotWriteError instead of OSError
    figure.savefig(path)
values = read_json(path)         # CannotReadError if it is absent, damaged, too large or no regular file
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import CannotReadError, CannotWriteError, FileAccessError, ScaleLongError
from ..optional import needs

StrPath = str | os.PathLike[str]

_ADVICE = {
    errno.ENOSPC: "make space and run the same command again",
    errno.EACCES: "change its permissions",
    errno.EMFILE: "raise the limit (`ulimit -n 4096`)",
}

NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT}
"""The machine lacks something. The file itself is not damaged, so it must not be skipped or replaced."""

_VERBS: dict[type[FileAccessError], str] = {CannotReadError: "read", CannotWriteError: "written"}


def refusal(
    error: OSError, path: StrPath | None = None, kind: type[FileAccessError] = FileAccessError
) -> FileAccessError | None:
    """The named error for what the system refused; None for an error without a number of the system."""
    if error.errno is None:
        return None
    place = os.fsdecode(path or error.filename or "a file or the output")
    reason = os.strerror(error.errno)
    if error.filename and not os.path.abspath(place).endswith(os.fsdecode(error.filename)):
        reason += f" ({error.filename})"
    advice = _ADVICE.get(error.errno, "check the path")
    named = kind(f"{place} cannot be {_VERBS.get(kind, 'used')}: {reason}; {advice}, or choose a different place")
    named.errno = error.errno
    return named


def in_words(error: Exception) -> str:
    """The message of an error, in one line."""
    if isinstance(error, OSError) and error.errno:
        return str(error) if isinstance(error, ScaleLongError) else os.strerror(error.errno)
    if isinstance(error, KeyError):
        return f"it has no entry {str(error.args[0] if error.args else '')[:100]!r}"
    if isinstance(error, TypeError | AttributeError | IndexError):  # the words of Python are for programmers
        return "an entry does not have the type or size that it should"
    return " ".join(str(error).split())[:500] or type(error).__name__


@contextmanager
def _named(path: StrPath, kind: type[FileAccessError]) -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ScaleLongError):  # a closed pipe has an exit code of its own
        raise
    except OSError as error:
        raise refusal(error, path, kind) or error from error


def writing(path: StrPath) -> AbstractContextManager[None]:
    """OSErrors inside become CannotWriteError about `path`."""
    return _named(path, CannotWriteError)


def reading(path: StrPath) -> AbstractContextManager[None]:
    """OSErrors inside become CannotReadError about `path`."""
    return _named(path, CannotReadError)


def make_folder(path: StrPath) -> Path:
    """The folder, made with those above it if it is not there."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def require_file_place(path: StrPath, name: str = "out") -> None:
    """Refuse, before any work is done, a place where no file can be written."""
    if Path(path).is_dir():
        raise CannotWriteError(f"`{name}` {path} is a folder, and a file is needed: name a file in it")
    _require_writable(Path(path) if os.path.lexists(path) else Path(path).parent, path)


def require_folder_place(path: StrPath, name: str = "out") -> None:
    """Refuse, before any work is done, a place where no folder can be made or filled."""
    if os.path.lexists(path) and not Path(path).is_dir():
        raise CannotWriteError(f"`{name}` {path} is a file, and a folder is needed: choose another name")
    _require_writable(Path(path), path)


def _require_writable(place: Path, path: StrPath) -> None:
    """`place`, or the lowest folder above it that exists, can be written by this user."""
    with writing(path):
        while not os.path.lexists(place):
            place = place.parent
        if place != Path(path) and not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "", str(place))
        if place.is_dir():  # tried, because root may write everywhere and yet cannot, as below /proc
            try:
                tempfile.TemporaryDirectory(prefix=".scalelong", dir=place).cleanup()
            except OSError as error:  # without the name that was tried
                raise OSError(error.errno, "", str(place)) from error
        elif not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "", str(place))


# Reading

Made = TypeVar("Made")

MOST_TEXT = 64 * 1024**2
"""Bytes of the largest configuration, note or list of captions that is read."""


def require_regular(path: StrPath, most: int | None = None) -> int:
    """The size of a file. What is no regular file, or has more than `most` bytes, is refused without opening it.

    In a stranger's folder a pipe would block for ever, and a device or a sparse file would fill the memory.
    """
    with reading(path):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise CannotReadError(f"{path} is not a regular file: give the path of a file")
    if most is not None and found.st_size > most:
        raise CannotReadError(f"{path} has {found.st_size} bytes, and at most {most} are read: is it the right file?")
    return found.st_size


def read_bytes(path: StrPath, most: int | None = None) -> bytes:
    """A regular file of at most `most` bytes."""
    require_regular(path, most)
    with reading(path), open(path, "rb") as file:
        return file.read(-1 if most is None else most)


def read_text(path: StrPath, most: int = MOST_TEXT) -> str:
    """A text file in UTF-8."""
    return decoded(read_bytes(path, most), path)


def decoded(content: bytes, path: StrPath) -> str:
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
    """The named values of a YAML file such as config.yaml."""
    yaml = needs("yaml", "train", "reading and writing configurations")
    try:
        values = yaml.safe_load(read_text(path))
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
