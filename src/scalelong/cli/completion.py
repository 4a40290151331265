"""`scalelong --print-completion bash`: a script that completes commands, flags and choices, written by shtab.

source <(scalelong --print-completion bash)
"""

import argparse

from ..errors import CheckoutNeededError, InvalidConfigError
from ..optional import needs
from .commands import COMMANDS, LAB, command_module


def completion_script(shell: str = "", *rest: str) -> str:
    shtab = needs("shtab", "completion", "`scalelong --print-completion`")
    if shell not in shtab.SUPPORTED_SHELLS or rest:
        raise InvalidConfigError(f"--print-completion takes one of {', '.join(shtab.SUPPORTED_SHELLS)}, got {shell!r}")
    whole = argparse.ArgumentParser(prog="scalelong")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(parser_class=argparse.ArgumentParser)
    for name, purpose in COMMANDS.items():
        if name != "lab":
            _add(commands, name, name, purpose)
    lab = commands.add_parser("lab", help=COMMANDS["lab"]).add_subparsers(parser_class=argparse.ArgumentParser)
    for name, purpose in LAB.items():
        _add(lab, name, f"lab {name}", purpose)
    return shtab.complete(whole, shell=shell)


def _add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, path: str, purpose: str) -> None:
    try:
        parents = [command_module(path).parser()]
    except CheckoutNeededError:  # its code is not installed: the name alone
        parents = []
    commands.add_parser(name, help=purpose, parents=parents, add_help=False, conflict_handler="resolve")
