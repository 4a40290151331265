"""The commands by name and purpose, in the groups and the order in which `scalelong --help` shows them.

A command is two functions of a module: `NAME_parser()`, which imports nothing slow, and `run_NAME(options)`, which
imports the work, does it, and returns an exit code (None is 0). So `--help` answers at once, without torch.

`scalelong lab NAME` holds what serves studies. Two of these need the folders of a clone of the repository.
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckoutNeededError, InvalidConfigError
from ..optional import needs

MAKE = {
    "demo": "see a deep U-ViT collapse at a high rate, and what keeps it alive, in a few minutes",
    "train": "train a diffusion model on your images; the same command continues it",
    "sample": "make images with a trained model",
    "eval": "score a run or a folder of images: Fréchet distance, precision, recall, with intervals",
    "report": "write one HTML file about runs, to look at offline",
    "export": "write a trained model as a diffusers folder or as safetensors",
    "models": "list trained networks that come along, and those of the paper",
}
LOOK = {
    "find": "find the long skips of any model, and how each can be scaled",
    "diagnose": "one page about the long skips of a model, before training",
    "range": "the learning rates at which your network survives, with and without each cure",
    "compare": "train several methods with equal seeds and compare them",
}
LAB = {
    "theory": "check the paper's theorems by measurement, as tables",
    "coords": "how far each block moves in a few steps, over widths: the check of μP",
    "probe": "what the layers of a trained network know about classes, by linear classifiers",
    "tune": "coefficients of the long skips for sampling in few steps, with a test",
    "reproduce": "the figures and tables of the paper again, with a verdict on each (needs a clone)",
    "bench": "speed and memory on this machine against what one would run instead (needs a clone)",
}
COMMANDS = {**MAKE, **LOOK, "lab": ", ".join(LAB)}
GROUPS = {"train and use a model": MAKE, "look at long skips": LOOK, "studies": {"lab": COMMANDS["lab"]}}

ALL = {**MAKE, **LOOK, **{f"lab {name}": purpose for name, purpose in LAB.items()}}

MODULES = {
    **dict.fromkeys(("demo", "range"), "range"),
    **dict.fromkeys(("report", "export", "models"), "publish"),
    **dict.fromkeys(("theory", "probe", "tune"), "lab"),
}
"""The module of a command, where it is not the one of its own name."""
CLONE = {"bench": "benchmarks.catalogue", "reproduce": "research.reproduce.command"}


class Command(NamedTuple):
    parser: Callable[[], Any]
    run: Callable[[Any], int | None]
    """Takes what the parser found."""


def find_command(path: str) -> Command:
    """The functions of "train", or of "lab theory"."""
    name = path.removeprefix("lab ")
    if name in CLONE:
        module = _of_clone(path, CLONE[name])
        return Command(module.parser, module.run)
    module = import_module(f"scalelong.cli.{MODULES.get(name, name)}")
    return Command(getattr(module, f"{name}_parser"), getattr(module, f"run_{name}"))


def _of_clone(path: str, module: str) -> Any:
    root, package = Path(__file__).resolve().parents[3], module.partition(".")[0]
    if not (root / package / "__init__.py").is_file():
        raise CheckoutNeededError(
            f"`scalelong {path}` needs the folder {package}/ of the repository, which an installation does not have "
            f"(looked in {root}): clone the repository and `pip install --editable` it"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(module)


def completion_script(shell: str = "", *rest: str) -> str:
    """A script that completes commands, flags and choices: source <(scalelong --print-completion bash)."""
    shtab = needs("shtab", "completion", "`scalelong --print-completion`")
    if shell not in shtab.SUPPORTED_SHELLS or rest:
        raise InvalidConfigError(f"--print-completion takes one of {', '.join(shtab.SUPPORTED_SHELLS)}, got {shell!r}")
    whole = argparse.ArgumentParser(prog="scalelong")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(parser_class=argparse.ArgumentParser)
    lab = commands.add_parser("lab", help=COMMANDS["lab"]).add_subparsers(parser_class=argparse.ArgumentParser)
    for path, purpose in ALL.items():
        try:
            parents = [find_command(path).parser()]
        except CheckoutNeededError:  # its code is not installed: the name alone
            parents = []
        place = lab if path.startswith("lab ") else commands
        options: Any = {"parents": parents, "add_help": False, "conflict_handler": "resolve"}
        place.add_parser(path.removeprefix("lab "), help=purpose, **options)
    return shtab.complete(whole, shell=shell)
