"""scalelong train: a diffusion model from images. The same command continues it.

The flags are the fields of `TrainConfig`, which tyro reads. Importing it costs torch, so `scalelong train --help` reads
the fields from the source instead, with their defaults and their sentences; `--recipe NAME --help` shows the recipe's
values.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..console import silent
from ..errors import InvalidConfigError
from ..optional import needs
from .options import INTERRUPTED, ROOT, names_in

if TYPE_CHECKING:
    from ..runs.config import TrainConfig

DESCRIPTION = f"""\
Train a diffusion model: `scalelong train IMAGES` or `scalelong train --recipe NAME`. To continue a run, give the same \
command again. IMAGES is a folder of images, a file or the name of a data set, the same as --data. \
Recipes: {", ".join(names_in("runs.recipes", "RECIPES"))}.
"""

OWN = {
    "recipe": "Begin with the values of a recipe.",
    "config": "Then take those of a YAML file, such as the config.yaml of a run folder.",
    "out": "The run folder; left out, its name is made from the configuration: runs/RECIPE-SCALING-seedN.",
    "dry_run": "Print all that would happen, and end.",
}
"""The flags of the command itself; all others are fields of TrainConfig."""


@dataclasses.dataclass
class Command:
    """What the command line says."""

    train: TrainConfig
    out: Path | None = None
    dry_run: bool = False


class GivenOptions(dict[str, Any]):
    """Model options from the command line, as opposed to those of the recipe."""


def parser() -> QuickParser:
    return QuickParser()


def run(options: argparse.Namespace) -> int:
    from ..training import train

    command = parse(options.arguments)
    if command.dry_run:
        print(dry_run(command))
        return 0
    return 0 if train(command.train, command.out).finished else INTERRUPTED


class QuickParser:
    """Answers a bare `--help` from the source of TrainConfig. Everything else is left to tyro, in `run`."""

    def parse_args(self, arguments: list[str]) -> argparse.Namespace:
        if arguments in (["-h"], ["--help"]):
            print(self.format_help(), end="")
            raise SystemExit(0)
        return argparse.Namespace()

    def format_help(self) -> str:
        parts = ["usage: scalelong train [IMAGES] [OPTIONS]\n", textwrap.fill(DESCRIPTION, 100)]
        if find_spec("tyro") is None:
            parts += ["", "Training needs more packages than are installed: pip install 'scalelong[train]'"]
        kinds = {"recipe": "NAME", "config": "FILE", "out": "FOLDER"}
        own = [Flag(name, kinds.get(name, ""), "", text) for name, text in OWN.items()]
        for title, flags in (("The command.", own), *config_flags()):
            parts += ["", title, *(flag.help() for flag in flags)]
        return "\n".join([*parts, ""])


class Flag(NamedTuple):
    name: str
    kind: str
    default: str
    text: str

    def help(self) -> str:
        flag = f"--{self.name.replace('_', '-')} {self.kind}".rstrip()
        default = f"(default: {self.default})" if self.default else ""
        text = " ".join(f"{self.text} {default}".split())
        indent = " " * 6
        return f"  {flag}\n{textwrap.fill(text, 96, initial_indent=indent, subsequent_indent=indent)}"


KINDS = {"int": "INT", "float": "FLOAT", "str": "TEXT", "bool": "", "bool | None": "{None,True,False}"}
KINDS |= {"dict[str, Any]": "[NAME=VALUE ...]", "tuple[float, float]": "FLOAT FLOAT", "tuple[str, ...]": "[TEXT ...]"}


def config_flags() -> Iterator[tuple[str, list[Flag]]]:
    """The groups of TrainConfig and their flags, from its source: title, flags."""
    tree = ast.parse((ROOT / "runs" / "config.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    groups, own = [], []
    for name, annotation, default, text in _fields(classes["TrainConfig"]):
        if annotation in classes:
            flags = [Flag(*_described(field)) for field in _fields(classes[annotation])]
            groups.append((ast.get_docstring(classes[annotation]) or name, flags))
        else:
            own.append(Flag(*_described((name, annotation, default, text))))
    yield ast.get_docstring(classes["TrainConfig"]) or "The run.", own
    yield from groups


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, annotation, default and the sentence below of each field of a dataclass."""
    for entry, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = str(below.value.value) if said else ""  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            default = ast.unparse(entry.value) if entry.value is not None else ""
            yield entry.target.id, ast.unparse(entry.annotation), default, text


def _described(field: tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    name, annotation, default, text = field
    kind = KINDS.get(annotation) if annotation in KINDS else KINDS.get(annotation.removesuffix(" | None"))
    if kind is None:
        kind = "{" + ",".join(_choices(annotation)) + "}"
    shown = default.strip("'\"") if "default_factory" not in default and annotation != "bool" else ""
    return name, kind, shown, text


def _choices(annotation: str) -> list[str]:
    """The values of a Literal, written out or by a name of runs.config or noise."""
    if annotation.startswith("Literal["):
        return list(ast.literal_eval(f"({annotation.removeprefix('Literal').strip('[]')},)"))
    for module in ("runs.config", "noise"):
        try:
            return names_in(module, annotation)
        except LookupError:
            continue
    raise LookupError(f"the values of {annotation} are not written out")


def parse(arguments: list[str]) -> Command:
    """Recipe, then file, then flags."""
    tyro = needs("tyro", "train", "`scalelong train`")
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--data", *arguments]
    base = _base(arguments)
    if not any(argument.startswith(("--data", "--recipe", "--config", "-h", "--help")) for argument in arguments):
        raise InvalidConfigError(
            "nothing to train on: give a folder of images (scalelong train IMAGES), --recipe NAME or --config FILE; "
            "--help tells more"
        )
    given = tyro.cli(
        _command_type(tyro),
        prog="scalelong train",
        description=DESCRIPTION,
        args=arguments,
        default=_command_type(tyro)(train=base),
        # No `--optimizer.` before `--lr`: the names of all groups are different.
        config=(tyro.conf.OmitArgPrefixes,),
        registry=_options_registry(tyro),
    )
    config: TrainConfig = given.train
    inherited = base.model_options if config.model == base.model else {}
    added = config.model_options if isinstance(config.model_options, GivenOptions) else {}
    config = dataclasses.replace(config, model_options={**inherited, **added})
    return Command(config, given.out, given.dry_run)


@cache
def _command_type(tyro: Any) -> Any:
    """What tyro fills in: the flags of the command, and those of the configuration."""
    from ..runs.config import TrainConfig

    def described(name: str, kind: Any) -> Any:
        return typing.Annotated[kind, tyro.conf.arg(help=OWN[name])]

    return dataclasses.make_dataclass(
        "Command",
        [
            ("recipe", described("recipe", str | None), None),
            ("config", described("config", Path | None), None),
            ("out", described("out", Path | None), None),
            ("dry_run", described("dry_run", bool), False),
            ("train", TrainConfig, dataclasses.field(default_factory=TrainConfig)),
        ],
    )


def _base(arguments: list[str]) -> TrainConfig:
    from ..runs.config import TrainConfig, load_config
    from ..runs.recipes import recipe

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    parser.add_argument("--config")
    known, _ = parser.parse_known_args(arguments)
    base = recipe(known.recipe) if known.recipe else TrainConfig()
    return load_config(known.config, base) if known.config else base


def _options_registry(tyro: Any) -> Any:
    """`--model-options depth=12 dim=256`: values are JSON, or else text."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(info: Any) -> Any:
        if typing.get_origin(info.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="NAME=VALUE",
            instance_from_str=lambda texts: GivenOptions(map(_option, texts)),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [f"{name}={json.dumps(entry)}" for name, entry in value.items()],
        )

    return registry


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"a model option looks like depth=12, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def dry_run(command: Command) -> str:
    from ..runs.model import load_images
    from ..runs.recipes import default_folder
    from ..training.plan import describe_run

    config = command.train
    data, _ = load_images(config, silent)
    return describe_run(config, data, command.out or default_folder(config))
