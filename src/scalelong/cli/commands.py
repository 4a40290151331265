"""The commands by name and purpose, in the groups and the order in which `scalelong --help` shows them.

A command is a module with two functions: `parser()`, which imports nothing slow, and `run(options)`, which imports the
work, does it, and returns an exit code (None is 0). So `--help` answers at once, without torch.

`scalelong lab NAME` holds what serves studies. Two of these need the folders of a clone of the repository.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..errors import CheckoutNeededError

MAKE = {
    "demo": "see a deep U-ViT collapse at a high rate, and what keeps it alive, in three minutes",
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
    "range": "the learning rates at which your network survives, with and without scaling",
    "compare": "train several methods with equal seeds and compare them",
}
LAB = {
    "theory": "check the paper's theorems by measurement, as tables and figures",
    "coords": "how far each block moves in a few steps, over widths: the check of μP",
    "probe": "what the layers of a trained network know about classes, by linear classifiers",
    "tune": "coefficients of the long skips for sampling in few steps, with a test",
    "reproduce": "the figures and tables of the paper again, with a verdict on each (needs a clone)",
    "bench": "speed and memory on this machine against what one would run instead (needs a clone)",
}
COMMANDS = {**MAKE, **LOOK, "lab": ", ".join(LAB)}
GROUPS = {"train and use a model": MAKE, "look at long skips": LOOK, "studies": {"lab": COMMANDS["lab"]}}

CLONE = {"bench": "benchmarks.catalogue", "reproduce": "research.reproduce.command"}


def command_module(command: str) -> ModuleType:
    """The module of "train", or of "lab theory"."""
    name = command.removeprefix("lab ")
    if name not in CLONE:
        return import_module(f"scalelong.cli.{name}")
    root = Path(__file__).resolve().parents[3]
    package = CLONE[name].partition(".")[0]
    if not (root / package / "__init__.py").is_file():
        raise CheckoutNeededError(
            f"`scalelong {command}` needs the folder {package}/ of the repository, which an installation does not have "
            f"(looked in {root}): clone the repository and `pip install --editable` it"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(CLONE[name])
