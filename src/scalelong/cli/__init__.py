"""The command line: `scalelong COMMAND ...`.

`commands` lists the commands, `parser` is the parser of all of them, and each command is a module of this package.
`scalelong --help` and `scalelong COMMAND --help` do not import torch.

Exit codes: 0, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C, 143 after SIGTERM, 141 after a closed pipe.
An error is one line with its name. Library errors name parameters (`warmup`); they are printed as flags (--warmup).
An error without a name is a bug, and shows its traceback; with --debug, or SCALELONG_DEBUG=1 in the environment, every
error does. Of several processes, the first one prints.
"""

import gc
import io
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from types import FrameType
from typing import Any

from .._version import __version__
from ..console import show_logs
from ..errors import (
    CannotWriteError,
    FileAccessError,
    InvalidConfigError,
    NotEnoughMemoryError,
    RunFailedError,
    ScaleLongError,
    lacks_memory,
)
from ..files import refusal, require_file_place, require_folder_place, writing
from .commands import (
    ALL as ALL,
    COMMANDS as COMMANDS,
    GROUPS,
    LAB as LAB,
    completion_script,
    find_command as find_command,
)

INTERRUPTED, TERMINATED, CLOSED_PIPE = 128 + 2, 128 + 15, 128 + 13
FILES = (".safetensors", ".html", ".json")
"""What `--out` ends with where it names a file."""

PURPOSE = "Keeps UNets, U-ViTs and other networks with long skip connections training; shows why, and proves it"

EXAMPLES = """\
  scalelong demo                                     see the problem and the cure, in a few minutes
  scalelong train photos/                            train on a folder of images, sized for this machine
  scalelong sample --model digits-class 7            draw with a network that comes along
  scalelong range photos/                            the learning rates that your network survives
  scalelong find diffusers:UNet2DModel               the long skips of any model"""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: scalelong COMMAND [OPTIONS]", "", f"{PURPOSE}.", "", "examples", EXAMPLES]
    for title, commands in GROUPS.items():
        lines += ["", title, *(f"  {name:<{width}}  {purpose}" for name, purpose in commands.items())]
    more = "scalelong COMMAND --help shows its flags; --version prints the version; --print-completion bash (zsh, tcsh)"
    return "\n".join([*lines, "", more, "prints a script for your shell. With --debug an error shows its traceback."])


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or os.environ.get("SCALELONG_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    words = 2 if arguments[:1] == ["lab"] else 1
    command, arguments = " ".join(arguments[:words]), arguments[words:]
    name = f"scalelong {command if command in ALL else ''}".rstrip()
    flags: dict[str, str] = {}
    before = _handle_sigterm()
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show (κ in ASCII, names of files that are no text) is written as an escape.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(command, arguments, flags) if command in ALL else _answer(command, arguments)
        with writing("the standard output"):
            print(end="", flush=True)
        _leave_process_group(wait=True)
        return code
    except KeyboardInterrupt:
        _complain(f"{name}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone (`| head`)
        _silence_output()
        return CLOSED_PIPE
    except Exception as error:
        named = _named(error)
        if debug or named is None:
            traceback.print_exc()
        if named is None:
            alone = os.environ.get("WORLD_SIZE", "1") == "1"
            what = "a bug in scalelong, please report it with" if alone else "the messages of all processes explain"
            _complain(f"{name}: {what} the lines above")
        elif _speaks(named):
            # One line, so that logs and scripts can tell where it ends.
            _complain(f"{name}: {type(named).__name__}: {_as_flags(_line(named), flags)}")
        if isinstance(error, OSError):  # it may have been the output itself
            _silence_output()
        return 1
    finally:
        _leave_process_group(wait=False)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _answer(command: str, rest: list[str]) -> int:
    """What is printed where no command is named: help, the version, a completion, or the nearest command."""
    if command in ("", "-h", "--help"):
        print(usage())
    elif command == "--version":
        print(f"scalelong {__version__}")
    elif command.partition("=")[0] == "--print-completion":
        print(completion_script(*command.split("=")[1:], *rest))
    elif command in ("lab", "lab -h", "lab --help"):
        print("usage: scalelong lab COMMAND [OPTIONS]\n")
        print("\n".join(f"  {name:<9}  {purpose}" for name, purpose in LAB.items()))
    else:
        near = [name for name in ALL if name.endswith(f" {command}")] or get_close_matches(command, ALL, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        _complain(f"scalelong: unknown command {command!r}{meant}; scalelong --help lists all")
        return 2
    return 0


def _run(command: str, arguments: list[str], flags: dict[str, str]) -> int:
    made = find_command(command)
    parser = made.parser()
    flags.update(parser.flags())
    options = parser.parse_args(arguments)
    options.arguments = arguments
    if getattr(options, "out", None) is not None:  # before any work
        is_file = getattr(options, "out_is_file", False) or options.out.suffix in FILES
        (require_file_place if is_file else require_folder_place)(options.out)
    with show_logs(quiet=getattr(options, "quiet", False)):
        code = made.run(options)
    # Training may have been interrupted by another signal than Ctrl-C.
    training = sys.modules.get("scalelong.training.hardware")
    latest = training.Interrupt.latest if training is not None else None
    return 128 + signal.Signals[latest] if code == INTERRUPTED and latest is not None else code or 0


# Errors


def _named(error: Exception) -> ScaleLongError | None:
    """The error as a named one, also for what the system or torch refuses. None for a bug."""
    if isinstance(error, ScaleLongError):
        return error
    if isinstance(error, OSError):
        return refusal(error)
    if lacks_memory(error):
        return NotEnoughMemoryError(
            "the memory of the machine does not suffice for this: take smaller images (--size), smaller batches "
            "(--batch-size) or a smaller network"
        )
    return None


def _speaks(error: ScaleLongError) -> bool:
    """Of several processes the first one prints what is alike in all. What the machine refused one, that one prints."""
    own = isinstance(error, (NotEnoughMemoryError, CannotWriteError)) or type(error) is FileAccessError
    return os.environ.get("RANK", "0") == "0" or own


def _as_flags(text: str, flags: dict[str, str]) -> str:
    """`warmup` in the message becomes --warmup, if that is a flag of the command."""
    return re.sub(r"`(\w+)`", lambda found: flags.get(found[1]) or found[0], text)


def _line(error: Exception) -> str:
    """The message in one line. It may hold what the user gave, which has no limit."""
    text = " ".join(str(error).split())
    return text if len(text) <= 4000 else f"{text[:3000]} ... {text[-900:]}"


# Output


def _complain(text: str) -> None:
    """Print on the standard error, unless it is closed."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _silence_output() -> None:
    """At exit Python would flush once more, into a pipe that is closed or a disk that is full."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Signals and processes


def _handle_sigterm() -> Any:
    """SIGTERM ends a command in order: open files are closed, half-written ones removed. The handler before, or None.

    Training has its own handler while it runs, which saves first.
    """

    owner = os.getpid()

    def end(_: int, __: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which has nothing to close
            os._exit(TERMINATED)
        raise SystemExit(TERMINATED)

    try:
        return signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        return None


def _leave_process_group(wait: bool) -> None:
    """Leave the group of processes that a command has joined: one that is still open at exit aborts the process.

    After success the processes wait for each other. After an error the others may never come.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if wait:
            distributed.barrier()
        gc.collect()  # sharded networks hold groups of their own, and sit in cycles
        distributed.destroy_process_group()
