"""What the system refuses, as named errors: CannotWriteError and CannotReadError with the path, the reason and advice.

with writing(path):
    figure.savefig(path)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ..errors import CannotReadError, CannotWriteError, FileAccessError, ScaleLongError

StrPath = str | os.PathLike[str]

_ADVICE = {
    errno.ENOSPC: "make room and run the same command again",
    errno.EACCES: "change its permissions",
    errno.EMFILE: "raise the limit (`ulimit -n 4096`)",
}

NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT}
"""What the machine lacks. The file itself is not damaged, so that it must not be skipped or replaced."""

_VERBS: dict[type[FileAccessError], str] = {CannotReadError: "read", CannotWriteError: "written"}


def refusal(
    error: OSError, path: StrPath | None = None, kind: type[FileAccessError] = FileAccessError
) -> FileAccessError | None:
    """The named error for what the system refused; None for an error without a number of the system."""
    if error.errno is None:
        return None
    place = path if path is not None else error.filename
    subject = "a file or the output" if place is None else os.fsdecode(place)
    other = error.filename and os.fsdecode(error.filename) not in (subject, os.path.abspath(subject))
    reason = f"{os.strerror(error.errno)} ({error.filename})" if other else os.strerror(error.errno)
    advice = _ADVICE.get(error.errno, "check the path")
    named = kind(f"{subject} cannot be {_VERBS.get(kind, 'used')}: {reason}; {advice}, or choose another place")
    named.errno = error.errno
    return named


def in_words(error: Exception) -> str:
    """What an error says, in one line."""
    if isinstance(error, OSError) and error.errno:
        return str(error) if isinstance(error, ScaleLongError) else os.strerror(error.errno)
    if isinstance(error, KeyError):
        return f"it has no entry {str(error.args[0] if error.args else '')[:100]!r}"
    if isinstance(error, TypeError | AttributeError | IndexError):  # the words of Python are for programmers
        return "an entry has another type or size than it should"
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
    """What the system refuses inside becomes CannotWriteError about `path`."""
    return _named(path, CannotWriteError)


def reading(path: StrPath) -> AbstractContextManager[None]:
    """What the system refuses inside becomes CannotReadError about `path`."""
    return _named(path, CannotReadError)


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
        if not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "", str(place))
