"""Variants of a comparison that differ in more than the scaling: "fast: scaling=cs:0.7 lr=2e-3"."""

import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..errors import InvalidConfigError
from ..runs.config import TrainConfig, from_dict, to_dict
from ..scaling import as_scaling

OPTIONS = "model_options"


@dataclass(frozen=True)
class Variant:
    """A name, and the fields of the configuration that it changes, by dotted name: {"optimizer.lr": 0.002}."""

    name: str
    changes: dict[str, Any]

    def apply(self, config: TrainConfig) -> TrainConfig:
        values = to_dict(config)
        for path, value in self.changes.items():
            group = values
            *parents, name = path.split(".")
            for parent in parents:
                group = group[parent]
            group[name] = value
        return from_dict(values)


def as_variant(given: Variant | str) -> Variant:
    """A variant from itself, from a method of scaling, or from a text such as "fast: scaling=cs lr=2e-3"."""
    if isinstance(given, Variant):
        return given
    name, colon, changes = given.partition(": ")
    if not colon:
        as_scaling(given)
        return Variant(given, {"scaling": given})
    return Variant(name.strip(), dict(_change(part, given) for part in changes.split()))


def _change(text: str, variant: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidConfigError(f"a variant looks like 'fast: scaling=cs:0.7 lr=2e-3', got {text!r} in {variant!r}")
    path = _path(name)
    if path == "scaling":
        return path, value
    try:
        return path, json.loads(value)
    except json.JSONDecodeError:
        return path, value


def _path(name: str) -> str:
    """Fields have names of their own in all groups, so that the group may be left out."""
    base = TrainConfig()
    known = {field.name: field.name for field in fields(base)}
    for group in [field.name for field in fields(base) if is_dataclass(getattr(base, field.name))]:
        known |= {field.name: f"{group}.{field.name}" for field in fields(getattr(base, group))}
    if name in known.values() or name.startswith(f"{OPTIONS}."):
        return name
    if name not in known:
        raise InvalidConfigError(
            f"a variant cannot change {name!r}: it is not a field of the configuration. Options of the model are "
            f"written {OPTIONS}.{name}; fields are {', '.join(known)}"
        )
    return known[name]
