"""Files and folders that are either whole or not there, JSON lines, digests, locks, and the cache.

A file is written under a temporary name beside its place, synced to the disk, and renamed. So a reader never sees half
of it, a full disk or a kill leaves the previous version, and two writers do not mix. What cannot be renamed over (a
device, a pipe: `--out /dev/stdout`) is written to as it is.

What the system refuses becomes CannotWriteError or CannotReadError here, with the reason in words and what to do:

    with writing(path):
        figure.savefig(path)
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import threading
import time
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from .errors import CannotReadError, CannotWriteError, FileAccessError, FolderInUseError, RunLockedError, ScaleLongError
from .optional import needs

if TYPE_CHECKING:
    import numpy as np

StrPath = str | os.PathLike[str]
Made = TypeVar("Made")


# What the system refuses, in words

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


def in_words(error: Exception) -> str:
    """What an error says about a file, for people. Python's own words are for those who wrote the program."""
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


# Whole files and folders


def write_text(path: StrPath, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all."""
    # Names of files need not be valid text. Escaped as \\udcff, they stay readable, in JSON too.
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: StrPath, content: bytes | memoryview) -> None:
    """Write a file, whole or not at all. Of a symbolic link, the file that it points to is replaced."""
    path = Path(path)
    with writing(path):
        if _is_stream(path):
            _write_stream(path, content)
        else:
            _replace(Path(os.path.realpath(path)) if path.is_symlink() else path, content)


_TIDIED: set[Path] = set()


def _replace(path: Path, content: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "", str(path))
    if path.parent not in _TIDIED:  # what a kill left here, once per process: a folder may hold many files
        _TIDIED.add(path.parent)
        remove_leftovers(path.parent)
    temporary = _beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # of two errors, the first is told
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


PIPE_SECONDS = 10.0
"""How long a named pipe may be without a reader."""


def _write_stream(path: Path, content: bytes | memoryview) -> None:
    """Write to what is there, a terminal, a pipe or a device such as /dev/null. A disk is not written over."""
    mode = path.stat().st_mode
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        kind = "a disk" if stat.S_ISBLK(mode) else "a socket"
        raise CannotWriteError(f"{path} is {kind}, and a file is needed: name a file")
    descriptor = _open_pipe(path) if stat.S_ISFIFO(mode) else os.open(path, os.O_WRONLY | os.O_NOCTTY)
    with open(descriptor, "wb") as stream:
        stream.write(content)


def _open_pipe(path: Path) -> int:
    """A pipe that nobody reads would block for ever, so it is asked again and again for a while."""
    deadline = time.monotonic() + PIPE_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


@contextmanager
def new_folder(target: StrPath) -> Iterator[Path]:
    """A temporary folder that becomes `target` at the end, or vanishes. FolderInUseError if `target` is in use.

    An empty folder may be there already; folders above it are made.
    """
    target = Path(target)
    temporary = _beside(target)
    with writing(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FolderInUseError(
                f"{target} exists already and is not an empty folder: choose another place, or move it away"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        temporary.mkdir()
    try:
        with writing(target):
            yield temporary
            for folder, _, names in os.walk(temporary):
                for name in names:
                    sync(Path(folder) / name)
                sync(Path(folder))
            # An empty folder is replaced. If somebody else was faster, it is not empty, and this is an error.
            if os.name == "nt" and target.exists():
                target.rmdir()
            try:
                os.rename(temporary, target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise FolderInUseError(
                        f"{target} exists already, and is not empty: choose another place, or move it away"
                    ) from error
                raise
            sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: StrPath) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk."""
    if os.name == "nt" and os.path.isdir(path):  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and keep its names by other means.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _beside(path: Path) -> Path:
    """A name in the same folder that no other process and no other thread uses. It says who makes it."""
    return path.with_name(f".{path.name[:100]}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")


def _machine() -> str:
    """Eight letters for this machine: on a shared file system another one may have a process of the same number."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


_PART = re.compile(r"\..*\.(?:([0-9a-f]{8})-)?(\d+)-[0-9a-f]{8}\.part")
ABANDONED_AFTER = 24 * 3600
"""Seconds after which a temporary file of another machine counts as left behind."""


def remove_leftovers(folder: StrPath) -> None:
    """Remove what killed processes left in a folder under temporary names; those of living ones stay."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(".part")]
    except OSError:
        return
    for entry in entries:
        match = _PART.fullmatch(entry.name)
        if match is None or not _left_behind(Path(entry.path), match[1], int(match[2])):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(entry.path)


def _left_behind(path: Path, machine: str | None, process: int) -> bool:
    if machine not in (None, _machine()):
        try:
            return time.time() - path.stat().st_mtime > ABANDONED_AFTER
        except OSError:
            return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # somebody else's process
        return False
    return False


def _is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe, or a descriptor of this process: a rename would put a file in its place."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or path.is_relative_to("/dev") or path.is_relative_to("/proc")


# Reading: regular files of a sensible size

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
        said = " ".join(str(error).split())
        raise CannotReadError(f"{path} is not valid YAML ({said}): correct it") from error


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


# JSON lines: one object per line

BLOCK = 1 << 16


def append_json_line(path: StrPath, value: Mapping[str, Any]) -> None:
    """Add a line, whole or not at all, also while other processes do the same.

    A file whose last line has no end (a kill, an editor) gets one first: two lines must not become one.
    """
    line = (json.dumps(value, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
    with writing(path), exclusive(Path(path).parent), open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            written = file.write(line)
            if written < len(line):  # the disk is full: the rest would say so
                file.write(line[written:])
        except OSError:
            file.truncate(size)
            raise


def write_json_lines(path: StrPath, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of JSON lines as a whole."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json_lines(path: StrPath) -> list[dict[str, Any]]:
    """The objects of a file. A line that a kill cut off, or that is no object, is left out."""
    found = []
    # At line ends alone: `splitlines` would also cut at those that may stand inside of a text.
    for line in read_bytes(path).split(b"\n"):
        with suppress(ValueError):
            value = parse_json(line)
            found += [value] if isinstance(value, dict) else []
    return found


def lines_from_the_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(where it ends, line) of a file, the last line first. Reads no more than the lines that are asked for."""
    position, rest = file.seek(0, os.SEEK_END), b""
    end = position
    while position > 0:
        start = max(0, position - BLOCK)
        file.seek(start)
        rest = file.read(position - start) + rest
        position = start
        lines = rest.splitlines(keepends=True)
        # The first piece may be the end of a longer line, unless the file begins with it.
        for line in reversed(lines[1:] if position > 0 else lines):
            yield end, line
            end -= len(line)
        rest = lines[0] if position > 0 else b""


# Digests


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: StrPath) -> str:
    require_regular(path)
    with reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Locks: one process at a time. filelock takes the kernel's locks, on Windows as well: they end with their holder, so
# none goes stale, and a forked data worker that outlives its parent does not keep one.

_TURN = threading.RLock()


@contextmanager
def exclusive(folder: StrPath) -> Iterator[None]:
    """Changes of a folder's files that take moments, one process after the other. No lock file is left behind.

    The kernel locks the folder itself. Where it cannot (Windows, some network file systems) only the threads of this
    process take turns.
    """
    with _TURN, ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """The lock of a folder. A second process waits (for a cache: it then finds what the first one computed), or is
    refused with RunLockedError (for a run folder)."""
    from filelock import FileLock, Timeout

    make_folder(folder)
    lock = FileLock(folder.resolve() / ".lock", timeout=-1 if wait else GRACE)
    holder = folder / ".lock-holder"  # beside the lock: on Windows nobody else can read a locked file
    try:
        with writing(folder):
            lock.acquire()
    except Timeout as error:
        try:
            name = read_text(holder, 1000)
        except CannotReadError:
            name = "another process"
        name = "this process" if name == _this_process() else name
        raise RunLockedError(
            f"{folder} is in use by {name}; wait for it, stop it, or choose another folder with --out"
        ) from error
    try:
        if not wait:
            with writing(holder):
                holder.write_text(_this_process(), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        lock.release()


GRACE = 1.0
"""Seconds. A worker that was forked a moment ago gives the lock of its dead parent back when it first runs."""


def forget_lock(folder: Path) -> None:
    """Remove the files of a lock, by its holder: the folder turned out not to be ours."""
    for name in (".lock", ".lock-holder"):
        with suppress(OSError):
            (folder / name).unlink()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


# The cache: results of pure functions on disk. The key is a hash of the inputs, and a checksum tells what is damaged.
#
# What is there and whole is read without a lock, so that a filled cache which this user may only read is used. Where
# nothing can be written, results are computed and not kept.

VARIABLE = "SCALELONG_CACHE"
MANIFEST = "manifest.json"


def cache_folder(kind: str) -> Path:
    """SCALELONG_CACHE, or `scalelong` in the user's folder for caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return at_home(given, VARIABLE) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or at_home("~/.cache", "HOME")) / "scalelong" / kind


def at_home(text: StrPath, origin: str) -> Path:
    """A path with ~ written out. `origin` is the variable or flag that says it."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CannotReadError(f"{origin} names the home folder of nobody ({text}): give a full path") from error


def key_of(about: dict[str, Any]) -> str:
    """A short hash of plain values."""
    return digest(json.dumps(about, sort_keys=True).encode())[:16]


def cached_bytes(
    kind: str, about: dict[str, Any], name: str, compute: Callable[[], bytes], say: Callable[[str], None] = print
) -> tuple[bytes, Path]:
    """The content of a file of the cache, and its place. Computed if it is missing or damaged."""
    folder = cache_folder(kind) / key_of(about)
    content, _ = _read_whole(folder, name)
    if content is not None:
        return content, folder / name
    with to_be_filled(folder, kind, say) as writable:
        content, fault = _read_whole(folder, name)  # another process may have computed it while this one waited
        if content is None:
            if fault:
                say(f"{kind}: {fault}; computing it again")
            content = compute()
            if writable:
                with not_kept(folder, kind, say):
                    (folder / MANIFEST).unlink(missing_ok=True)
                    write_bytes(folder / name, content)
                    _write_manifest(folder, {"about": about, "sha256": digest(content)})
    return content, folder / name


def _read_whole(folder: Path, name: str) -> tuple[bytes | None, str]:
    """The content if it is what was written, and why not if something else is there."""
    try:
        if not ((folder / name).exists() and (folder / MANIFEST).exists()):
            return None, ""
        content = read_bytes(folder / name)
        expected = parse_json(read_bytes(folder / MANIFEST, MOST_TEXT))["sha256"]
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, f"damaged ({error})"
    return (content, "") if digest(content) == expected else (None, "damaged (checksum mismatch)")


def cached_array(
    kind: str,
    about: dict[str, Any],
    shape: tuple[int, ...],
    dtype: str,
    compute: Callable[[], Iterable[np.ndarray]],
    say: Callable[[str], None] = print,
) -> np.ndarray:
    """A read-only array that stays on disk, computed in chunks of rows if it is missing or damaged."""
    import numpy as np

    folder = cache_folder(kind) / key_of(about)
    if _fault(folder) is not None:
        with to_be_filled(folder, kind, say) as writable:
            fault = _fault(folder)
            if fault is not None and not writable:
                return np.concatenate(list(compute())).astype(dtype)
            if fault is not None:
                say(f"{kind}: {fault}; computing {shape[0]} rows into {folder}")
                with writing(folder):
                    _write_array(folder, about, shape, dtype, compute())
    with reading(folder):
        return np.load(folder / "array.npy", mmap_mode="r", allow_pickle=False)


@contextmanager
def to_be_filled(folder: Path, kind: str, say: Callable[[str], None]) -> Iterator[bool]:
    """Under the lock of a folder of the cache; False where it cannot be written to."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except OSError as error:
            say(_unkept(kind, folder, error))
            yield False
            return
        remove_leftovers(folder)
        yield True


def _unkept(kind: str, folder: Path, error: OSError) -> str:
    return f"{kind}: {folder} cannot be written ({error.strerror or error}), so the result is not kept; see {VARIABLE}"


@contextmanager
def not_kept(folder: Path, kind: str, say: Callable[[str], None]) -> Iterator[None]:
    """A result that cannot be written down is still a result."""
    try:
        yield
    except OSError as error:
        say(
            f"{kind}: {folder} cannot be written ({error.strerror or error}), so the result is not kept; see {VARIABLE}"
        )


def _fault(folder: Path) -> str | None:
    """Why the array of this folder cannot be used."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return "not computed yet"
    try:
        good = json.loads(manifest.read_text())["sha256"] == file_digest(folder / "array.npy")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"damaged ({error})"
    return None if good else "damaged (checksum mismatch)"


def _write_array(
    folder: Path, about: dict[str, Any], shape: tuple[int, ...], dtype: str, chunks: Iterable[np.ndarray]
) -> None:
    import numpy as np

    # Without its manifest an array counts as not computed, so a kill from here on is harmless.
    (folder / MANIFEST).unlink(missing_ok=True)
    temporary = _beside(folder / "array.npy")
    with ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)
        array: Any = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        row = 0
        for chunk in chunks:
            array[row : row + len(chunk)] = chunk
            row += len(chunk)
        assert row == shape[0], f"{row} rows instead of {shape[0]}"
        array.flush()
        del array
        sync(temporary)
        os.replace(temporary, folder / "array.npy")
    about = {"about": about, "shape": list(shape), "dtype": dtype, "sha256": file_digest(folder / "array.npy")}
    _write_manifest(folder, about)


def _write_manifest(folder: Path, about: dict[str, Any]) -> None:
    write_text(folder / MANIFEST, json.dumps(about, indent=2))
