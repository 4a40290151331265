"""The command line: `scalelong COMMAND ...`.

Each command is a module of `scalelong.commands` with `parser()` and `run(options)`, which returns an exit code. This
file only knows their names, so that `scalelong --help` answers at once, without importing torch.

Exit codes: 0, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C, 143 after SIGTERM, 141 if nobody reads on.
An error is one line with its name. One without a name is a bug: the line tells where its traceback was written. With
--debug, or SCALELONG_DEBUG=1 in the environment, the traceback is shown.
"""

import codecs
import gc
import io
import os
import signal
import sys
import tempfile
import traceback
import unicodedata
from contextlib import suppress
from difflib import get_close_matches
from types import FrameType
from typing import Any

from ._version import __version__
from .commands import COMMANDS, command_module as _module
from .console import hushed
from .errors import InvalidConfigError, NotEnoughMemoryError, RunFailedError, ScaleLongError, lacks_memory
from .files import of_the_system, refusal, writing

DEBUG = "SCALELONG_DEBUG"

INTERRUPTED, TERMINATED, CLOSED_PIPE = 128 + 2, 128 + 15, 128 + 13


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: scalelong COMMAND [OPTIONS]",
            "",
            "Stable and faster training of U-shaped networks by scaling their long skip connections.",
            "",
            "commands:",
            *lines,
            "",
            "scalelong COMMAND --help tells more; scalelong --version prints the version. With --debug (or",
            f"{DEBUG}=1 in the environment), an error shows its traceback.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or os.environ.get(DEBUG, "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    command = f"scalelong {arguments[0]}" if arguments and arguments[0] in COMMANDS else "scalelong"
    before = _handle_sigterm()
    _open_closed_outputs()
    _accept_every_letter()
    try:
        code = _answer(arguments)
        with writing("the standard output"):
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _complain(f"{command}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`).
        _silence_output()
        return CLOSED_PIPE
    except Exception as error:
        named = _named(error)
        if debug and named is None:
            raise
        if debug:
            traceback.print_exc()
        # One line, so that logs and scripts can tell where it ends.
        _complain(f"{command}: {_unforeseen(error) if named is None else f'{type(named).__name__}: {_line(named)}'}")
        if isinstance(error, OSError):  # it may have been the output itself
            _silence_output()
        return 1
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _answer(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"scalelong {__version__}")
        return 0
    if any("\0" in argument for argument in arguments):  # from another program: no shell can write it
        raise InvalidConfigError("an argument holds a zero byte, which no name of a file can have: remove it")
    command, *rest = arguments
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        _complain(f"scalelong: unknown command {command!r}{meant}\n\n{usage()}")
        return 2
    return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    module = _module(command)
    if hasattr(module, "main"):  # those of CHECKOUT
        code = module.main(arguments) or 0
    else:
        options = module.parser().parse_args(arguments)
        options.arguments = arguments
        with hushed(getattr(options, "quiet", False)):
            code = module.run(options) or 0
    _leave_process_group()
    return TERMINATED if code == INTERRUPTED and _latest_signal() == "SIGTERM" else code


# Errors


def _named(error: Exception) -> ScaleLongError | None:
    """The error as one of ours: what the system or torch refuses has reasons that can be told. None for a bug."""
    if isinstance(error, ScaleLongError):
        return error
    refused = of_the_system(error)
    if refused is not None:
        return refusal(refused)
    if lacks_memory(error):
        return NotEnoughMemoryError(
            "the memory of the machine does not suffice for this: take smaller images (--size), smaller batches "
            "(--batch-size) or a smaller network"
        )
    if _is_about_processes(error):
        return RunFailedError(
            "another process of this command has ended, and its own message says why: mend that, then start all "
            "processes with the same command again"
        )
    return None


def _is_about_processes(error: Exception) -> bool:
    """Whether torch lost the other processes that torchrun started. It says so in the words of each transport, or it
    cannot read the half of a message that came."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    known = ("gloo", "NCCL", "TCPStore", "ProcessGroup", "Connection closed by peer", "Connection reset by peer")
    torchs = isinstance(error, RuntimeError) and any(word in str(error) for word in known)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((place for place, module in enumerate(modules) if module.startswith(f"{__package__}.")), default=-1)
    exchanging = any(module.startswith("torch.distributed.distributed_c10d") for module in modules[last + 1 :])
    return torchs or exchanging or type(error).__name__.startswith("Dist")


def _line(error: Exception) -> str:
    """The message in one line. It may hold what the user gave, which has no limit."""
    text = " ".join(str(error).split())
    return text if len(text) <= 4000 else f"{text[:3000]} ... {text[-900:]}"


def _unforeseen(error: Exception) -> str:
    """One line about an error that nobody foresaw, and the file with its traceback."""
    try:
        with tempfile.NamedTemporaryFile("wb", prefix="scalelong-", suffix=".txt", delete=False) as file:
            text = f"scalelong {__version__}\n" + "".join(traceback.format_exception(error))
            file.write(text.encode(errors="backslashreplace"))
        where = f"traceback: {file.name}; --debug shows it here"
    except OSError:
        where = "the traceback could not be written; --debug shows it here"
    return f"a bug in scalelong, please report it: {type(error).__name__}: {_line(error)[:500]} ({where})"


# Output


def _open_closed_outputs() -> None:
    """After `>&-` Python has no output at all, and the next file that is opened would take its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _accept_every_letter() -> None:
    """What a terminal cannot show (κ in ASCII, names of files that are no text) is written in letters that it can."""
    codecs.register_error("scalelong", lambda error: ("".join(map(_spelled, _failed(error))), _end(error)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="scalelong")


def _failed(error: Exception) -> str:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return error.object[error.start : error.end]


def _end(error: Exception) -> int:
    return error.end if isinstance(error, UnicodeEncodeError) else 0


_SPELLED = {"κ": "kappa", "ε": "epsilon", "σ": "sigma", "η": "eta", "×": "x", "·": "*", "−": "-", "–": "-", "—": "-"}
_SPELLED |= {"…": "...", "±": "+-", "≤": "<=", "≥": ">=", "→": "->", "√": "sqrt", "‖": "||", "≈": "~", "²": "^2"}


def _spelled(letter: str) -> str:
    plain = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
    return _SPELLED.get(letter) or plain or letter.encode("ascii", "backslashreplace").decode()


def _complain(text: str) -> None:
    """On the standard error, if anybody reads it."""
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

    def end(_: int, __: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    try:
        return signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        return None


def _latest_signal() -> str | None:
    """The signal that training, if there was any, was interrupted by."""
    training = sys.modules.get("scalelong.training.loop")
    return training.Interrupt.latest if training is not None else None


def _leave_process_group() -> None:
    """Leave the group of processes that a command has joined: one that is still open at exit may abort the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        gc.collect()  # sharded networks hold groups of their own, and sit in cycles
        distributed.destroy_process_group()
