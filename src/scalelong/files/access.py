"""What the system refuses, in words: CannotWriteError and CannotReadError with the reason and what to do.

with writing(path):
    figure.savefig(path)
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import (
    CannotReadError,
    CannotWriteError,
    FileAccessError,
    ScaleLongError,
)

if TYPE_CHECKING:
    pass

StrPath = str | os.PathLike[str]

_FREE_THE_NAME = "move that away, or choose another place"
_REASONS = {
    errno.ENOENT: ("it does not exist, or a folder above it does not", "check the path"),
    errno.ENOTDIR: ("a part of its path is a file, not a folder", _FREE_THE_NAME),
    errno.EISDIR: ("it is a folder, and a file is needed", "name a file in it"),
    errno.EEXIST: ("something else has this name", _FREE_THE_NAME),
    errno.ENOTEMPTY: ("the folder is not empty", _FREE_THE_NAME),
    errno.EACCES: ("this user has no permission", "change its permissions (chmod, chown), or choose another place"),
    errno.EPERM: ("the system does not permit it", "change its permissions (chmod, chown), or choose another place"),
    errno.EROFS: ("its file system is read-only", "choose a place that can be written, or mount it for writing"),
    errno.ENOSPC: ("no space is left on its disk", "make room and run the same command again, or choose another disk"),
    errno.EDQUOT: ("your quota on its disk is used up", "make room and run the same command again"),
    errno.EFBIG: ("it is larger than the file system or the limit of the shell allows", "see `ulimit -f`"),
    errno.EIO: ("the disk reports an input/output error", "check the disk or the network drive, then run it again"),
    errno.EMFILE: ("too many files are open in this process", "raise the limit (`ulimit -n 4096`) and run it again"),
    errno.ENFILE: ("too many files are open on this machine", "close other programs and run it again"),
    errno.ENOMEM: ("the machine is out of memory", "close other programs and run it again"),
    errno.ENAMETOOLONG: ("its name is too long for the file system", "choose a shorter one"),
    errno.ELOOP: ("it is a circle of symbolic links", "remove the links"),
    errno.EBUSY: ("something else is using it", "close that, or choose another place"),
    errno.ETXTBSY: ("something else is using it", "close that, or choose another place"),
    errno.ENXIO: ("it is a pipe or a device that nobody serves", "name a file"),
    errno.ENODEV: ("it is a device that is not there", "name a file"),
    errno.ESTALE: ("the network drive has lost it", "mount the drive again"),
    errno.ETIMEDOUT: ("the network drive does not answer", "check the network, then run it again"),
    errno.ENOTSUP: ("its file system cannot do this", "choose a place on another file system"),
    errno.ENOSYS: ("its file system cannot do this", "choose a place on another file system"),
    errno.EINVAL: ("the system calls the operation invalid here", "choose a place on another file system"),
    errno.EXDEV: ("its parts are on different file systems", "choose a place on one file system"),
}


NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT}
"""What the machine lacks is no damage of a file: to go on without it would be silent and wrong."""

_VERBS: dict[type[FileAccessError], str] = {CannotReadError: "read", CannotWriteError: "written"}


def refusal(
    error: OSError, path: StrPath | None = None, kind: type[FileAccessError] = FileAccessError
) -> FileAccessError | None:
    """The named error for what the system refused; None for an error that the system has no number for."""
    if error.errno not in _REASONS:
        return None
    place, verb = path if path is not None else error.filename, _VERBS.get(kind, "used")
    subject = "a file or the output" if place is None else place if isinstance(place, str) else os.fsdecode(place)
    # Of folders above the place, the one that is in the way says more than the place itself.
    culprit = _in_the_way(Path(subject)) if error.errno in (errno.ENOTDIR, errno.EEXIST) else None
    reason, advice = _REASONS[errno.ENOTDIR if culprit else error.errno]
    named = kind(f"{subject} cannot be {verb}: {reason}{f' ({culprit})' if culprit else ''}; {advice}")
    named.errno = error.errno
    return named


_OF_C = re.compile(r"(?:\bfile <(?P<path>[^>]*)>.*\(|\(os error )(?P<number>\d+)\)\s*$", re.DOTALL)


def of_the_system(error: Exception) -> OSError | None:
    """The system's refusal in an error of torch's C++ or safetensors' Rust, which put its number into their text."""
    if isinstance(error, OSError):
        return error
    known = type(error).__name__ in ("RuntimeError", "SafetensorError", "AcceleratorError")
    found = _OF_C.search(str(error)) if known else None
    number = int(found["number"]) if found else 0
    return OSError(number, os.strerror(number), found["path"]) if found and number in _REASONS else None


def in_words(error: Exception) -> str:
    """What an error says about a file, for people. Python's own words are for those who wrote the program."""
    error = of_the_system(error) or error
    match error:
        case OSError() if error.errno in _REASONS:
            return _REASONS[error.errno][0]
        case KeyError():
            return f"it has no entry {str(error.args[0] if error.args else '')[:100]!r}"
        case UnicodeDecodeError():
            return f"byte {error.start} is not text in UTF-8"
        case RecursionError():
            return "it is nested too deeply"
        case TypeError() | AttributeError() | IndexError() | OverflowError() | AssertionError():
            return "an entry has another type or size than it should"
        case _:
            return " ".join(str(error).split())[:500] or type(error).__name__


def _in_the_way(path: Path) -> Path | None:
    for above in path.parents:
        if os.path.lexists(above):
            return None if above.is_dir() else above
    return None


@contextmanager
def writing(path: StrPath) -> Iterator[None]:
    """Whatever the system refuses inside becomes CannotWriteError about `path`."""
    with _named(path, CannotWriteError):
        yield


@contextmanager
def reading(path: StrPath) -> Iterator[None]:
    """Whatever the system refuses inside becomes CannotReadError about `path`."""
    with _named(path, CannotReadError):
        yield


@contextmanager
def _named(path: StrPath, kind: type[FileAccessError]) -> Iterator[None]:
    try:
        yield
    except (BrokenPipeError, ScaleLongError):  # a closed pipe has an exit code of its own
        raise
    except OSError as error:
        named = refusal(error, path, kind)
        if named is None:
            raise
        raise named from error


def make_folder(path: StrPath) -> Path:
    """The folder, made with those above it if it is not there."""
    with writing(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def require_file_place(path: StrPath, flag: str = "--out") -> None:
    """Refuse, before any work is done, a place where no file can be written."""
    path = Path(path)
    with writing(path):
        if path.is_dir():
            raise CannotWriteError(f"{flag} {path} is a folder, and a file is needed: name a file in it")
        _require_writable(path if os.path.lexists(path) else path.parent, path)


def require_folder_place(path: StrPath, flag: str = "--out") -> None:
    """Refuse, before any work is done, a place where no folder can be made or filled."""
    path = Path(path)
    with writing(path):
        if os.path.lexists(path) and not path.is_dir():
            raise CannotWriteError(f"{flag} {path} is a file, and a folder is needed: choose another name")
        _require_writable(path, path)


def _require_writable(place: Path, path: Path) -> None:
    """`place`, or the lowest folder above it that exists, can be written by this user."""
    while not os.path.lexists(place):
        place = place.parent
    if place != path and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "", str(path))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, "", str(path))
