"""Start and rates of μP: `start_` once, before training, and `parameter_groups` for anyone's AdamW.

    report = sl.mup.start_(model, base=64)                                        # new networks only
    groups = sl.mup.parameter_groups(model, base=64, lr=8e-3, weight_decay=0.03)  # at every start, resumed ones too
    optimizer = torch.optim.AdamW(groups)

A rate that was tuned at the base width then serves at every width. Why: an update of Adam has entries of the size η,
whatever the gradient, and is aligned with its input, so that a layer of fan-in n moves its output by η n. With
η ∝ 1/n in all layers whose fan-in grows, features move alike at every width. The output f = W h moves through h as
well, and those changes came through W: with entries of 1/√n they add up to √n, with 1/n ("strict") to a constant.

No module is replaced, so this serves for any network. Groups (start / √m, rate / m, decay × m) and the multiplier 1/m
in the forward pass of other implementations are the same run, up to Adam's ε.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import OUTPUT_STARTS as OUTPUT_STARTS, OutputStart, require_output_start as require_output_start
from ..console import text_table
from ..errors import AlreadyScaledError, InvalidConfigError
from ..models import UViT
from .parameters import Base, Given, Kind, Kinds, bare, kinds as kinds_of

LR_SCALE = "lr_scale"
"""Entry of a parameter group whose rate is a multiple of the others'. Schedules that overwrite `lr` must keep it."""

Init = Literal["fan-in", "constant"]

_STARTED = "_scalelong_mup_start"


def parameter_groups(
    model: nn.Module,
    base: Base,
    *,
    lr: float,
    weight_decay: float = 0.01,
    kinds: Given | None = None,
    delta: nn.Module | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups of μP for AdamW: rate / m and decay × m for hidden and output layers, the rest as it is.

    The decay is scaled because AdamW shrinks weights by rate × decay a step, and that is to stay as it is in the base.
    Each group whose rate is scaled says by how much, in `lr_scale`: code that sets `lr` must multiply by it. torch's
    schedulers do the right thing by themselves, since they start from each group's own rate. Parameters that are not
    trained are left out. At the base's width there is one group, with the parameters in the order of the model.
    The other arguments are those of `kinds`. The rule is Adam's, and wrong for SGD and Adafactor; Muon has
    `sl.muon_groups`.
    """
    found = kinds_of(model, base, kinds=kinds, delta=delta)
    return groups_of(model, found, lr=lr, weight_decay=weight_decay)


def groups_of(model: nn.Module, found: Mapping[str, Kind], *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """The groups of kinds that are known already."""
    groups: dict[float, dict[str, Any]] = {}
    for name, parameter in bare(model).named_parameters():
        if not parameter.requires_grad:
            continue
        kind = found[name]
        if kind.rate not in groups:
            group: dict[str, Any] = {"params": [], "lr": lr * kind.rate, "weight_decay": weight_decay * kind.decay}
            groups[kind.rate] = group | ({LR_SCALE: kind.rate} if kind.rate != 1.0 else {})
        groups[kind.rate]["params"].append(parameter)
    # The rate of the first group is the one that logs show.
    return sorted(groups.values(), key=lambda group: LR_SCALE in group)


# The start


@dataclass(frozen=True)
class MupStart:
    """The factors by which weights were multiplied, by name. All other weights stayed as they were. Print it."""

    factors: dict[str, float]
    output_start: OutputStart
    init: Init

    def __str__(self) -> str:
        if not self.factors:
            return f"output start {self.output_start}: all weights stay as they were"
        rows = [{"parameter": name, "× start": f"{factor:.6g}"} for name, factor in self.factors.items()]
        return f"output start {self.output_start}, drawn by {self.init}:\n{text_table(rows)}"


def _output_factor(start: OutputStart, m: float) -> float:
    """The number by which an output layer whose entries have a deviation of 1/√fan-in is multiplied."""
    if start == "unit":
        return 1.0
    if start == "zero":
        return 0.0
    return (1.0 if start == "strict" else float(start)) / math.sqrt(m)


@torch.no_grad()
def start_(
    model: nn.Module,
    base: Base,
    *,
    output_start: OutputStart = "strict",
    init: Init | None = None,
    kinds: Given | None = None,
    delta: nn.Module | None = None,
) -> MupStart:
    """Scale the weights of a new network as μP asks, in place. A second time raises AlreadyScaledError.

    `output_start`: "strict" multiplies the output layers by 1/√m, "unit" leaves them, "zero" makes them 0, and a
    number is that many times strict (the output multiplier, which may be tuned at the base).
    `init` says how the network draws its weights: "fan-in", with a deviation of 1/√fan-in (torch's default, U-ViT's
    "unit"), or "constant", one deviation at all widths (0.02 of the presets), for which hidden layers are divided by
    √m as well. U-ViT knows; of other networks it is seen from the weights, and must be given where that is not clear.
    Not for a run that is resumed: its weights have been started.
    """
    output_start = require_output_start(output_start)
    host = bare(model)
    if _STARTED in vars(host):
        raise AlreadyScaledError(
            "this model was started for μP before, and a second time would scale its weights again: build a new one. A "
            "run that is resumed needs parameter_groups alone"
        )
    found = kinds_of(model, base, kinds=kinds, delta=delta)
    return start_kinds_(host, found, output_start, init, base)


@torch.no_grad()
def start_kinds_(
    host: nn.Module, found: Kinds, output_start: OutputStart, init: Init | None = None, base: Any = None
) -> MupStart:
    parameters = dict(host.named_parameters())
    grows = any(kind.m != 1.0 for kind in found.values())
    if not found.of("output") and (output_start == "zero" or isinstance(output_start, float)):
        raise InvalidConfigError(
            f"output_start {output_start} changes the output layer, and none is known: at the base's own width nothing "
            f"grows. Give the base as a width, pass delta=, a model of another width, or name the layer, "
            f'kinds={{"head.weight": "output"}}'
        )
    drawn: Init = (init or _drawn_by(host, found, base)) if grows else "fan-in"
    if drawn not in ("fan-in", "constant"):
        raise InvalidConfigError(f"init must be 'fan-in' or 'constant', got {init!r}")
    factors: dict[str, float] = {}
    for name, kind in found.items():
        factor = 1.0
        if kind.scaled and drawn == "constant":
            factor /= math.sqrt(kind.m)
        if kind.kind == "output":
            factor *= _output_factor(output_start, kind.m)
        if factor != 1.0:
            if ".parametrizations." in f".{name}":
                raise InvalidConfigError(
                    f"the start of {name} is to be multiplied by {factor:g}, and it is parametrised: start the model "
                    f"before it is parametrised"
                )
            if _multiply_(parameters[name], factor):
                factors[name] = factor
    vars(host)[_STARTED] = True
    return MupStart(factors, output_start, drawn)


def _multiply_(weight: Tensor, factor: float) -> bool:
    """Halves that begin as an identity (`merge_start`) stay: its output has the size of its input at every width."""
    if weight.dim() == 2 and weight.shape[1] % weight.shape[0] == 0:
        parts = weight.split(weight.shape[0], dim=1)
        kept = [part for part in parts if not _is_identity(part)]
    else:
        kept = [weight]
    for part in kept:
        part.mul_(factor)
    return bool(kept)


def _is_identity(part: Tensor) -> bool:
    return bool((part - torch.diag(part.diagonal())).count_nonzero() == 0) and bool(part.count_nonzero() > 0)


def _drawn_by(host: nn.Module, found: Kinds, base: Any) -> Init:
    """How the weights were drawn. U-ViT knows; else deviations are compared with a base's, or with torch's default."""
    if isinstance(host, UViT):
        return "fan-in" if host.init_std == "unit" else "constant"
    parameters = dict(host.named_parameters())
    hidden = [name for name in found.of("hidden") if parameters[name].dim() >= 2 and _deviation(parameters[name]) > 0]
    if not hidden:
        return "fan-in"
    shares = []  # 0 where the deviation is that of 1/√fan-in, 1 where it is a constant
    others = dict(bare(base).named_parameters()) if isinstance(base, nn.Module) else {}
    for name in hidden:
        deviation = _deviation(parameters[name])
        if name in others and not others[name].is_meta:
            before = _deviation(others[name])
            if before > 0:
                shares.append(1 + math.log(deviation / before) / math.log(math.sqrt(found[name].m)))
        else:
            fan_in = parameters[name][0].numel()
            default = deviation * math.sqrt(3 * fan_in)  # torch draws evenly from ±1/√fan-in
            shares.append(0.0 if abs(default - 1) < 0.1 else math.nan)
    clear = [round(share) for share in shares if math.isfinite(share) and abs(share - round(share)) < 0.25]
    if set(clear) in ({0}, {1}) and len(clear) >= 0.5 * len(shares):
        return "constant" if clear[0] else "fan-in"
    raise InvalidConfigError(
        f"how this {type(host).__name__} draws its weights is not clear from them: pass init='fan-in' if their "
        f"deviation falls as 1/√fan-in (torch's default, Xavier, Kaiming), init='constant' if it is a number, such as "
        f"0.02, at every width"
    )


def _deviation(weight: Tensor) -> float:
    return float(weight.detach().float().std()) if weight.numel() > 1 else 0.0
