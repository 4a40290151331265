"""One module per command of the command line.

A command is two functions: `parser()`, which makes the parser and imports nothing slow, and `run(options)`, which
imports the work, does it, and returns an exit code (None is 0). So `--help` answers at once. Flags that several
commands share are in `options`. The commands of CHECKOUT serve the repository alone; their code stands beside `src` and
is not in the wheel.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..errors import CheckoutNeededError

COMMANDS = {
    "theory": "check the paper's theorems by measurement, as tables and figures",
    "kappa": "choose κ for your data and network, and say why",
    "find": "find the long skips of any model, and how each can be scaled",
    "train": "train a diffusion model on your images; the same command continues it",
    "compare": "train several methods with equal seeds and compare them",
    "range": "the learning rates at which your network survives, with and without scaling",
    "coords": "how far each block moves in a few steps, over widths: the check of μP",
    "progress": "how far the runs of a sweep are, wherever they are carried out",
    "reproduce": "the figures and tables of the paper again, with a verdict on each",
    "diagnose": "one page about the long skips of a model, before training",
    "report": "write one HTML file about runs, to look at offline",
    "sample": "make images with a trained model",
    "tune": "after training: coefficients of the long skips for few steps, and caches, with a test",
    "eval": "score a run or a folder of images: Fréchet distance, precision, recall, with intervals",
    "probe": "what the layers of a trained network know about classes, by linear classifiers",
    "stats": "compute and keep the reference statistics of a data set",
    "ema": "choose the length of the moving average after training",
    "export": "write a trained model as a diffusers folder or as safetensors",
    "models": "list trained networks that come along, and those of the paper",
    "bench": "measure speed and memory on this machine, against what one would run instead",
    "demo": "see a deep U-ViT collapse at a high rate, and what keeps it alive, in three minutes",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
}

CHECKOUT = {"bench": "benchmarks.catalogue", "reproduce": "research.reproduce.command"}


def command_module(command: str) -> ModuleType:
    if command not in CHECKOUT:
        return import_module(f"scalelong.commands.{command}")
    root = Path(__file__).resolve().parents[3]
    package = CHECKOUT[command].partition(".")[0]
    if not (root / package / "__init__.py").is_file():
        raise CheckoutNeededError(
            f"`scalelong {command}` needs the folder {package}/ of the repository, which an installation does not have "
            f"(looked in {root}): clone the repository and `pip install --editable` it"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(CHECKOUT[command])
