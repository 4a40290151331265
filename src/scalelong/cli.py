"""The command line: `scalelong COMMAND ...`.

Each command is a module of `scalelong.commands` with `parser()` and `run(options)`, which returns an exit code. This
file only knows their names, so that `scalelong --help` answers at once, without importing torch. The commands of
CHECKOUT serve the repository alone; their code stands beside `src` and is not in the wheel.

Exit codes: 0, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C, 143 after SIGTERM, 141 if nobody reads on.
"""

import os
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ._version import __version__
from .errors import CheckoutNeededError, ScaleLongError

COMMANDS = {
    "theory": "check the paper's theorems by measurement, as tables and figures",
    "kappa": "choose κ for your data and network, and say why",
    "find": "find the long skips of any model, and how each can be scaled",
    "train": "train a diffusion model on your images; the same command continues it",
    "compare": "train several methods with equal seeds and compare them",
    "range": "the learning rates at which your network survives, with and without scaling",
    "reproduce": "the figures and tables of the paper again, with a verdict on each",
    "diagnose": "one page about the long skips of a model, before training",
    "report": "write one HTML file about runs, to look at offline",
    "sample": "make images with a trained model",
    "eval": "score a run or a folder of images: Fréchet distance, precision, recall, with intervals",
    "stats": "compute and keep the reference statistics of a data set",
    "export": "write a trained model as a diffusers folder or as safetensors",
    "models": "list the networks of the paper with their parameter counts",
    "bench": "measure speed and memory on this machine, against what one would run instead",
    "demo": "see a deep U-ViT collapse at a high rate, and what keeps it alive, in three minutes",
}

CHECKOUT = {"bench": "benchmarks.catalogue", "reproduce": "research.reproduce.run"}

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
            "scalelong COMMAND --help tells more; scalelong --version prints the version. With --debug, an error shows",
            "its traceback.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"scalelong {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"scalelong: unknown command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    before = _handle_sigterm()
    try:
        code = _run(command, rest)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"scalelong {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`). At exit Python would flush into the pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except ScaleLongError as error:
        if debug:
            traceback.print_exc()
        print(f"scalelong {command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"scalelong {command}: {_unforeseen(error)}", file=sys.stderr)
        return 1
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _run(command: str, arguments: list[str]) -> int:
    module = _module(command)
    if hasattr(module, "main"):  # those of CHECKOUT
        code = module.main(arguments) or 0
    else:
        options = module.parser().parse_args(arguments)
        options.arguments = arguments
        code = module.run(options) or 0
    _leave_process_group()
    return TERMINATED if code == INTERRUPTED and _latest_signal() == "SIGTERM" else code


def _module(command: str) -> ModuleType:
    if command not in CHECKOUT:
        return import_module(f"scalelong.commands.{command}")
    root = Path(__file__).resolve().parents[2]
    package = CHECKOUT[command].partition(".")[0]
    if not (root / package / "__init__.py").is_file():
        raise CheckoutNeededError(
            f"`scalelong {command}` needs the folder {package}/ of the repository, which an installation does not have "
            f"(looked in {root}): clone the repository and `pip install --editable` it"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(CHECKOUT[command])


def _unforeseen(error: Exception) -> str:
    """One line about an error that nobody foresaw, and the file with its traceback."""
    with tempfile.NamedTemporaryFile("w", prefix="scalelong-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(f"scalelong {__version__}\n" + "".join(traceback.format_exception(error)))
    text = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {text[:500]} (traceback: {file.name}; --debug shows it here)"


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
        distributed.destroy_process_group()
