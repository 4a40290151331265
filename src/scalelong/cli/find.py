"""Find the long skip connections of a model and say how each can be scaled.

MODEL is one of
  package.module:Class   a class or function that builds the model; --config gives its keyword arguments
  folder                 a folder written by diffusers' save_pretrained (its config.json; the weights are not read)
  file.py[:Name]         a Python file with a function model(), or Name, and optionally example_inputs()

The model is built and run on the meta device: no weights, no memory. --real builds it as it is.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CannotReadError, ExampleInputsError, InvalidConfigError
from ..files import parse_json, read_text
from ..optional import load_object, needs
from . import shared
from .parser import Parser

EXAMPLES = """\
  scalelong find diffusers:UNet2DModel --config '{"sample_size": 32}'
  scalelong find mynets.unet:UNet --input 1,3,64,64 --input 1:long
  scalelong find my_unet.py --out plan.json
"""


def find_parser() -> Parser:
    made = Parser("find", __doc__ or "", EXAMPLES, "MODEL [OPTIONS]")
    made.flag("model", "module:Class, a save_pretrained folder, or a Python file with model()")
    made.flag("--config", "keyword arguments of the class, as JSON or a JSON file")
    made.flag("--input", "its shape: 1,3,64,64 or 1:long; once for each input", action="append", metavar="SHAPE")
    made.flag("--include", "only long skips that match", action="append", metavar="PATTERN")
    made.flag("--exclude", "no long skips that match", action="append", metavar="PATTERN")
    made.flag("--out", "also write the plan to this file, as JSON", kind=Path, metavar="FILE")
    made.flag("--real", "build the model with real weights instead of on meta", False)
    shared.add_output_flags(made, "the plan")
    made.set_defaults(out_is_file=True)
    return made


def run_find(options: argparse.Namespace) -> None:
    import torch

    from ..finding import find_skips

    with torch.device("cpu" if options.real else "meta"):
        model, inputs = load_model(options.model, json_object(options.config))
        if options.input:
            inputs = tuple(_tensor(text) for text in options.input)
    try:
        plan = find_skips(model, inputs, include=options.include, exclude=options.exclude)
    except ExampleInputsError as error:
        raise ExampleInputsError(
            f"{error}. On the command line: --input 1,3,64,64 --input 1:long, once for each input, or a function "
            f"example_inputs() in file.py"
        ) from error
    print(plan.to_json() if options.json else plan)
    if options.out:
        plan.save(options.out)


# A model that the user names


def load_model(spec: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and its example inputs if it has any."""
    if Path(spec).is_dir():
        factory, module = _factory_of_folder(Path(spec), config), None
    else:
        factory, module = load_factory(spec)
    inputs = getattr(module, "example_inputs", None)
    return build(factory, spec, **config), inputs() if callable(inputs) else inputs


def load_factory(spec: str, other: str = "a folder") -> tuple[Callable[..., Any], Any]:
    """The class or function that "module:Class" or "file.py:Name" names, and the module of a file."""
    file, colon, name = spec.partition(":")
    if file.endswith(".py"):
        module = _module_of(Path(file))
        factory = getattr(module, name or "model", None)
    elif colon:
        sys.path.insert(0, "")
        module, factory = None, load_object(spec, "model")
    else:
        raise InvalidConfigError(
            f"{spec!r} is neither {other}, nor a Python file, nor of the form module:Class: give one of these"
        )
    if not callable(factory):
        raise InvalidConfigError(f"{spec} has no class or function {name or 'model'}(...) that builds the model")
    return factory, module


def _factory_of_folder(folder: Path, changes: dict[str, Any]) -> Callable[..., Any]:
    """The class that config.json names, from diffusers. Nothing is executed but that class."""
    from ..models import require_buildable

    file = folder / "config.json"
    if not file.is_file():
        raise InvalidConfigError(
            f"{folder} has no config.json, so it was not written by save_pretrained: give a folder that was"
        )
    config = {**json_object(str(file)), **changes}
    name = config.get("_class_name")
    cls: Any = getattr(needs("diffusers", "train", f"reading {folder}"), str(name), None)
    if not isinstance(cls, type) or not hasattr(cls, "from_config") or not hasattr(cls, "forward"):
        raise InvalidConfigError(f"diffusers has no network {name!r}, which {file} asks for: correct its '_class_name'")
    require_buildable(config, str(file))
    return lambda **_: cls.from_config(config)


def _module_of(path: Path) -> Any:
    """The module of a Python file. Its code is run."""
    if not path.is_file():
        raise InvalidConfigError(f"there is no file {path}: check the path")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As for `python file.py`: its neighbours can be imported, and its source is found.
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module
    build(lambda: spec.loader.exec_module(module), str(path))  # pyright: ignore[reportOptionalMemberAccess]
    return module


def build(factory: Callable[..., Any], name: str, *arguments: Any, **config: Any) -> Any:
    """Call the user's own code, which may fail in any way."""
    try:
        return factory(*arguments, **config)
    except InvalidConfigError:
        raise
    except Exception as error:
        raised = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        given = ", ".join([*map(str, arguments), *(f"{key}={value!r}" for key, value in config.items())])
        raise InvalidConfigError(
            f"{name} cannot be run with {given or 'no arguments'}, its code raises {raised}: change it or `config`"
        ) from error


def json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = parse_json(text if text.lstrip().startswith("{") else read_text(text))
    except CannotReadError as error:
        raise InvalidConfigError(
            f"{text!r} is not a JSON object such as '{{\"sample_size\": 32}}', and {error}"
        ) from error
    except ValueError as error:
        raise InvalidConfigError(f"{text[:200]!r} is not valid JSON ({error}): correct it") from error
    if not isinstance(values, dict):
        raise InvalidConfigError(f"a configuration must be a JSON object, got {str(values)[:100]}")
    return values


def _tensor(text: str) -> Any:
    import torch

    shape, _, kind = text.partition(":")
    dtype = {"": torch.float32, "float": torch.float32, "long": torch.int64, "int": torch.int64}.get(kind)
    try:
        sizes = [int(size) for size in shape.split(",")]
    except ValueError:
        sizes = [0]
    if dtype is None or min(sizes) < 1 or math.prod(sizes) > 2**40:
        raise InvalidConfigError(
            f"--input takes a shape of sizes above 0 that fit into memory, such as 1,3,64,64 or 1:long, "
            f"got {text[:100]!r}"
        )
    return torch.zeros(sizes, dtype=dtype)
