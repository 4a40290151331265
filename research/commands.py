"""The command lines of studies: all of them have `run`, which trains what is missing, and `redraw`."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

COMMANDS = {"run": "train what is missing", "redraw": "page and figures, from the JSON lines alone"}


def study_parser(
    name: str, text: str | None, folder: Path, more: Mapping[str, str] | None = None
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of a module of this package, and those of its commands, to which it adds options of its own.

    `text` is the module's own, whose first line describes it; `more` are commands besides.
    """
    parser = argparse.ArgumentParser(prog=f"python -m research.{name}", description=(text or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    found = {command: commands.add_parser(command, help=told) for command, told in {**COMMANDS, **(more or {})}.items()}
    for command in found.values():
        command.add_argument("--folder", type=Path, default=folder, help="of the results (default: %(default)s)")
    return parser, found


def add_parts(command: argparse.ArgumentParser, known: Iterable[str]) -> None:
    """Let a command take parts of a study by name; it has to ask `parts_of` for them."""
    command.add_argument("parts", nargs="*", help=f"by default all: {'; '.join(known)}")


def parts_of(parser: argparse.ArgumentParser, given: list[str], known: Iterable[str]) -> list[str]:
    """The parts that were named, or all; ends the program where one is not known."""
    known = list(known)
    if unknown := sorted(set(given) - set(known)):
        parser.error(f"no part {', '.join(unknown)}; known: {'; '.join(known)}")
    return given or known
