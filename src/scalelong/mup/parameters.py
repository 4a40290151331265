"""What each parameter of a network is to μP: input, hidden, output, vector or finite.

μP (Yang et al., 2022) asks of each parameter which of its dimensions grow with the width. Here that is found by
comparing the network with a base: the same network at the width where it was tuned, on the meta device, so that it
costs no memory. Shapes alone do not tell: a class embedding (K, n) has the shape of an output layer, and a square
matrix does not say which side is its input. So the module that owns a parameter says how it is read.

    input    fixed fan-in, growing fan-out: patch embedding, positions, classes, text    rate × 1      decay × 1
    hidden   both grow                                                                   rate × 1/m    decay × m
    output   growing fan-in, fixed fan-out                                               rate × 1/m    decay × m
    vector   one growing dimension: norms, biases                                        rate × 1      decay × 1
    finite   nothing grows                                                               rate × 1      decay × 1

m is the fan-in divided by that of the base. What is not clear raises UnclearParameterError and can be named:

    sl.mup.kinds(model, base=64)                                    # our U-ViT, diffusers' UNets
    sl.mup.kinds(model, base=lambda: Net(width=64), kinds={"*.mixer": "hidden"})
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import nn

from ..attaching import KEY, scaled_host_of
from ..console import text_table
from ..errors import InvalidConfigError, ScaleLongError, UnclearParameterError
from ..models import PositionEmbedding, SkipMerge, UViT
from ..scaling import GateLayer

KindName = Literal["input", "hidden", "output", "vector", "finite"]
Base = int | nn.Module | Callable[[], nn.Module]
"""A width, a network of that width, or a function that builds one."""


@dataclass(frozen=True)
class Kind:
    """What a parameter is, and m: its fan-in divided by that of the base (1 where the fan-in does not grow)."""

    kind: KindName
    m: float = 1.0
    shape: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(KindName):
            raise InvalidConfigError(f"a kind is one of {', '.join(get_args(KindName))}, got {self.kind!r}")
        if not self.m > 0:
            raise InvalidConfigError(f"m of a kind must be above 0, got {self.m}")

    @property
    def scaled(self) -> bool:
        return self.kind in ("hidden", "output")

    @property
    def rate(self) -> float:
        """Times the learning rate."""
        return 1 / self.m if self.scaled else 1.0

    @property
    def decay(self) -> float:
        """Times the weight decay: AdamW shrinks by rate × decay a step, which stays as it is in the base."""
        return self.m if self.scaled else 1.0


Given = Mapping[str, KindName | Kind]
"""Kinds by pattern of names, such as {"*.mixer": "hidden"}."""


class Kinds(dict[str, Kind]):
    """The kind of every parameter, by name. Print it."""

    def counts(self) -> dict[str, int]:
        return {name: sum(kind.kind == name for kind in self.values()) for name in get_args(KindName)}

    def of(self, kind: KindName) -> list[str]:
        return [name for name, each in self.items() if each.kind == kind]

    def rows(self) -> list[dict[str, str]]:
        """A row for all parameters that differ in the number of their block alone."""
        rows: dict[tuple[str, Kind], dict[str, str]] = {}
        for name, kind in self.items():
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            row = rows.setdefault((pattern, kind), {"parameters": pattern, "count": "0"})
            row["count"] = str(int(row["count"]) + 1)
            row |= {"shape": "×".join(map(str, kind.shape)) or "1", "kind": kind.kind}
            row |= {"m": f"{kind.m:g}", "× rate": f"{kind.rate:g}", "× decay": f"{kind.decay:g}"}
        return list(rows.values())

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {name}" for name, count in self.counts().items())
        return f"{text_table(self.rows())}\n{counted}"


def kinds(
    model: nn.Module,
    base: Base,
    *,
    kinds: Given | None = None,
    delta: nn.Module | None = None,
) -> Kinds:
    """The kind of every parameter of the model, by comparing its shapes with those of the base.

    `base` is a width (our U-ViT and diffusers' UNets are rebuilt at it, with the size of an attention head held), a
    model of the base width, or a function that builds one (on the meta device).
    `kinds` names what is not clear, or wrong: {"pattern of names": "hidden"}.
    `delta` is a model of another width. It is needed where the model has the base's own width, since nothing grows
    there; for a width as base it is built.
    """
    given = {} if kinds is None else dict(kinds)
    host = bare(model)
    base_model, mine = _base(host, base), _shapes(host)
    base_shapes = _with_attached(host, mine, _shapes(base_model))
    _require_same_names(mine, base_shapes, host)
    if mine == base_shapes:
        other = delta if delta is not None else (_rebuilt(host, 2 * base) if isinstance(base, int) else None)
        if other is None:
            return Kinds(_decide(host, mine, mine, given))
        found = _decide(host, mine, _with_attached(host, mine, _shapes(bare(other))), given)
        return Kinds({name: replace(kind, m=1.0) for name, kind in found.items()})
    _require_held_heads(host, base_model)
    return Kinds(_decide(host, mine, base_shapes, given))


# The base


def bare(model: nn.Module) -> nn.Module:
    """The model without the wrappers of torch.compile and DDP, which prefix the names of its parameters."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def width_of(model: nn.Module) -> int | None:
    """The width of a network of a known family: U-ViT's dim, the first of diffusers' block_out_channels."""
    host = bare(model)
    if isinstance(host, UViT):
        return host.dim
    channels = getattr(getattr(host, "config", None), "block_out_channels", None)
    return int(channels[0]) if isinstance(channels, tuple | list) and channels and _is_diffusers(host) else None


def _base(model: nn.Module, base: Base) -> nn.Module:
    if isinstance(base, bool) or (isinstance(base, int) and base < 1):
        raise InvalidConfigError(f"base must be a width of at least 1, got {base!r}")
    if isinstance(base, int):
        base = _rebuilt(model, base)
    elif callable(base) and not isinstance(base, nn.Module):
        with torch.device("meta"):
            base = base()
    if isinstance(base, nn.Module):
        return bare(base)
    raise InvalidConfigError(f"base must be a width, a model or a function that builds one, got {type(base).__name__}")


def _rebuilt(model: nn.Module, width: int) -> nn.Module:
    """The same network at another width, on the meta device, with the size of its heads held."""
    try:
        with torch.device("meta"):
            if isinstance(model, UViT):
                return type(model)(**uvit_at(model.arguments(), width))
            if width_of(model) is not None:
                config: Any = model.config
                # Without what `scale_skips_` writes into it: gates of the base follow from the sites of the skips.
                values = {k: v for k, v in dict(config).items() if not k.startswith("_") and k != KEY}
                with_width = unet_at(type(model).__name__, values, width)
                return type(model)(**with_width)
    except ScaleLongError:
        raise
    except Exception as error:
        raise InvalidConfigError(
            f"a {type(model).__name__} cannot be built at the base width {width} ({type(error).__name__}: {error}): "
            f"choose another, or pass a model as base"
        ) from error
    raise InvalidConfigError(
        f"a {type(model).__name__} cannot be rebuilt at width {width} by itself, only U-ViT and diffusers' UNets can: "
        f"pass as base a model of that width, or a function that builds one"
    )


def uvit_at(arguments: Mapping[str, Any], width: int) -> dict[str, Any]:
    """U-ViT's arguments at another width: the number of heads changes, their size stays."""
    size = arguments["dim"] // arguments["heads"]
    if width % size:
        raise InvalidConfigError(
            f"a width of {width} is no multiple of the head size {size} (dim {arguments['dim']} / heads "
            f"{arguments['heads']}), which μP holds: choose another width, or another number of heads"
        )
    return {**arguments, "dim": width, "heads": width // size}


_HEAD_COUNTS = ("attention_head_dim", "num_attention_heads")


def unet_at(kind: str, values: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The configuration of a UNet of diffusers at another width, which is the first of its block_out_channels.

    Only UNet2DModel means a size by `attention_head_dim`. In the other classes it is the *number* of heads.
    """
    channels = list(values["block_out_channels"])
    ratio = Fraction(width, channels[0])

    def times(value: Any, name: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(times(each, name) for each in value)
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if (value * ratio).denominator != 1 or value * ratio < 1:
            raise InvalidConfigError(
                f"{name} {value} cannot be scaled to width {width} (of {channels[0]}): it would be "
                f"{float(value * ratio):g}. Choose a width at which all levels and heads are whole numbers"
            )
        return int(value * ratio)

    made = {**values, "block_out_channels": times(tuple(channels), "block_out_channels")}
    if kind != "UNet2DModel":
        made |= {name: times(values[name], name) for name in _HEAD_COUNTS if values.get(name) is not None}
    return made


WIDTHS = ("dim", "width", "hidden_size", "embed_dim", "model_channels", "base_channels")
COUNTS = ("heads", "num_heads", "num_attention_heads")
"""Names under which networks take their width and their number of heads."""


def width_options(factory: Callable[..., Any], options: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The arguments of anyone's factory at another width: heads keep their size where there are any."""
    if "block_out_channels" in options:
        return unet_at(getattr(factory, "__name__", ""), options, width)
    parameters = inspect.signature(factory).parameters
    known = {name: each.default for name, each in parameters.items() if _is_count(each.default)} | dict(options)
    named = next((name for name in WIDTHS if _is_count(known.get(name))), None)
    if named is None:
        what = getattr(factory, "__name__", str(factory))
        raise InvalidConfigError(
            f"the width of {what} is not known: give it among its options as one of {', '.join(WIDTHS)} or "
            f"block_out_channels"
        )
    heads = next((name for name in COUNTS if _is_count(known.get(name))), None)
    if heads is None:
        return {**options, named: width}
    return {**options, named: width, heads: uvit_at({"dim": known[named], "heads": known[heads]}, width)["heads"]}


def _is_diffusers(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("diffusers.") for kind in type(model).__mro__)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}


def _with_attached(
    model: nn.Module, mine: dict[str, tuple[int, ...]], base: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The base with the gates that `scale_skips_` has put on the model: built for the skips of the base's width."""
    missing = [name for name in mine if name not in base]
    prefix = "skip_scaling."
    if not missing or not all(name.startswith(prefix) for name in missing):
        return base
    host = scaled_host_of(model)
    scaling = host.scaling if host.is_scaled else None
    ratios = {r for name in mine if name in base for r in _ratios(mine[name], base[name]) if r != 1}
    if scaling is None or len(ratios) > 1:
        return base
    ratio = ratios.pop() if ratios else Fraction(1)

    def narrow(channels: int | None) -> int | None:
        return None if channels is None else max(1, int(channels / ratio))

    sites = [
        replace(site, channels=max(1, int(site.channels / ratio)), main_channels=narrow(site.main_channels))
        for site in scaling.sites
    ]
    with torch.device("meta"):
        built = copy.deepcopy(scaling.config).build(sites)
    return {**base, **{f"{prefix}{name}": tuple(value.shape) for name, value in built.named_parameters()}}


def _require_same_names(mine: Mapping[str, Any], base: Mapping[str, Any], model: nn.Module) -> None:
    for ours, theirs, where in ((mine, base, "the base"), (base, mine, "the model")):
        missing = [name for name in ours if name not in theirs]
        if missing:
            shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
            raise InvalidConfigError(
                f"{where} has no parameter {shown}: the base must be the same {type(model).__name__} at another width. "
                f"Give both the same depth and options, and scale the long skips of both"
            )


# What a parameter is


@dataclass(frozen=True)
class _Unclear:
    reason: str


def _ratios(shape: tuple[int, ...], base: tuple[int, ...]) -> list[Fraction]:
    """How much each dimension has grown; a tensor with other dimensions has none."""
    if len(shape) != len(base):
        return []
    return [Fraction(size, before) if before else Fraction(1) for size, before in zip(shape, base, strict=True)]


def _decide(
    model: nn.Module, mine: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]], given: dict[str, Any]
) -> dict[str, Kind]:
    unused = [pattern for pattern in given if not any(fnmatchcase(name, pattern) for name in mine)]
    if unused:
        raise InvalidConfigError(f"kinds names {', '.join(unused)}, which no parameter of the model is called")
    widths = _widths(model, mine, theirs)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names_of: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names_of.setdefault(id(parameter), []).append(name)
    found: dict[str, Kind] = {}
    unclear: list[str] = []
    for names in names_of.values():
        named = [value for name in names for pattern, value in given.items() if fnmatchcase(name, pattern)]
        # A parameter that is tied has several names, and may be something else by each.
        each = {name: _classify(model, name, mine[name], theirs[name], widths) for name in names}
        if named:
            each = {names[0]: _as_named(named[-1], model, names[0], mine, theirs)}
        reasons = [f"{name} {mine[name]}: {kind.reason}" for name, kind in each.items() if isinstance(kind, _Unclear)]
        kinds = {kind: name for name, kind in each.items() if isinstance(kind, Kind)}
        if len(kinds) > 1:
            tied = " and ".join(f"{kind.kind} as {name}" for kind, name in kinds.items())
            reasons.append(f"{names[0]} {mine[names[0]]}: it is tied, {tied}")
        if not reasons:
            found[names[0]] = replace(*kinds, shape=mine[names[0]])
        unclear += reasons
    if unclear:
        shown = "; ".join(unclear[:8]) + (f"; and {len(unclear) - 8} more" if len(unclear) > 8 else "")
        raise UnclearParameterError(
            f"what these parameters are to μP is not clear: {shown}. Name them, "
            f'kinds={{"{unclear[0].partition(" ")[0]}": "hidden"}} (input, hidden, output, vector or finite)'
        )
    return {name: found[name] for name in parameters if name in found}


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that reads a parameter, and the name that it has there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def layer_sides(model: nn.Module, name: str) -> tuple[int, int] | None:
    """(outputs, inputs) of the weight of a layer that multiplies its features by one matrix.

    None for all else: gates, grouped convolutions, parameters of unknown modules.
    """
    module, leaf = _owner(model, name)
    axes, shape = _axes(module, leaf), model.get_parameter(name).shape
    grouped = getattr(module, "groups", 1) > 1
    if axes is None or grouped or isinstance(module, GateLayer) or len(shape) < 2:
        return None
    return shape[axes[0]], shape[axes[1]]


def _axes(module: nn.Module, leaf: str) -> tuple[int, int] | None:
    """(fan-out axis, fan-in axis) of a weight; None if the module is not known to be a matrix product."""
    if not leaf.startswith(("weight", "in_proj_weight", "q_proj", "k_proj", "v_proj")):
        return None
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return 1, 0
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers: x W, not x Wᵀ
        return 1, 0
    plain = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
    return (0, 1) if isinstance(module, (*plain, SkipMerge, GateLayer)) else None


def _widths(model: nn.Module, mine: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> set[Fraction]:
    """The ratios by which features grow: those of all outputs of layers."""
    found: set[Fraction] = set()
    for name, shape in mine.items():
        ratios = _ratios(shape, theirs[name])
        module, leaf = _owner(model, name)
        axes = _axes(module, leaf)
        if len(ratios) == 1:
            found.add(ratios[0])
        elif axes is not None and len(ratios) > 1:
            found.add(ratios[axes[0]])
        elif ratios:
            found.add(ratios[-1])
    return found - {Fraction(1)}


def _classify(
    model: nn.Module, name: str, shape: tuple[int, ...], before: tuple[int, ...], widths: set[Fraction]
) -> Kind | _Unclear:
    ratios = _ratios(shape, before)
    if len(shape) != len(before):
        return _Unclear(f"it has {len(shape)} dimensions, and {len(before)} in the base")
    growing = [axis for axis, ratio in enumerate(ratios) if ratio != 1]
    module, leaf = _owner(model, name)
    if not growing:
        return Kind("finite")
    if ".parametrizations." in f".{name}":
        return _Unclear("it is parametrised, and how its updates reach the weight is not known")
    if _is_norm(module) or len(shape) == 1:
        return Kind("vector")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | PositionEmbedding):
        if growing != [len(shape) - 1]:
            return _Unclear("a table of vectors grows in its number of entries too")
        return Kind("input")
    axes = _axes(module, leaf)
    if axes is None:
        return _raw(ratios, growing, shape)
    if any(axis not in axes for axis in growing):
        return _Unclear("its kernel differs from the base's")
    fan_out, fan_in = ratios[axes[0]], ratios[axes[1]]
    if axes[1] == 0 and getattr(module, "groups", 1) > 1:
        return _Unclear("it is a transposed convolution in groups, whose shape does not tell its fan-in")
    if fan_in == 1:
        return Kind("input")
    if fan_out == 1:
        return Kind("output", float(fan_in))
    if fan_in not in widths:
        known = ", ".join(f"{float(each):g}" for each in sorted(widths))
        return _Unclear(
            f"its fan-in is {float(fan_in):g} times the base's, and no layer's output grew by that ({known}): operands "
            f"of a concatenation that were scaled differently, or an input that was scaled by itself"
        )
    return Kind("hidden", float(fan_in))


def _raw(ratios: list[Fraction], growing: list[int], shape: tuple[int, ...]) -> Kind | _Unclear:
    """A parameter of a module that is not known. Its use is clear in plain cases only."""
    if sum(size > 1 for size in shape) == 1:
        return Kind("vector")
    if growing == [len(shape) - 1] and shape[0] == 1 and len(shape) > 2:
        return Kind("input")  # (1, L, n): positions, or tokens that are learned
    if len(shape) == 2 and len(growing) == 2 and ratios[0] == ratios[1]:
        return Kind("hidden", float(ratios[0]))
    count = len(growing)
    return _Unclear(f"{count} dimension{'s' if count > 1 else ''} of it grow, and its module is not a known layer")


def _as_named(
    value: Any,
    model: nn.Module,
    name: str,
    mine: dict[str, tuple[int, ...]],
    theirs: dict[str, tuple[int, ...]],
) -> Kind | _Unclear:
    """As the user says; m of hidden and output ones is still that of the fan-in."""
    if isinstance(value, Kind):
        return value
    kind = Kind(value)  # an unknown word raises
    if not kind.scaled:
        return kind
    ratios = _ratios(mine[name], theirs[name])
    module, leaf = _owner(model, name)
    axes = _axes(module, leaf)
    if axes is not None and len(ratios) > 1:
        return replace(kind, m=float(ratios[axes[1]]))
    grown = {ratio for ratio in ratios if ratio != 1}
    if len(grown) > 1:
        return _Unclear(f'which of its dimensions is the fan-in is not known: give Kind("{value}", m=...)')
    return replace(kind, m=float(grown.pop()) if grown else 1.0)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


# Attention and norms of the family


def _require_held_heads(model: nn.Module, base: nn.Module) -> None:
    sizes, before = dict(head_sizes(model)), dict(head_sizes(base))
    for name, size in sizes.items():
        if name in before and size != before[name]:
            raise InvalidConfigError(
                f"the heads of {name or type(model).__name__} have a size of {size}, and of {before[name]} in the "
                f"base: μP for softmax(q·k/√d) holds the size of a head. Let the number of heads grow with the width"
            )


_HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads")
_SIZES = ("head_dim", "dim_head", "attention_head_size", "head_size")
_QUERIES = {"to_q": 1, "q_proj": 1, "query": 1, "qkv": 3, "to_qkv": 3, "in_proj": 3}


def head_sizes(model: nn.Module) -> Iterator[tuple[str, int]]:
    """The size of an attention head, by the name of the attention, where it is known."""
    for name, module in model.named_modules():
        own = vars(module)  # diffusers' models warn if they are asked for a field of their configuration
        heads = next((own[each] for each in _HEADS if _is_count(own.get(each))), None)
        if heads is None:
            continue
        size = next((own[each] for each in _SIZES if _is_count(own.get(each))), None)
        for child, parts in _QUERIES.items():
            weight = getattr(getattr(module, child, None), "weight", None)
            if size is None and isinstance(weight, torch.Tensor) and weight.dim() >= 2:
                size = weight.shape[0] // parts // heads
        if size is not None:
            yield name, size


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
