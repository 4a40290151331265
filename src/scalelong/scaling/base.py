"""What a scaling method is: a frozen configuration, the module that it builds, and the registry of all methods.

Long skips are numbered as in the paper: i = 1 is the outermost (the earliest encoder feature, merged last),
i = N the innermost.
"""

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, require
from ..files import parse_json


@dataclass(frozen=True, kw_only=True)
class SkipSite:
    """What a method may know about one long skip of a model."""

    index: int
    """i, from 1 (outermost) to N (innermost)."""
    channels: int
    """Width of the skip along its channel axis."""
    channel_axis: int = 1
    """1 for (B, C, ...) features, -1 for tokens (B, L, C) and channels-last features."""
    main_channels: int | None = None
    """Width of the main path in a concatenation; None where skip and main path are added."""
    tokens: int | None = None
    """Length L of a token tensor (B, L, C); None for other features."""
    fixed_tokens: bool = False
    """Whether L can never change, so that a gate with one weight per token makes sense."""
    batch_axis: int | None = 0
    """The axis along which the images of a batch lie: 1 for tokens (L, B, C), None for features without a batch."""
    level: int | None = None
    """The resolution: 0 for the lowest of all skips, then 1; None for features without rows and columns."""
    norm: str = field(default="", compare=False)
    """The norm that reads the merge already, and where; empty if there is none."""


class Constants(NamedTuple):
    """Fixed multipliers of the two operands of a merge."""

    main: float
    skip: float


UNSCALED = Constants(1.0, 1.0)


class SkipScaling(nn.Module, ABC):
    """The scaling of all long skips of one model. Learnable methods keep their parameters here."""

    scales_merged = False
    """Whether the concatenation is changed as a whole (`scale_merged`), and not its operands."""

    def __init__(self, config: "Scaling", sites: Sequence[SkipSite]) -> None:
        super().__init__()
        self.config = config
        self.sites = tuple(sites)

    def constants(self, index: int) -> Constants | None:  # noqa: ARG002
        """The fixed multipliers of merge i, or None where they depend on the data."""
        return None

    @abstractmethod
    def scale(self, skip: Tensor, index: int) -> Tensor:
        """The skip as it enters merge i."""

    def gate(self, skip: Tensor, index: int) -> Tensor | None:  # noqa: ARG002
        """κ_i in a shape that broadcasts against the skip, for methods that multiply it by one; else None."""
        return None

    def scales_skip(self, index: int) -> bool:  # noqa: ARG002
        """Whether the skip is changed at merge i, where `constants` is None."""
        return True

    def scales_main(self, index: int) -> bool:  # noqa: ARG002
        """Whether the main path is changed at merge i by more than the factor of `constants`."""
        return False

    def scale_main(self, main: Tensor, index: int) -> Tensor:  # noqa: ARG002
        """The main path as it enters merge i."""
        return main

    def own_norms(self) -> dict[int, str]:
        """The merges that a norm of the network reads already, by i, where the method therefore does nothing."""
        return {}

    def scale_merged(self, merged: Tensor, index: int, skip_start: int) -> Tensor:
        """The concatenation of merge i, in which the channels of the skip begin at `skip_start`."""
        raise NotImplementedError

    def operands(self, main: Tensor, skip: Tensor, index: int) -> tuple[Tensor, Tensor, Constants, Tensor | None]:
        """The two operands of merge i, and what is left to multiply them by, as `prepare` says."""
        return self.scale_main(main, index), *self.prepare(skip, index)

    def prepare(self, skip: Tensor, index: int) -> tuple[Tensor, Constants, Tensor | None]:
        """The skip, and what is left for the merge to multiply it by: constants, and a gate that broadcasts against it.

        What the merge multiplies by need not be kept as another tensor of the skip's size.
        """
        constants = self.constants(index)
        if constants is not None:
            return skip, constants, None
        gate = self.gate(skip, index)
        return (self.scale(skip, index), UNSCALED, None) if gate is None else (skip, UNSCALED, gate)

    @abstractmethod
    def coefficient(self, index: int) -> Tensor | float:
        """κ_i of the most recent forward: a number, or a detached tensor that broadcasts against the skip."""

    def forward(self, x: Tensor) -> Tensor:
        # Identity, so that a host that runs all of its children in order (nn.Sequential) is not disturbed.
        return x

    def _apply(self, fn, recurse: bool = True):
        was_meta = _is_meta(self)
        super()._apply(fn, recurse)
        if was_meta and not _is_meta(self):
            # `to_empty` leaves memory as it finds it. A checkpoint of the plain host will not fill the gates.
            self.load_state_dict(self._start())
        return self

    def _start(self) -> dict[str, Tensor]:
        """The values that the parameters have at first."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return self.config.build(self.sites).state_dict()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # A checkpoint of the unscaled host knows nothing of the gates: they keep their values.
        if not any(key.startswith(prefix) for key in state_dict):
            values = self._start() if _is_meta(self) else self.state_dict()
            state_dict.update({prefix + key: value for key, value in values.items()})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


@dataclass(frozen=True)
class Scaling(ABC):
    """Base of all configurations. Subclasses are frozen dataclasses, made known with `@register_scaling`."""

    name: ClassVar[str]
    """The shorthand, as in `scale_skips_(model, "cs")`."""
    looks_at_data: ClassVar[bool] = True
    """Whether coefficients depend on the features, so that it matters which axis holds the batch."""
    unfoldable: ClassVar[str] = "its coefficients depend on the data"
    """Why a merge without constants cannot be folded into weights."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:  # noqa: B027, a method without options has nothing to check
        """Raise InvalidConfigError if a value is not allowed."""

    @abstractmethod
    def build(self, sites: Sequence[SkipSite]) -> SkipScaling:
        """The module that scales these skips (outermost first)."""

    def to_dict(self) -> dict[str, Any]:
        return {"method": self.name, **dataclasses.asdict(self)}

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


def require_number(name: str, value: Any, low: float, high: float, interval: str) -> None:
    """Check that a value is a number of the half-open interval (low, high]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(
        number and low < value <= min(high, sys.float_info.max), f"{name} must be a number in {interval}, got {value!r}"
    )


def require_kappa(value: Any, name: str = "kappa") -> None:
    require_number(name, value, 0.0, 1.0, "(0, 1]")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    require(value in choices, f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


# From a name to a method: "cs", "cs:0.6", "ls:module=ie,shared=false", or a dictionary as in JSON.

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
    if isinstance(spec, str):
        name, _, arguments = spec.partition(":")
        method = _method(name.strip())
        values = _parse_arguments(method, arguments) if arguments else {}
    elif isinstance(spec, dict):
        values = dict(spec)
        if "method" not in values:
            raise InvalidConfigError(
                f"a scaling as a dictionary needs the key 'method', got {sorted(map(str, values))}"
            )
        method = _method(values.pop("method"))
    elif spec is None:
        method, values = _method("none"), {}
    else:
        raise InvalidConfigError(
            f"a scaling must be a configuration, a string or a dictionary, got {type(spec).__name__}"
        )
    _require_fields(method, values)
    return method(**values)


def _method(name: Any) -> type[Scaling]:
    key = name.lower() if isinstance(name, str) and name not in METHODS else name  # the paper writes CS and LS
    if not isinstance(key, str) or key not in METHODS:
        raise InvalidConfigError(f"unknown scaling method {name!r}; known: {', '.join(sorted(METHODS))}")
    return METHODS[key]


def _require_fields(method: type[Scaling], values: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(method)]
    unknown = sorted(set(values) - set(known), key=str)
    if unknown:
        allowed = ", ".join(known) or "nothing"
        raise InvalidConfigError(f"{method.name!r} has no option {', '.join(map(str, unknown))}; known: {allowed}")
    needed = [f.name for f in dataclasses.fields(method) if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise InvalidConfigError(
            f"the scaling {method.name!r} needs {', '.join(missing)}: write for example '{method.name}:0.9,0.8' with a "
            f"value for each long skip"
        )


def _parse_arguments(method: type[Scaling], text: str) -> dict[str, Any]:
    """ "0.6" sets the first field, "0.9,0.8" sets it to several values, "a=1,b=x" sets fields by name."""
    fields = [field.name for field in dataclasses.fields(method)]
    parts = [part.strip() for part in text.split(",")]
    first = [_value(part) for part in parts if "=" not in part]
    named = {name.strip(): _value(value) for name, found, value in (part.partition("=") for part in parts) if found}
    if not first:
        return named
    if not fields:
        raise InvalidConfigError(f"{method.name!r} takes no value, got {text!r}: leave it out")
    if fields[0] in named or any("=" in part for part in parts[: len(first)]):
        raise InvalidConfigError(
            f"{text!r} gives {method.name!r} a value after or besides {fields[0]}=: write the value first, then "
            f"options by name, as in '{method.name}:0.6,{fields[-1]}=...'"
        )
    return {fields[0]: first[0] if len(first) == 1 else tuple(first), **named}


def _value(text: str) -> Any:
    text = text.strip()
    try:
        return parse_json(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
