"""A configuration as YAML, and what changed between two of them."""

import dataclasses
import types
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import InvalidConfigError, MissingDependencyError
from .config import TrainConfig

HARMLESS = (
    "steps",
    "images.workers",
    "hardware.accumulation",
    "hardware.compile",
    "hardware.gradient_checkpointing",
    "hardware.cpu",
    "hardware.split_cores",
    "checkpoints.",
    "logging.",
    "guard.",
)
"""Fields that may change while a run goes on: the mathematics of the steps already done stays the same."""


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


def load_config(path: str | PathLike[str], base: TrainConfig | None = None) -> TrainConfig:
    """Read a YAML file, for example the `config.yaml` of a run folder."""
    yaml = _yaml()
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidConfigError(f"there is no configuration file {path}") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InvalidConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise InvalidConfigError(f"{path} must hold fields such as 'steps: 1000', got {type(values).__name__}")
    try:
        return from_dict(values, base)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{path}: {error}") from error


def dump_config(config: TrainConfig) -> str:
    return _yaml().safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, by dotted name: {"optimizer.lr": (0.1, 0.2)}."""
    old, new = flatten(to_dict(before)), flatten(to_dict(after))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def harmful_differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The differences that would make the run another run."""
    changed = differences(before, after)
    # A decay that ends with the run makes the rate of every step depend on the number of steps.
    tied = after.optimizer.decay != "constant" and after.optimizer.decay_steps is None
    return {name: pair for name, pair in changed.items() if not name.startswith(HARMLESS) or (name == "steps" and tied)}


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
    """The value as the type that the field asks for; YAML knows no tuples and reads 1e-4 as a string."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        (inner,) = (option for option in options if option is not type(None))
        return _convert(value, inner, name)
    if origin is Literal:
        if value is False and "no" in options:  # YAML reads a bare `no` as false
            value = "no"
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
    wanted = " or ".join(map(repr, options)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise InvalidConfigError(f"{name} must be {wanted}, got {value!r}")


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("pyyaml", "train", "reading and writing configurations") from error
    return yaml
