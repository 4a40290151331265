"""One command of the campaign: in a fork of this process, or in a new one; with faults, limits, and its ending judged.

Everything is imported once, in one thread, by `warm_up`. A fork takes over modules and no threads; it gets a session, a
folder, files for its output, and limits of its own, so a command that does little costs 0.05 s. `fresh=True` starts a
new Python instead, which costs seconds and must come to the same verdict.

Faults come in two layers: functions of Python that are replaced (`PythonFaults`), and, where there is a C compiler,
libc's (faults.c), which meets torch's C++ and safetensors' Rust as well.
"""

import builtins
import ctypes
import errno
import gc
import io
import json
import math
import mmap
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ERRORS = ("ENOSPC", "EDQUOT", "EACCES", "EROFS", "EIO", "EMFILE")
PROCESSOR_SECONDS = 60
"""Of processor time, after which a command hangs. Time on the clock says little on a busy machine."""
IDLE_SECONDS = 40.0
"""Seconds without any processor time, after which a command hangs."""
AGENT_SECONDS = 10.0
"""After SIGTERM, torchrun waits 30 s before it kills."""
MOST_MEMORY = 3 * 1024**3
"""Bytes. The warmed process has 1 GB; a command that needs 2 GB more was deceived."""


# What is asked for, and what came of it


@dataclass(frozen=True)
class Fault:
    """The n-th operation on a file fails with an error, or the process gets a signal there."""

    nth: int
    code: str
    """ENOSPC, ..., KILL or TERM; GROUP is SIGTERM to torchrun, which passes it on."""
    layer: str = "python"
    """Or "libc"."""
    sticky: bool = False
    """All later operations fail as well, as on a disk that stays full."""


@dataclass(frozen=True)
class Command:
    words: list[str]
    """After `scalelong`; or @NAME and its arguments for a function of `library`."""
    world: str
    fault: Fault | None = None
    count: bool = False
    """Count operations, for the numbers of faults."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Changed variables; None removes one."""
    output: str = "file"
    """Or "closed" or "full", the state of the standard output."""
    limit: str = ""
    """"files" (few may be open), "size" (none may grow), "folder" (the current one is gone)."""


@dataclass(frozen=True)
class Outcome:
    code: int
    """The exit code; minus the signal if one ended it."""
    out: str
    err: str
    hung: str = ""
    memory: int = 0
    counts: tuple[int, ...] = ()

    def fault(self) -> str | None:
        """Why this is neither a success nor an error that is named and says what to do; None if it is one."""
        if self.hung:
            return f"hung: {self.hung}"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback (most recent call last)" in self.err + self.out:
            return "a traceback"
        if "a bug in scalelong" in self.err:
            return "an error that nobody foresaw"
        if self.memory > MOST_MEMORY:
            return f"took {self.memory / 1e9:.1f} GB"
        if self.code in (0, 141, 143):
            return None
        if self.code == 2:
            return None if self.err.strip() else "exit code 2 without a word"
        said = [line for line in self.err.splitlines() if line.startswith("scalelong")]
        if self.code != 1 or len(said) != 1:
            return f"exit code {self.code} with {len(said)} lines about it"
        found = re.match(r"scalelong(?: @?\w+)?: ([A-Z]\w+Error): (.*)", said[0])
        return "an error without a name" if found is None else unclear(found[1], found[2])

    def tail(self) -> str:
        return next((line for line in reversed(self.err.splitlines()) if line.strip()), "")[:600]


PYTHONS_OWN = re.compile(
    r"NoneType|object (has no|is not|does not)|object of type|unsupported operand|invalid literal|unexpected keyword"
    r"|\[Errno|out of range$|not subscriptable|unhashable|must be (str|real number), not|argument of type|"
    r"positional arg|codec can't|KeyError|TypeError|AttributeError|IndexError|OverflowError|RecursionError|"
    r"AssertionError|NotImplementedError|__\w+__|<class |<object|dataclass|too many values|not enough values|"
    r"has no len|int too large|could not convert|cannot be interpreted as|Expected .* but got|"
    r"expected \d+ .{0,20}argument|size of tensor|shape '\["
)
"""What Python, torch and others say to programmers. A name in front of it does not make it an answer."""

ADVICE = re.compile(
    r"--\w|(?<![\w-])-n\b"
    r"|\b(add|allow|ask|begin|build|change|check|choose|clear|close|combine|compare|convert|copy|correct|delete|download|edit|"
    r"export|find|free|give|install|keep|leave|let|list|load|look|lower|make|merge|mount|move|name|need|needs|note|open|pack|pass|push|put|raise|"
    r"read|remove|rename|repeat|replace|resize|restore|restart|roll|run|sample|save|say|score|see|set|shorten|start|stop|"
    r"take|train|try|turn|unpack|update|upgrade|use|wait|write)\b"
    r"|\b(must|should|has to|have to|known|expected|did you mean|one of|at least|at most|instead of|allowed)\b",
    re.IGNORECASE,
)
"""Words of a message that says what to do, or what would have been right."""


def unclear(name: str, message: str) -> str | None:
    """Why an error helps nobody; None if it does. A rule of thumb: it cannot tell whether the advice is right."""
    if name in ("ScaleLongError", "OSError", "ValueError", "RuntimeError", "DataError"):
        return f"{name} names nothing"
    own = PYTHONS_OWN.search(re.sub(r"'[^']{0,400}'|\"[^\"]{0,400}\"", "''", message))
    # What the code or the options of the user raise is for the user to read.
    if own and " raises " not in message and "--model-options" not in message:
        return f"Python's own message: {own[0]!r}"
    # Not in paths: run/data.json advises nothing.
    return None if ADVICE.search(re.sub(r"\S*/\S*", "", message)) else "it does not say what to do"


# Running one


def run(command: Command, fresh: bool = False) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        child, counters = start(command, Path(folder), fresh)
        status, hung, used = _wait(child)
        with suppress(ProcessLookupError, PermissionError):  # what it started and left behind
            os.killpg(child, signal.SIGKILL)
        return _outcome(Path(folder), status, hung, used.ru_maxrss * 1024, counters)


def run_together(commands: Sequence[Command], fresh: bool = False) -> list[Outcome]:
    """The processes of one training, as torchrun starts them: when one fails, the others get SIGTERM, then SIGKILL."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(len(commands))]
        for place in places:
            place.mkdir()
        children = [start(command, place, fresh) for command, place in zip(commands, places, strict=True)]
        waiting = {child: place for (child, _), place in zip(children, places, strict=True)}
        found: dict[Path, Outcome] = {}
        until, ended = time.monotonic() + 300.0, 0.0
        while waiting:
            for child in list(waiting):
                done, status, used = os.wait4(child, os.WNOHANG)
                if not done:
                    continue
                place = waiting.pop(child)
                found[place] = _outcome(place, status, "", used.ru_maxrss * 1024, None)
                if status and not ended:
                    ended = time.monotonic()
                    for other in waiting:
                        os.kill(other, signal.SIGTERM)
            if time.monotonic() > until or (ended and time.monotonic() > ended + AGENT_SECONDS):
                for child, place in waiting.items():
                    os.killpg(child, signal.SIGKILL)
                    _, status = os.waitpid(child, 0)
                    found[place] = _outcome(place, status, "" if ended else "it waits for the other", 0, None)
                waiting = {}
            time.sleep(0.02)
        for child, _ in children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        return [found[place] for place in places]


def run_under_torchrun(commands: Sequence[Command]) -> list[Outcome]:
    """The same by torchrun's own agent, which starts the processes, watches and ends them. They are forks of this one;
    the agent is what `torchrun` runs."""
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(number) for number in range(len(commands))]
        for place in places:
            place.mkdir()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        agent = os.fork()
        if agent == 0:
            _be_agent(commands, Path(folder))
        until, hung = time.monotonic() + 300.0, ""
        while not os.wait4(agent, os.WNOHANG)[0]:
            if time.monotonic() > until:
                hung = "torchrun does not end"
                os.killpg(agent, signal.SIGKILL)
                until = math.inf
            time.sleep(0.05)
        found = []
        for place in places:
            ended = place / "ended"
            with suppress(OSError, ValueError):  # a rank that is left behind
                os.killpg(int((place / "pid").read_text()), signal.SIGKILL)
                hung = hung or "torchrun has ended, and left a process behind"
            code = int(ended.read_text()) if ended.exists() else -signal.SIGKILL
            found.append(replace(_outcome(place, 0, hung, 0, None), code=code))
        return found


def _be_agent(commands: Sequence[Command], folder: Path) -> None:
    code = 1
    try:
        os.setsid()
        _streams("file", folder)
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        config = LaunchConfig(
            *(1, 1, len(commands)),
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            start_method="fork",
            max_restarts=0,
            monitor_interval=0.05,
        )
        elastic_launch(config, _be_rank)(list(commands), folder)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_rank(commands: Sequence[Command], folder: Path) -> None:
    """A process that the agent started. One that leaves no note of its exit code was killed."""
    rank = int(os.environ["RANK"])
    place = folder / str(rank)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    (place / "pid").write_text(str(os.getpid()))
    _become(commands[rank], place, None, place / "ended")


def start(command: Command, folder: Path, fresh: bool) -> tuple[int, "Counters | None"]:
    """Begin a command; its process id, and its counters if it counts."""
    counters = Counters() if command.count else None
    if fresh:
        if counters is not None:
            raise ValueError("operations are counted in forks")
        text = json.dumps({**asdict(command), "folder": str(folder)})
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, **_changes(command)}
        arguments = [sys.executable, "-m", "research.campaign.forks", text]
        process = subprocess.Popen(arguments, env={k: v for k, v in environment.items() if v is not None}, cwd=ROOT)
        process.returncode = 0  # it is waited for here
        return process.pid, None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child == 0:
        _become(command, folder, counters)
    return child, counters


def _outcome(folder: Path, status: int, hung: str, memory: int, counters: "Counters | None") -> Outcome:
    out, err = (path.read_text(errors="replace") if (path := folder / name).exists() else "" for name in ("out", "err"))
    counts = counters.read() if counters is not None else ()
    return Outcome(os.waitstatus_to_exitcode(status), out, err, hung, memory, counts)


def _wait(child: int) -> tuple[int, str, Any]:
    """Wait for a child. One that takes too much processor time, or none for a while, is killed."""
    descriptor = os.pidfd_open(child)
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        hung, known, since = "", 0.0, time.monotonic()
        while not poller.poll(2000):
            used, now = _processor_seconds(child), time.monotonic()
            if used > known + 0.01:
                known, since = used, now
            if used > PROCESSOR_SECONDS:
                hung = f"{used:.0f} s of processor time"
            elif now - since > IDLE_SECONDS:
                hung = f"nothing for {now - since:.0f} s"
            if hung:
                os.killpg(child, signal.SIGKILL)
                break
        _, status, used = os.wait4(child, 0)
        return status, hung, used
    finally:
        os.close(descriptor)


def _processor_seconds(group: int) -> float:
    """Of all processes of a session: a command that waits for its workers works."""
    ticks = 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError, IndexError):
            values = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(values[3]) == group:
                ticks += sum(map(int, values[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _changes(command: Command) -> dict[str, str | None]:
    return {"SCALELONG_CACHE": str(Path(command.world) / "cache"), **command.environment}


def _become(command: Command, folder: Path, counters: "Counters | None", note: Path | None = None) -> None:
    """The child: runs the command and ends, whatever happens. With `note`, a file for its exit code, it
    returns after a success: torchrun's agent waits for that."""
    code = 1
    try:
        with suppress(PermissionError):  # a new process leads its session already
            os.setsid()
        _streams(command.output, folder)
        os.chdir(command.world)
        for name, value in _changes(command).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = str(folder)
        sys.argv[:] = ["scalelong", *command.words]
        _limit(command.limit, folder)
        if command.fault is not None or counters is not None:
            arm(Path(command.world), command.fault, counters)
        code = _answer(command.words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if note is not None:
            descriptor = os.open(note, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, str(code).encode())
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(folder / "pid")
        if note is None or code:
            os._exit(code)


def _answer(words: list[str]) -> int:
    if words and words[0].startswith("@"):
        from .library import call

        return call(words[0][1:], words[1:])
    from scalelong.cli import main as scalelong

    return scalelong(list(words))


def _streams(output: str, folder: Path) -> None:
    out = "/dev/full" if output == "full" else folder / "out"
    for number, place, mode in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, folder / "err", os.O_WRONLY)):
        opened = os.open(place, mode | os.O_CREAT, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    if output == "closed":  # as Python finds it after `>&-`
        os.close(1)
        sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue]


def _limit(limit: str, folder: Path) -> None:
    match limit:
        case "files":
            few = len(os.listdir("/proc/self/fd")) + 4
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        case "size":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        case "folder":
            gone = folder / "gone"
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()


# Faults


class Counters:
    """Numbers that a child writes and its parent reads: one per set of classes of operations (see faults.c)."""

    NUMBER = 17
    """The last one is that of Python's operations."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * self.NUMBER)
        self.values = (ctypes.c_long * self.NUMBER).from_buffer(self.memory)

    def read(self) -> tuple[int, ...]:
        return tuple(self.values)


SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "GROUP": -signal.SIGTERM}
WRITES, OPENS, READS, REMOVES = 1, 2, 4, 8
CLASSES = {
    **dict.fromkeys(("ENOSPC", "EDQUOT"), WRITES),
    "EROFS": WRITES | REMOVES,
    "EACCES": WRITES | OPENS | REMOVES,
    "EIO": WRITES | OPENS | READS | REMOVES,
    "EMFILE": OPENS,
    **dict.fromkeys(SIGNALS, WRITES | OPENS | REMOVES),
}
"""Operations that can meet an error: a full disk can be read."""


def operations(counts: Sequence[int], code: str, layer: str) -> int:
    return counts[CLASSES[code] if layer == "libc" else Counters.NUMBER - 1]


@cache
def preloaded() -> Any:
    """faults.c in this process, or None."""
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.campaign_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, *[ctypes.c_int] * 4, ctypes.c_void_p]
        return library
    return None


def preload() -> None:
    """Begin this process anew with faults.c, if it can be built and is not there."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if preloaded() is not None or compiler is None or sys.platform != "linux":
        return
    library = Path(tempfile.mkdtemp(prefix="campaign-faults-")) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], capture_output=True)
    if done.returncode == 0:
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        os.execve(sys.executable, [sys.executable, "-m", "research.campaign", *sys.argv[1:]], environment)
    shutil.rmtree(library.parent)


_HELD: list[Counters] = []
"""faults.c writes into these for as long as the process lives."""


def arm(world: Path, fault: Fault | None, counters: Counters | None) -> None:
    counters = counters or Counters()
    _HELD.append(counters)
    wanted = fault or Fault(0, "EIO")
    by_signal = wanted.code in SIGNALS
    number = SIGNALS[wanted.code] if by_signal else getattr(errno, wanted.code)
    library = preloaded()
    if library is not None and (fault is None or fault.layer == "libc"):
        address = ctypes.addressof(counters.values)
        classes, root = CLASSES[wanted.code], os.fsencode(world)
        library.campaign_arm(root, wanted.nth, number, by_signal, wanted.sticky, classes, address)
    if fault is None or fault.layer == "python":
        PythonFaults(world, wanted.nth, number, by_signal, wanted.sticky, counters).install()


WATCHED = ("open", "mkdir", "rmdir", "unlink", "remove", "rename", "replace", "symlink", "scandir", "listdir")


class PythonFaults:
    """Counts the operations of Python on files below `root`, and lets the n-th fail or kill."""

    def __init__(self, root: Path, nth: int, number: int, by_signal: bool, sticky: bool, counters: Counters) -> None:
        self.root, self.nth, self.number = str(root), nth, number
        self.by_signal, self.sticky, self.counters = by_signal, sticky, counters
        self.count = 0
        self._io_open = io.open

    def install(self) -> None:
        for name in WATCHED:
            setattr(os, name, self._watched(getattr(os, name)))
        os.fsync = self._watched(os.fsync, always=True)
        builtins.open = io.open = self._opened  # pyright: ignore[reportAttributeAccessIssue]

    def step(self) -> None:
        self.count += 1
        self.counters.values[Counters.NUMBER - 1] = self.count
        if not self.nth or (self.count != self.nth and not (self.sticky and self.count > self.nth)):
            return
        if not self.by_signal:
            raise OSError(self.number, os.strerror(self.number))
        if self.count == self.nth:
            # Below 0: to whoever started this process.
            os.kill(os.getpid() if self.number > 0 else os.getppid(), abs(self.number))

    def _inside(self, path: Any) -> bool:
        try:
            return os.path.abspath(os.fsdecode(path)).startswith(self.root)
        except (TypeError, OSError):
            return False

    def _watched(self, function: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            if always or (arguments and self._inside(arguments[0])):
                self.step()
            return function(*arguments, **keywords)

        return watched

    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **keywords: Any) -> Any:
        if not self._inside(file):
            return self._io_open(file, mode, buffering, *rest, **keywords)
        self.step()
        if not set(mode) & set("wax+") or buffering != -1:
            return self._io_open(file, mode, buffering, *rest, **keywords)
        raw = _Watched(self, file, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **keywords)


class _Watched(io.FileIO):
    """A file whose writing is an operation too."""

    def __init__(self, faults: PythonFaults, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self.faults = faults

    def write(self, content: Any, /) -> int:
        self.faults.step()
        return super().write(content)


# What is imported once

IMPORTS = (
    "accelerate datasets matplotlib.pyplot PIL.Image pyarrow.parquet tyro typeguard yaml scipy.linalg scipy.stats "
)
IMPORTS += "diffusers.models.unets.unet_2d diffusers.schedulers.scheduling_ddpm peft filelock encodings.cp437 "
IMPORTS += "encodings.utf_8_sig torch.distributed.fsdp torch.utils.tensorboard numpy.ctypeslib"
COMMANDS = "train compare sample eval export report stats find diagnose kappa models range completion ema tune"
ROOMS = "training experiments.compare report export kappa stability.range runs.load evaluation.judge"


def warm_up() -> None:
    """Import what the commands use, in one thread."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTS.split():
        with suppress(ImportError):
            import_module(name)
    import scalelong.evaluation.features as features

    features.STEPS = 20  # a classifier for the tests of files need not know anything
    for name in ("cli", *(f"commands.{name}" for name in COMMANDS.split())):
        import_module(f"scalelong.{name}")
    for name in ROOMS.split():
        import_module(f"scalelong.{name}")
    from PIL import Image

    Image.init()
    # The first tensor without memory brings seconds of imports.
    torch.nn.Conv2d(1, 1, 1, device="meta")(torch.empty(1, 1, 2, 2, device="meta"))
    gc.collect()
    gc.freeze()  # or every fork would copy the memory that its collector looks at


def main() -> None:
    """A command in this new process: `python -m research.campaign.forks COMMAND`, as JSON."""
    values = json.loads(sys.argv[1])
    folder, fault = Path(values.pop("folder")), values.pop("fault")
    import scalelong.evaluation.features as features

    features.STEPS = 20
    _become(Command(**values, fault=None if fault is None else Fault(**fault)), folder, None)


if __name__ == "__main__":
    main()
