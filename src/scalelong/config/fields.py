"""A configuration as dictionaries and YAML, and what changed between two configurations."""

import dataclasses
import logging
import types
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import CannotReadError, InvalidConfigError
from ..files import read_fields
from ..optional import needs
from .train import TrainConfig

logger = logging.getLogger(__name__)

NUMBERS_TOO = ("optimizer.output_start",)
"""Texts that may be a number, which YAML reads as one."""


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of plain values; tuples become lists, as in YAML."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def from_dict(values: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """A configuration from nested dictionaries. What is left out keeps the values of `base`."""
    return _update(TrainConfig() if base is None else base, values, "")


def with_values(config: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    """The configuration with these values, by dotted name: {"optimizer.lr": 0.1}."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    return from_dict(nested, config)


def load_config(path: str | PathLike[str], base: TrainConfig | None = None) -> TrainConfig:
    """Read a YAML file, for example the `config.yaml` of a run folder."""
    if not str(path) or not Path(path).exists():
        raise InvalidConfigError(f"there is no configuration file {str(path)!r}: give the path of a YAML file")
    try:
        values = read_fields(path)
    except CannotReadError as error:
        raise InvalidConfigError(str(error)) from error
    try:
        config = from_dict(values, base)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{path}: {error}") from error
    if config.images.image_cache in ("auto", "none"):
        return config
    # The file may be a stranger's, and would have its reader write wherever it says.
    logger.warning("%s: a folder for `image_cache` counts only where you give it yourself; auto is taken", path)
    return with_values(config, {"images.image_cache": "auto"})


def dump_config(config: TrainConfig) -> str:
    """The configuration as YAML."""
    yaml = needs("yaml", "train", "reading and writing configurations")
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# The fields and their metadata


def config_fields() -> dict[str, dataclasses.Field[Any]]:
    """Every field of a configuration by its dotted name; groups themselves are left out."""

    def walk(kind: Any, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
        for entry in dataclasses.fields(kind):
            if dataclasses.is_dataclass(entry.default_factory):
                yield from walk(entry.default_factory, f"{prefix}{entry.name}.")
            else:
                yield f"{prefix}{entry.name}", entry

    return dict(walk(TrainConfig, ""))


def field_paths() -> dict[str, str]:
    """The dotted name of every field: {"lr": "optimizer.lr", "steps": "steps", ...}."""
    return {path.rpartition(".")[2]: path for path in config_fields()}


def _field_of(name: str) -> str:
    """The field of a flat name: "model_options.depth" is an entry of model_options."""
    fields = config_fields()
    return next(path for path in fields if name == path or name.startswith(f"{path}."))


def result_values(config: TrainConfig) -> dict[str, Any]:
    """The values that the trained weights depend on, by dotted name."""
    fields = config_fields()
    values = flatten(to_dict(config))
    return {name: value for name, value in values.items() if fields[_field_of(name)].metadata["affects"] == "result"}


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, by dotted name: {"optimizer.lr": (0.1, 0.2)}."""
    return _differing(flatten(to_dict(before)), flatten(to_dict(after)))


def conflicting_changes(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The differences with which a run cannot go on: it would be a different run."""
    changed = _differing(result_values(before), result_values(after))
    # A decay that ends with the run makes the rate of every step depend on the number of steps.
    ends = after.optimizer.decay not in ("constant", "piecewise_constant") and ":" not in after.optimizer.decay
    if not ends or after.optimizer.decay_steps is not None:
        changed.pop("steps", None)
    return changed


def _differing(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


# From plain values to the types of the fields


def _update(base: Any, values: dict[str, Any], prefix: str) -> Any:
    hints = get_type_hints(type(base))
    unknown = sorted(set(map(str, values)) - set(hints))
    if unknown:
        where = f" in {prefix[:-1]}" if prefix else ""
        raise InvalidConfigError(f"unknown field {', '.join(unknown)}{where}; known: {', '.join(hints)}")
    changes = {}
    for name, value in values.items():
        current = getattr(base, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise InvalidConfigError(f"{prefix}{name} must be a group of fields, got {value!r}")
            changes[name] = _update(current, value, f"{prefix}{name}.")
        else:
            changes[name] = _convert(value, hints[name], f"{prefix}{name}")
    return dataclasses.replace(base, **changes)


def _convert(value: Any, hint: Any, name: str) -> Any:
    """The value as the type of its field; YAML knows no tuples and reads 1e-4 as a string."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        (inner,) = (option for option in options if option is not type(None))
        return _convert(value, inner, name)
    if origin is Literal:
        if name == "hardware.precision" and value in (False, "no"):  # YAML reads a bare `no` as false
            value = "fp32"
        if value in options:
            return value
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [options[0]] * len(value) if options[-1] is ... else list(options)
        if len(kinds) == len(value):
            return tuple(_convert(entry, kind, name) for entry, kind in zip(value, kinds, strict=True))
    elif origin is dict and isinstance(value, dict):
        return {str(key): entry for key, entry in value.items()}
    elif hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    elif name in NUMBERS_TOO and isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    wanted = " or ".join(map(repr, options)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise InvalidConfigError(f"{name} must be {wanted}, got {value!r}")
