"""The command line: `scalelong COMMAND ...`.

Each command is a module of `scalelong.commands` with a function `main(arguments) -> int | None`. This file only
knows their names, so that `scalelong --help` answers at once, without importing torch. The commands of CHECKOUT serve
the repository alone; their code stands beside `src` and is not in the wheel.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

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

CHECKOUT = {"bench": "benchmarks.catalogue", "reproduce": "research.reproduce.command"}


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
            "scalelong COMMAND --help tells more; scalelong --version prints the version.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
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
    try:
        code = _module(command).main(rest) or 0
        _part_from_other_processes()
        return code
    except ScaleLongError as error:
        print(f"scalelong {command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"scalelong {command}: interrupted", file=sys.stderr)
        return 130


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


def _part_from_other_processes() -> None:
    """Leave the group of processes that a command has joined: one that is still open at exit may abort the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
