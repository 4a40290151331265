"""`scalelong completion`: a script that completes commands, flags and choices in a shell, made of the parsers."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import CheckoutNeededError
from . import COMMANDS, command_module

SHELLS = ("bash", "zsh", "fish")

_EPILOG = """\
for this shell alone, or in its start-up file
  bash   source <(scalelong completion bash)
  zsh    source <(scalelong completion zsh)      # after compinit
  fish   scalelong completion fish | source
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scalelong completion",
        description="Print a script that completes commands, flags and their choices in a shell.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("shell", choices=SHELLS, help="the shell that is to read it")
    return made


def run(options: argparse.Namespace) -> None:
    made = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    print(made[options.shell]({name: words_of(name) for name in COMMANDS}), end="")


# What can be completed


class Flag(NamedTuple):
    spellings: tuple[str, ...]
    """Without any: the arguments that need no flag."""
    text: str
    choices: tuple[str, ...]
    takes_value: bool


def words_of(command: str) -> list[Flag]:
    """The flags of a command. One whose code is not installed has its name alone."""
    try:
        made = command_module(command).parser()
    except CheckoutNeededError:
        return []
    return list(_flags(made if isinstance(made, argparse.ArgumentParser) else made.as_argparse()))


def _flags(made: argparse.ArgumentParser) -> Iterator[Flag]:
    formatter = made._get_formatter()
    for action in made._actions:
        if action.help == argparse.SUPPRESS:
            continue
        text = textwrap.shorten(formatter._expand_help(action) if action.help else "", 70, placeholder=" ...")
        # A shell would take other letters for its own; there are none in our names.
        choices = tuple(str(choice) for choice in action.choices or () if re.fullmatch(r"[\w.+/-]+", str(choice)))
        yield Flag(tuple(action.option_strings), text, choices, action.nargs != 0)


# The scripts. A value without choices may be a file, so file names are offered there.


def bash_script(commands: dict[str, list[Flag]]) -> str:
    values, flags, arguments = [], [], []
    for name, words in commands.items():
        for flag in words:
            if flag.spellings and flag.takes_value:
                cases = " | ".join(f'"{name} {spelling}"' for spelling in flag.spellings)
                values.append(f'    {cases}) words="{" ".join(flag.choices)}" ;;')
        spellings = " ".join(spelling for flag in words for spelling in flag.spellings)
        flags.append(f'        "{name} -"*) words="{spellings}" ;;')
        free = " ".join(choice for flag in words if not flag.spellings for choice in flag.choices)
        if free:
            arguments.append(f'        "{name} "*) words="{free}" ;;')
    return "\n".join(
        [
            "# bash completion of scalelong: source <(scalelong completion bash)",
            "_scalelong() {",
            '  local words="" current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            '  local command="${COMP_WORDS[1]}"',
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    words="{" ".join(commands)} --help --version"',
            "  else",
            '    case "$command $previous" in',
            *values,
            "    *)",
            '      case "$command $current" in',
            *flags,
            *arguments,
            "      esac ;;",
            "    esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _scalelong scalelong",
            "",
        ]
    )


def zsh_script(commands: dict[str, list[Flag]]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("'", "'\\''") + "'"

    def described(text: str) -> str:
        return re.sub(r"([\[\]:\\])", r"\\\1", text)

    def spec(flag: Flag, spelling: str) -> str:
        value = f"({' '.join(flag.choices)})" if flag.choices else "_files"
        if not flag.spellings:
            return quoted(f"*:argument:{value}")
        if not flag.takes_value:
            return quoted(f"{spelling}[{described(flag.text)}]")
        return quoted(f"{spelling}{'=' if spelling.startswith('--') else ''}[{described(flag.text)}]:value:{value}")

    names = [f"    {quoted(f'{name}:{described(purpose)}')}" for name, purpose in _purposes(commands)]
    cases = []
    for name, words in commands.items():
        # One rule for all arguments: those with choices first.
        free = sorted((flag for flag in words if not flag.spellings), key=lambda flag: not flag.choices)[:1]
        specs = [spec(flag, spelling) for flag in words for spelling in flag.spellings] + [spec(f, "") for f in free]
        cases.append(f"    {name}) _arguments -S {' '.join(specs)} ;;" if specs else f"    {name}) ;;")
    return "\n".join(
        [
            "#compdef scalelong",
            "# zsh completion of scalelong: source <(scalelong completion zsh)",
            "_scalelong() {",
            "  local -a commands",
            "  commands=(",
            *names,
            "  )",
            "  if (( CURRENT == 2 )); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  shift words",
            "  (( CURRENT-- ))",
            '  case "${words[1]}" in',
            *cases,
            "  esac",
            "}",
            'if [[ "${funcstack[1]}" == _scalelong ]]; then',
            '  _scalelong "$@"',
            "else",
            "  compdef _scalelong scalelong",
            "fi",
            "",
        ]
    )


def fish_script(commands: dict[str, list[Flag]]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = ["# fish completion of scalelong: scalelong completion fish | source"]
    for name, purpose in _purposes(commands):
        lines.append(f"complete -c scalelong -n __fish_use_subcommand -f -a {name} -d {quoted(purpose)}")
    for name, words in commands.items():
        start = f"complete -c scalelong -n '__fish_seen_subcommand_from {name}'"
        for flag in words:
            spelled = [f"-l {s[2:]}" if s.startswith("--") else f"-s {s[1:]}" for s in flag.spellings]
            # -x: one of these; -r: a value, which may be a file.
            given = [f"-x -a {quoted(' '.join(flag.choices))}"] if flag.choices else ["-r"] * flag.takes_value
            if not flag.spellings:
                given = [f"-f -a {quoted(' '.join(flag.choices))}"] if flag.choices else []
            if spelled or given:
                lines.append(" ".join([start, *spelled, *given, "-d", quoted(flag.text)]))
    return "\n".join([*lines, ""])


def _purposes(commands: dict[str, list[Flag]]) -> list[tuple[str, str]]:
    return [(name, COMMANDS[name]) for name in commands]
