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
from collections.abc import Mapping
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
    CLONE,
    COMMANDS as COMMANDS,
    GROUPS,
    LAB as LAB,
    completion_script,
    find_command as find_command,
)

DEBUG = "SCALELONG_DEBUG"

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
    debug = "--debug" in arguments or os.environ.get(DEBUG, "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    command = _command(arguments)
    flags: dict[str, str] = {}
    before = _handle_sigterm()
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show (κ in ASCII, names of files that are no text) is written as an escape.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _answer(command, arguments, flags)
        with writing("the standard output"):
            print(end="", flush=True)
        _leave_process_group(wait=True)
        return code
    except KeyboardInterrupt:
        _complain(f"{_name(command)}: interrupted")
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
            _complain(f"{_name(command)}: {what} the lines above")
        elif _speaks(named):
            # One line, so that logs and scripts can tell where it ends.
            _complain(f"{_name(command)}: {type(named).__name__}: {_as_flags(_line(named), flags)}")
        if isinstance(error, OSError):  # it may have been the output itself
            _silence_output()
        return 1
    finally:
        _leave_process_group(wait=False)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _command(arguments: list[str]) -> str:
    """The command that the arguments name: "train", "lab theory", or "" for none."""
    first, second = [*arguments, "", ""][:2]
    return f"lab {second}" if first == "lab" and second in LAB else first if first in COMMANDS else ""


def _name(command: str) -> str:
    return f"scalelong {command}".rstrip()


def _answer(command: str, arguments: list[str], flags: dict[str, str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        print(usage())
    elif first == "--version":
        print(f"scalelong {__version__}")
    elif first.partition("=")[0] == "--print-completion":
        print(completion_script(*first.split("=")[1:], *arguments[1:]))
    elif command == "lab" and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        print("usage: scalelong lab COMMAND [OPTIONS]\n")
        print("\n".join(f"  {name:<9}  {purpose}" for name, purpose in LAB.items()))
    elif command == "lab":
        return _not_a_command(arguments[1], LAB, "scalelong lab")
    elif not command:
        return _not_a_command(first, COMMANDS, "scalelong")
    else:
        return _run(command, arguments[len(command.split()) :], flags)
    return 0


def _not_a_command(word: str, known: Mapping[str, str], prefix: str) -> int:
    near = [f"lab {word}"] if word in LAB else get_close_matches(word, known, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    _complain(f"{prefix}: unknown command {word!r}{meant}; scalelong --help lists all")
    return 2


def _run(command: str, arguments: list[str], flags: dict[str, str]) -> int:
    made = find_command(command)
    if command.removeprefix("lab ") in CLONE:
        code = made.run(arguments)
    else:
        parser = made.parser()
        flags.update(parser.flags())
        options = parser.parse_args(arguments)
        options.arguments = arguments
        if getattr(options, "out", None) is not None:  # before any work
            is_file = getattr(options, "out_is_file", False) or options.out.suffix in FILES
            (require_file_place if is_file else require_folder_place)(options.out)
        with show_logs(quiet=getattr(options, "quiet", False)):
            code = made.run(options)
    latest = _latest_signal()
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


def _latest_signal() -> str | None:
    """The signal that training, if there was any, was interrupted by."""
    training = sys.modules.get("scalelong.training.hardware")
    return training.Interrupt.latest if training is not None else None


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
