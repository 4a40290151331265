"""From a name to a method: "cs", "cs:0.6", "ls:module=ie,shared=false", or a dictionary as in JSON."""

import dataclasses
import json
from typing import Any, TypeVar

from ..errors import InvalidConfigError
from .base import Scaling

METHODS: dict[str, type[Scaling]] = {}

Method = TypeVar("Method", bound=type[Scaling])


def register_scaling(method: Method) -> Method:
    """Class decorator that makes a method known by its `name`. A taken name raises."""
    name = getattr(method, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidConfigError(f"{method.__name__}.name must be an identifier, got {name!r}")
    if name in METHODS and METHODS[name].__qualname__ != method.__qualname__:
        raise InvalidConfigError(f"the scaling method {name!r} is {METHODS[name].__qualname__} already")
    METHODS[name] = method
    return method


def as_scaling(spec: "Scaling | str | dict[str, Any] | None") -> Scaling:
    """A configuration from a configuration, a shorthand, a dictionary (`Scaling.to_dict`) or None (no scaling)."""
    if isinstance(spec, Scaling):
        return spec
    if spec is None:
        return _method("none")()
    if isinstance(spec, str):
        name, _, arguments = spec.partition(":")
        method = _method(name.strip())
        return method(**_parse_arguments(method, arguments)) if arguments else method()
    if isinstance(spec, dict):
        values = dict(spec)
        if "method" not in values:
            raise InvalidConfigError(f"a scaling as a dictionary needs the key 'method', got {sorted(values)}")
        method = _method(values.pop("method"))
        _require_fields(method, values)
        return method(**values)
    raise InvalidConfigError(f"a scaling is a configuration, a string or a dictionary, got {type(spec).__name__}")


def _method(name: str) -> type[Scaling]:
    if name not in METHODS:
        raise InvalidConfigError(f"unknown scaling method {name!r}; known: {', '.join(sorted(METHODS))}")
    return METHODS[name]


def _require_fields(method: type[Scaling], values: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(method)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        allowed = ", ".join(known) or "nothing"
        raise InvalidConfigError(f"{method.name!r} has no option {', '.join(unknown)}; it takes {allowed}")


def _parse_arguments(method: type[Scaling], text: str) -> dict[str, Any]:
    """ "0.6" sets the first field, "a=1,b=x" sets fields by name."""
    fields = [field.name for field in dataclasses.fields(method)]
    if "=" not in text:
        if not fields:
            raise InvalidConfigError(f"{method.name!r} takes no value, got {text!r}")
        parts = [_value(part) for part in text.split(",")]
        return {fields[0]: parts[0] if len(parts) == 1 else tuple(parts)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        values[name.strip()] = _value(value)
    _require_fields(method, values)
    return values


def _value(text: str) -> Any:
    text = text.strip()
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text
