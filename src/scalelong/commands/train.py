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
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..console import silent
from ..errors import InvalidConfigError
from ..files import parse_json
from ..optional import needs
from .options import INTERRUPTED, ROOT, names_in

if TYPE_CHECKING:
    from ..runs.config import TrainConfig
    from ..training.sizing import Plan

DESCRIPTION = f"""\
Train a diffusion model: `scalelong train IMAGES` or `scalelong train --recipe NAME`. To continue a run, give the same \
command again. IMAGES is a folder of images, a file or the name of a data set, the same as --data; image size, \
network, batch and steps are then chosen for this machine and --budget, apart from those that are given. \
Recipes: {", ".join(names_in("runs.recipes", "RECIPES"))}.
"""

OWN = {
    "recipe": "Begin with the values of a recipe.",
    "config": "Then take those of a YAML file, such as the config.yaml of a run folder.",
    "out": "The run folder; left out, its name is made from the configuration: runs/RECIPE-SCALING-seedN.",
    "dry_run": "Print all that would happen and how long it would take, and end.",
    "quiet": "Print the result alone, no progress.",
    "trust": "Run the Python code that --config names as its model (package.module:factory).",
}
"""The flags of the command itself; all others are fields of TrainConfig."""


@dataclasses.dataclass
class Command:
    """What the command line says."""

    train: TrainConfig
    out: Path | None = None
    dry_run: bool = False
    quiet: bool = False
    given: frozenset[str] = frozenset()
    """The fields of the configuration that have a flag on the command line."""
    by_name: bool = False
    """Begins with a recipe or a file, which say all that is not given; otherwise it is chosen for the machine."""
    trust: bool = False

    @property
    def is_sized(self) -> bool:
        """Sizes that are not given are chosen for the machine; a run that begins with weights has their network."""
        return not self.by_name and self.train.images.autoencoder is None and self.train.start_from is None


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
    say = silent if command.quiet else log
    config, folder, plan = settle(command, say)
    if plan is not None:
        say(str(plan))
    result = train(config, folder, quiet=command.quiet)
    if os.environ.get("RANK", "0") == "0":
        print(result, flush=True)
    return 0 if result.finished else INTERRUPTED


def log(text: str) -> None:
    """Remarks and progress go to the standard error, results to the standard output."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def settle(command: Command, say: Callable[[str], None]) -> tuple[TrainConfig, Path, Plan | None]:
    """The configuration to train with, its folder, and how it was sized, unless it is that of a run that has begun."""
    from ..console import Progress
    from ..runs.folder import RunFolder
    from ..runs.model import load_images
    from ..runs.recipes import default_folder
    from ..training.sizing import fit_held_out, lengthen_run, size_run

    config, given = command.train, command.given
    network_open = command.is_sized and not given & {"model", "model_options"}
    folder = command.out or default_folder(config, network_open)
    before = RunFolder(folder).begun_with()
    if before is not None:
        return continued(command, before), folder, None
    if config.start_from is not None:
        plan = started(command, say)
        return plan.config, folder, plan
    if command.is_sized:
        progress = Progress("reading images", enabled=False if command.quiet else None)
        plan = size_run(config, given, say, progress)
        return plan.config, folder, plan
    if "held_out" not in given:
        config = fit_held_out(config, say, " (--held-out says otherwise)")
    if config.budget is None:
        return config, folder, None
    plan = lengthen_run(config, given, load_images(config, silent)[0])
    return plan.config, folder, plan


def started(command: Command, say: Callable[[str], None]) -> Plan:
    """A run that begins with weights has their network; it gets the steps that fit the budget, and held-out images."""
    from ..runs.config import with_values
    from ..runs.model import load_images
    from ..runs.origin import adopt_weights
    from ..training.sizing import fit_held_out, held_out, lengthen_run

    config, given = adopt_weights(command.train, command.given, command.trust), command.given
    if "held_out" not in given:
        if not command.by_name:
            config = with_values(config, {"images.held_out": held_out(len(load_images(config, silent)[0]))})
        config = fit_held_out(config, say, " (--held-out says otherwise)")
    return lengthen_run(config, given, load_images(config, silent)[0])


def continued(command: Command, before: TrainConfig) -> TrainConfig:
    """A run that has begun is never sized again. Its folder says what was chosen, the flags what is to change."""
    from ..runs.config import field_paths, flatten, seconds_of, to_dict, with_values

    config, given, paths = command.train, command.given, field_paths()
    was, now = flatten(to_dict(before)), flatten(to_dict(config))
    if not command.by_name or before.start_from is not None:
        _require_trust_in_run(command, before)
        settings = config.optimizer
        dictionaries = {"optimizer_options": settings.optimizer_options, "decay_options": settings.decay_options}
        values = {paths[name]: dictionaries.get(name, now.get(paths[name])) for name in given - {"model_options"}}
        options = {**before.model_options, **config.model_options}
        config = dataclasses.replace(with_values(before, values), model_options=options)
    elif "held_out" not in given:
        config = with_values(config, {"images.held_out": before.images.held_out})
    if command.train.budget is None or "steps" in given or before.budget is None:
        return config
    # The same budget means the same steps, and another one as many more or less.
    chosen = ("checkpoints.save_every", "logging.log_every")
    config = with_values(config, {path: was[path] for path in chosen if path.split(".")[-1] not in given})
    factor = seconds_of(command.train.budget) / seconds_of(before.budget)
    return dataclasses.replace(config, steps=max(1, round(before.steps * factor)))


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

    def as_argparse(self) -> argparse.ArgumentParser:
        """The same flags as a parser of argparse, for the completion of shells."""
        made = argparse.ArgumentParser(prog="scalelong train")
        made.add_argument("images", nargs="?", help="a folder of images, a file or the name of a data set")
        for name, text in OWN.items():
            if name in ("recipe", "config", "out"):
                choices = names_in("runs.recipes", "RECIPES") if name == "recipe" else None
                made.add_argument(f"--{name}", choices=choices, help=text)
            else:
                made.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
        for flag in (flag for _, flags in config_flags() for flag in flags):
            spelling, text = f"--{flag.name.replace('_', '-')}", flag.text.replace("%", "%%")
            if not flag.kind:
                made.add_argument(spelling, action=argparse.BooleanOptionalAction, help=text)
                continue
            choices = flag.kind.strip("{}").split(",") if flag.kind.startswith("{") else None
            made.add_argument(spelling, choices=choices, help=text)
        return made


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
    kind = KINDS.get(annotation, KINDS.get(annotation.removesuffix(" | None")))
    if kind is None:
        optional = ["None"] if annotation.endswith(" | None") else []
        kind = "{" + ",".join([*optional, *_choices(annotation.removesuffix(" | None"))]) + "}"
    shown = default.strip("'\"") if "default_factory" not in default and annotation != "bool" else ""
    return name, kind, shown, text


def _choices(annotation: str) -> list[str]:
    """The values of a Literal, written out or by a name of runs.config or noise; "| None" may follow."""
    annotation = annotation.removesuffix(" | None")
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
    # "from" is a word of Python, and cannot be the name of a field.
    arguments = [re.sub(r"^--from(?=$|=)", "--start-from", argument) for argument in arguments]
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
    _require_trust(config, arguments, given)
    by_name = given.recipe is not None or given.config is not None
    return Command(config, given.out, given.dry_run, given.quiet, _given_fields(arguments), by_name, given.trust)


def _given_fields(arguments: list[str]) -> frozenset[str]:
    """The fields whose flags are on the command line, whatever their values: --lr, --lr=0.1, --no-flip."""
    from ..runs.config import field_paths

    flags = {argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--")}
    return frozenset(field_paths()) & (flags | {flag.removeprefix("no_") for flag in flags})


def _require_trust(config: TrainConfig, arguments: list[str], given: Any) -> None:
    """A model that the configuration file names, and not the user, needs consent if it is code."""
    from ..runs.model import require_trust, require_trusted_training

    def typed(flag: str) -> bool:
        return any(argument == flag or argument.startswith(f"{flag}=") for argument in arguments)

    if given.config is None:
        return
    if not typed("--model"):
        require_trust(config, given.config, given.trust)
    require_trusted_training(config, given.config, given.trust, [n for n in ("optimizer", "decay") if typed(f"--{n}")])


def _require_trust_in_run(command: Command, before: TrainConfig) -> None:
    """The same for code that the configuration of a run folder names, and the command does not."""
    from ..runs.model import require_trust, require_trusted_training

    source = command.out or "the run folder"
    if "model" not in command.given:
        require_trust(before, source, command.trust)
    require_trusted_training(before, source, command.trust, command.given)


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
            ("quiet", described("quiet", bool), False),
            ("trust", described("trust", bool), False),
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
    # An empty name is a mistake (a variable of the shell that is not set), not the default.
    base = TrainConfig() if known.recipe is None else recipe(known.recipe)
    return base if known.config is None else load_config(known.config, base)


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
        return name, parse_json(value)
    except ValueError:
        return name, value


def dry_run(command: Command) -> str:
    from ..runs.config import field_paths
    from ..runs.model import load_images
    from ..training.plan import describe_run
    from ..training.sizing import lengthen_run

    say = silent if command.quiet else log
    config, folder, plan = settle(command, say)
    data, _ = load_images(config, say)  # it tells which files were not read
    timed = plan or lengthen_run(config, field_paths(), data)
    parts = [str(plan)] if plan is not None and not command.by_name else []
    return "\n\n".join([*parts, describe_run(config, data, folder, seconds=timed.seconds)])
