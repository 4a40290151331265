"""The parser of every command: argparse with five habits of its own.

- `--help` shows the flags that most people need, `--help-all` shows every flag.
- Flags are written with dashes or underscores: `--batch-size`, `--batch_size`.
- Arguments may stand before, between or after the flags: `scalelong train --steps 3 digits`.
- The kind of a flag follows from its default, and its text ends with the default.
- `add_fields` turns the fields of a dataclass of `scalelong.config` into flags. Only flags that were given appear in
  the result, so that a recipe, a file and the command line can be laid over each other.

Nothing here imports torch.
"""

import argparse
import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ..console import counted
from ..files import parse_json


class Parser(argparse.ArgumentParser):
    """Makes the parser of `scalelong COMMAND`; `description` and `examples` are printed as they stand."""

    def __init__(self, command: str, description: str, examples: str = "", usage: str = "[OPTIONS]") -> None:
        shown = f"\n\nexamples\n{examples.rstrip()}" if examples else ""
        super().__init__(
            prog=f"scalelong {command}",
            usage=f"scalelong {command} {usage}",
            description=f"{description.strip()}{shown}",
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._positionals.title, self._optionals.title = "arguments", "options"
        self.rare: list[argparse.Action] = []
        hidden: Any = {"action": _Help, "nargs": 0, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        self.add_argument("-h", "--help", **hidden)
        self.add_argument("--help-all", **hidden)

    def flag(
        self, spellings: str, text: str, default: Any = None, kind: Any = None, rare: bool = False, **more: Any
    ) -> None:
        """Add a flag, or an argument: `flag("--steps --max-train-steps", "of each run", 300)`.

        `kind` is a type or a tuple of choices; left out, it is that of the default. A default of False makes a switch.
        A rare flag is shown by `--help-all` alone.
        """
        if default is False:
            more["action"] = "store_true"
        elif isinstance(kind, tuple):
            more["choices"] = kind
        else:
            kind = kind or (str if default is None else type(default))
            more["type"] = whole_number if kind is int else kind
        text = text if default in (None, False, []) or "default" in text else f"{text} (default: {default})"
        action = self.add_argument(*spellings.split(), default=default, help=text.replace("%", "%%"), **more)
        if rare:
            self.rare.append(action)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Arguments and flags in any order, flags with dashes or underscores."""
        return self.parse_intermixed_args([_dashed(word) for word in args or []], namespace)

    def short_help(self) -> str:
        """The text of `--help`: without rare flags, and with a line that says how to see them."""
        if not self.rare:
            return self.format_help()
        texts = [action.help for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return f"{self.format_help()}\n{counted(len(texts), 'more flag')}: {self.prog} --help-all\n"
        finally:
            for action, text in zip(self.rare, texts, strict=True):
                action.help = text

    def flags(self) -> dict[str, str]:
        """The flag of each parameter: {"warmup": "--warmup", "start_from": "--from"}. Errors are translated by it."""
        return {a.dest: next((s for s in a.option_strings if s[:2] == "--"), "") for a in self._actions}

    def format_usage(self) -> str:
        return f"usage: {self.usage}\n"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}{self._nearest(message)}; {self.prog} --help shows how to write it\n")

    def _nearest(self, message: str) -> str:
        """The flag that was perhaps meant, for one that does not exist."""
        words = message.split() if message.startswith("unrecognized") else []
        wrong = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        near = get_close_matches(wrong, self._option_string_actions, n=1)
        return f"; did you mean {near[0]}?" if near else ""


class _Help(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        print(parser.format_help() if option_string == "--help-all" else parser.short_help(), end="")
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """All spellings of a flag in one line, with its value once at the end."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, (action.metavar if action.metavar else action.dest.upper()))  # type: ignore[arg-type]
        return f"{', '.join(action.option_strings)} {value}"


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


# Flags from the fields of dataclasses


def add_fields(
    parser: Parser, config: type, aliases: Mapping[str, str], common: Collection[str], chosen: Collection[str]
) -> None:
    """One flag for each field of `config` and of the dataclasses inside it, grouped as these are.

    `aliases` gives further spellings by field, `common` names the fields that `--help` shows, `chosen` those that are
    chosen for the machine where they are not given.
    """
    for group, field, hint in _fields_of(config, parser):
        text = str(field.metadata.get("help", ""))
        default = "chosen for the machine" if field.name in chosen else field.default
        if default not in (None, "", (), dataclasses.MISSING) and not isinstance(default, bool):
            text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        spellings = [f"--{field.name.replace('_', '-')}", *aliases.get(field.name, "").split()]
        text = text.strip().replace("%", "%%")
        action = group.add_argument(*spellings, dest=field.name, default=argparse.SUPPRESS, help=text, **_kind(hint))
        if field.name not in common:
            parser.rare.append(action)


def _fields_of(config: type, parser: Parser) -> Iterator[tuple[Any, dataclasses.Field[Any], Any]]:
    group = parser.add_argument_group((config.__doc__ or config.__name__).split("\n")[0].rstrip("."))
    hints = get_type_hints(config)
    inner = [field for field in dataclasses.fields(config) if dataclasses.is_dataclass(hints[field.name])]
    yield from ((group, field, hints[field.name]) for field in dataclasses.fields(config) if field not in inner)
    for field in inner:
        yield from _fields_of(hints[field.name], parser)


def _kind(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = _kind(next(part for part in get_args(hint) if part is not type(None)))
        return inner if "action" in inner else {**inner, "type": _or_none(inner.get("type", str)), "choices": None}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is dict:
        return {"nargs": "*", "action": NamedValues, "metavar": "NAME=VALUE"}
    if get_origin(hint) is tuple:
        first, rest = get_args(hint)
        return {"type": first, "metavar": first.__name__.upper(), "nargs": "*" if rest is Ellipsis else 2}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": whole_number if hint is int else hint, "metavar": "TEXT" if hint is str else hint.__name__.upper()}


def _or_none(kind: Any) -> Any:
    return lambda text: None if text.lower() == "none" else kind(text)


class NamedValues(argparse.Action):
    """`--model-options depth=12 dim=256`: values are JSON, or else text."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        found: dict[str, Any] = {}
        for text in values:
            name, equals, value = text.partition("=")
            if not equals or not name:
                parser.error(f"{option_string} takes NAME=VALUE such as depth=12, got {text!r}")
            try:
                found[name] = parse_json(value)
            except ValueError:
                found[name] = value
        setattr(namespace, self.dest, found)


# Values


def whole_number(text: str) -> int:
    """Counts, sizes and seeds. The command decides whether a number makes sense."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text[:60]!r}") from error
    if abs(number) > 2**62:
        raise argparse.ArgumentTypeError(f"must be at most 2^62, got {text[:60]!r}")
    return number


def floats(text: str) -> list[float]:
    """`--rates 1e-3,2e-3`."""
    return _numbers(text, float)


def integers(text: str) -> list[int]:
    """`--widths 64,128`."""
    return _numbers(text, int)


def _numbers(text: str, kind: Any) -> list[Any]:
    try:
        found = [kind(part) for part in split(text)]
    except ValueError:
        found = []
    if not found:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text[:60]!r}")
    return found


def split(text: str) -> list[str]:
    """At commas, but not at those between the options of one method, as in "none,cs:kappa=0.5,reverse=true,ls"."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    found: list[str] = []
    for part in filter(None, map(str.strip, parts)):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found
