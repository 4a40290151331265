"""Learnable scaling, whose κ_i depend on the data: gates (Eq. 9)."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidConfigError, NotScaledError, require
from .base import (
    Scaling,
    SkipScaling,
    SkipSite,
    register_scaling,
    require_choice,
    require_kappa,
    require_number,
)
from .constant import ConstantScaling

# The calibration networks ζ of learnable scaling (Eq. 9, Table 2), from pooled features to logits.

ACTIVATIONS = {
    "relu": F.relu,
    "elu": F.elu,
    "mish": F.mish,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FullPrecisionModule(nn.Module):
    """Its parameters stay in fp32 when the model around it goes to half precision."""

    def _apply(self, fn, recurse: bool = True):
        def keep_precision(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.dtype in (torch.float16, torch.bfloat16) and tensor.dtype not in (
                torch.float16,
                torch.bfloat16,
            ):
                return tensor.to(changed.device)
            return changed

        return super()._apply(keep_precision, recurse)


class GateLayer(nn.Module):
    """W x + b in full precision. It is no `nn.Linear`: tools that adapt or quantise linear layers leave gates alone."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        layer = nn.Linear(width, outputs)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        # .float() is free for fp32 weights, and undoes what FSDP's mixed precision does to them.
        return F.linear(x, self.weight.float(), self.bias.float())


class SqueezeExcite(FullPrecisionModule):
    """ζ(p) = W_2 act(W_1 p + b_1) + b_2 with a bottleneck of width/ratio, at least 1 (SE, the paper's choice)."""

    def __init__(self, width: int, ratio: int, activation: str, start_flat: bool) -> None:
        super().__init__()
        hidden = max(width // ratio, 1)
        self.reduce = GateLayer(width, hidden)
        self.expand = GateLayer(hidden, width)
        self.activation = activation
        if start_flat:
            nn.init.zeros_(self.expand.weight)
            nn.init.zeros_(self.expand.bias)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.expand(ACTIVATIONS[self.activation](self.reduce(pooled)))


class InstanceEnhance(FullPrecisionModule):
    """ζ(p) = w ⊙ p + b, one weight and one bias per channel (IE). Both start at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.addcmul(self.bias.float(), self.weight.float(), pooled)


# A sigmoid never reaches κ_1 = 1; this is where it starts instead. Bounded gates could, and start where the others do.
LARGEST_START = 0.999


@register_scaling
@dataclass(frozen=True)
class LearnableScaling(Scaling):
    """LS: a tiny network ζ predicts the coefficients, which multiply the skip element-wise (Eq. 9).

    κ_i = κ^(i-1) 2^tanh(p (ζ(GAP(x_i)) + shift_i))    start="bounded"
    κ_i = σ(ζ(GAP(x_i)) + offset_i)                    start="cs"
    κ_i = σ(ζ(GAP(x_i)))                               start="paper"

    `module`: "se" (linear, activation, linear; the paper's), "ie" (one weight and bias per channel) or "scalar" (each
    κ_i is a parameter, without a sigmoid, never shared).
    `shared`: one ζ for all skips, one per width where widths differ, or one for each skip.
    `gate`: "channel" averages over all positions and gates channels; "token" averages over channels and gates tokens,
    which ties the gate to one sequence length; "auto" is channels for bounded gates, and for the others what the paper
    does: tokens where their number is fixed (U-ViT), otherwise channels.
    `start`: "bounded" starts on the curve κ^(i-1), where 0.999 stands for 1, and stays between half and twice the
    curve. "cs" starts there too (last layer zero, a bias per skip at its logit), and its gates are free between 0 and
    1; at high rates fewer runs survive with it (docs/evidence/survival). "paper" starts as the authors' code does, at
    about 0.5 for every skip.
    `pace`: p, in (0, 1], makes bounded gates move more slowly than the other weights.
    """

    module: str = "se"
    shared: bool = True
    ratio: int = 16
    activation: str = "relu"
    gate: str = "auto"
    start: str = "bounded"
    kappa: float = 0.7
    pace: float = 0.1

    name = "ls"

    def validate(self) -> None:
        require_choice("module", self.module, ("se", "ie", "scalar"))
        require(isinstance(self.shared, bool), f"shared must be true or false, got {self.shared!r}")
        whole = isinstance(self.ratio, int) and not isinstance(self.ratio, bool)
        require(whole and self.ratio >= 1, f"ratio must be a whole number >= 1, got {self.ratio!r}")
        require_choice("activation", self.activation, tuple(ACTIVATIONS))
        require_choice("gate", self.gate, ("token", "channel", "auto"))
        require_choice("start", self.start, ("bounded", "cs", "paper"))
        require_kappa(self.kappa)
        require_number("pace", self.pace, 0.0, 1.0, "(0, 1]")

    def build(self, sites: Sequence[SkipSite]) -> SkipScaling:
        return ScalarSkipScaling(self, sites) if self.module == "scalar" else GatedSkipScaling(self, sites)


class ScalarSkipScaling(FullPrecisionModule, SkipScaling):
    """Each κ_i is a parameter."""

    def __init__(self, config: LearnableScaling, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        count = len(sites)
        start = (0.5,) * count if config.start == "paper" else ConstantScaling(config.kappa).curve(count)
        self.kappa = nn.Parameter(torch.tensor(start))

    def gate(self, skip: Tensor, index: int) -> Tensor:  # noqa: ARG002
        return self.kappa[index - 1]

    def scale(self, skip: Tensor, index: int) -> Tensor:
        return skip * self.gate(skip, index).to(skip.dtype)

    def coefficient(self, index: int) -> Tensor:
        return self.kappa[index - 1].detach()


class GatedSkipScaling(FullPrecisionModule, SkipScaling):
    """Gates by ζ. There are offsets for `start="cs"` and shifts for `start="bounded"`; both are one number per skip."""

    def __init__(self, config: LearnableScaling, sites: Sequence[SkipSite]) -> None:
        super().__init__(config, sites)
        self._gates_tokens = [_gates_tokens(config, site) for site in sites]
        widths = [
            site.tokens if by_token and site.tokens else site.channels
            for site, by_token in zip(sites, self._gates_tokens, strict=True)
        ]
        distinct = sorted(set(widths))
        if config.shared:
            self._network_of = [distinct.index(width) for width in widths]
        else:
            distinct, self._network_of = widths, list(range(len(widths)))
        self.networks = nn.ModuleList(_network(config, width) for width in distinct)
        curve = [min(kappa, LARGEST_START) for kappa in ConstantScaling(config.kappa).curve(len(sites))]
        self.offsets = nn.Parameter(_logits(curve)) if config.start == "cs" else None
        # Another name than `offsets`, so that gates that were trained with the one are never read as the other.
        self.shifts = nn.Parameter(torch.zeros(len(sites))) if config.start == "bounded" else None
        self._curve, self._pace = curve, config.pace
        self._recent: list[Tensor | None] = [None] * len(sites)

    def gate(self, skip: Tensor, index: int) -> Tensor:
        """κ_i, in fp32, in a shape that broadcasts against the skip."""
        position, site = index - 1, self.sites[index - 1]
        axis = skip.dim() - 1 if site.channel_axis == -1 else site.channel_axis
        kept = 1 if self._gates_tokens[position] else axis
        if self._gates_tokens[position] and skip.shape[1] != site.tokens:
            raise InvalidConfigError(
                f"the token gate of long skip {index} was built for {site.tokens} tokens and got {skip.shape[1]}; "
                f"use gate='channel' for inputs of several sizes"
            )
        batch = site.batch_axis
        pooled_axes = [a for a in range(skip.dim()) if a not in (batch, kept)]
        device = skip.device.type  # to enter autocast costs as much as two operations of a gate
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            pooled = skip.mean(pooled_axes, dtype=torch.float32) if pooled_axes else skip.float()
            if batch is not None and batch > kept:
                pooled = pooled.mT
            logits = self.networks[self._network_of[position]](pooled)
            if self.offsets is not None:
                logits = logits + self.offsets[position].float()
            if self.shifts is None:
                gate = torch.sigmoid(logits)
            else:
                logits = self._pace * (logits + self.shifts[position].float())
                gate = self._curve[position] * torch.exp2(torch.tanh(logits))
        shape = [1] * skip.dim()
        if batch is not None:
            shape[batch] = gate.shape[0]
            gate = gate.mT if batch > kept else gate
        shape[kept] = skip.shape[kept]
        gate = gate.reshape(shape)
        self._recent[position] = gate.detach()
        return gate

    def scale(self, skip: Tensor, index: int) -> Tensor:
        return skip * self.gate(skip, index).to(skip.dtype)

    def coefficient(self, index: int) -> Tensor:
        return recent_coefficient(self._recent[index - 1])


def _gates_tokens(config: LearnableScaling, site: SkipSite) -> bool:
    if config.gate == "token" and site.tokens is None:
        raise InvalidConfigError(
            f"gate='token' needs token features (B, L, C); long skip {site.index} has none. Use gate='channel'"
        )
    # The authors gate tokens. Bounded gates were confirmed with channels, and those have no sequence length either.
    automatic = config.gate == "auto" and config.start != "bounded"
    return config.gate == "token" or (automatic and site.tokens is not None and site.fixed_tokens)


def _network(config: LearnableScaling, width: int) -> nn.Module:
    if config.module == "ie":
        return InstanceEnhance(width)
    return SqueezeExcite(width, config.ratio, config.activation, start_flat=config.start != "paper")


def _logits(curve: Sequence[float]) -> Tensor:
    return torch.tensor([math.log(kappa) - math.log1p(-kappa) for kappa in curve])


def recent_coefficient(value: Tensor | None) -> Tensor:
    """κ_i of the last forward, or an error where there was none."""
    if value is None:
        raise NotScaledError("these coefficients depend on the data: run the model first, or pass it inputs")
    return value
