"""Bake constant coefficients into the weights next to the merges."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidConfigError, NotScaledError
from ..scaling.base import Constants, SkipScaling
from .api import is_scaled, scaling_of
from .attach import acts_behind_norm, attach_, attached, detach_
from .host import SkipHost, unwrap
from .plan import FoldTarget, LongSkip


@dataclass(frozen=True)
class FoldReport:
    """Which long skips (i) are in the weights now, and which could not be folded, with the reason."""

    folded: tuple[int, ...] = ()
    kept: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"folded: {', '.join(map(str, self.folded)) or 'none'}"]
        lines += [f"kept: {index}: {reason}" for index, reason in self.kept.items()]
        return "\n".join(lines)


def fold_(model: nn.Module, *, inverse: bool = False) -> FoldReport:
    """Bake constant coefficients into the weights, in place, where that is exact. Twice is harmless.

    The function stays the same. What cannot be folded stays attached; if nothing is left, the model needs no scalelong
    to run. `inverse=True` divides the weights instead and keeps the scaling, so that scaling can be attached to a
    trained model without changing its function; `unscale_` multiplies them back.
    """
    host = unwrap(model)
    if not is_scaled(model):
        if inverse:
            raise NotScaledError("scale the long skips first; then fold_(model, inverse=True) compensates for it")
        return FoldReport()
    scaling = scaling_of(model)
    done = _compensated(scaling)
    folded, kept = [], {}
    for index in range(1, len(scaling.sites) + 1):
        reason = _obstacle(host, scaling, index)
        if reason is None or (inverse and index in done):
            continue
        if reason:
            kept[index] = reason
            continue
        _apply(host, index, _factors(scaling, index, inverse))
        folded.append(index)
    if inverse:
        done.update(folded)
    else:
        done.difference_update(folded)
        _remove(host, set(folded), kept)
    return FoldReport(tuple(folded), kept)


def undo_compensation_(host: nn.Module) -> None:
    """Multiply back the weights that `fold_(inverse=True)` divided."""
    scaling = scaling_of(host)
    done = _compensated(scaling)
    for index in sorted(done):
        _apply(host, index, _factors(scaling, index, inverse=False))
    done.clear()


def _compensated(scaling: SkipScaling) -> set[int]:
    """The skips whose weights were divided; kept beside the scaling, so that copies of the model know it."""
    return vars(scaling).setdefault("_compensated", set())


def _obstacle(host: Any, scaling: SkipScaling, index: int) -> str | None:
    """Why merge i cannot be folded: a reason, "" if it can, None if there is nothing to do."""
    constants, state = scaling.constants(index), attached(host)
    if state is not None and index in state.folded:
        return None
    if constants is None:
        return "its coefficients depend on the data"
    if state is None:
        return ""
    skip = state.plan[index]
    if constants == Constants(1.0, 1.0):
        return ""
    targets = _targets(skip, scaling)
    if not targets:
        return skip.unfoldable
    if constants.main != 1.0 and any(target.output for target in targets):
        return "its main path cannot be folded"
    return ""


def _factors(scaling: SkipScaling, index: int, inverse: bool) -> Constants:
    constants = scaling.constants(index)
    assert constants is not None
    if not inverse:
        return constants
    if 0.0 in constants:
        raise InvalidConfigError(f"long skip {index} is cut (κ = 0): no weights can compensate for that")
    return Constants(1 / constants.main, 1 / constants.skip)


def _apply(host: Any, index: int, factors: Constants) -> None:
    if isinstance(host, SkipHost):
        host.fold_skip(index, factors)
        return
    state = attached(host)
    assert state is not None
    if factors != Constants(1.0, 1.0):
        for target in _targets(state.plan[index], state.scaling):
            _multiply(host.get_submodule(target.module), target, factors)


def _targets(skip: LongSkip, scaling: SkipScaling) -> tuple[FoldTarget, ...]:
    return skip.beyond if acts_behind_norm(skip, scaling) else skip.fold


def _remove(host: Any, folded: set[int], kept: dict[int, str]) -> None:
    from .api import unscale_

    state = attached(host)
    if state is None:
        if not kept:
            unscale_(host)
        return
    detach_(host)
    state.folded |= folded
    if kept:
        attach_(host, state)


@torch.no_grad()
def _multiply(module: nn.Module, target: FoldTarget, factors: Constants) -> None:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if target.output:
        weight.mul_(factors.skip)
        if isinstance(module.bias, Tensor):
            module.bias.mul_(factors.skip)
        return
    for start, length, factor in (
        (target.start, target.length, factors.skip),
        (target.main_start, target.main_length, factors.main),
    ):
        for channel_slice in _input_channels(module, weight, start, length):
            channel_slice.mul_(factor)


def _input_channels(module: Any, weight: Tensor, start: int, length: int) -> list[Tensor]:
    """The weights that multiply these input channels, as views."""
    if isinstance(module, nn.Linear):
        return [weight[:, start : start + length]]
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return [weight[start : start + length]]
    # A grouped convolution sees in each group only its own share of the input channels.
    inside, rows = weight.shape[1], weight.shape[0] // module.groups
    views = []
    for group in range(module.groups):
        first, last = max(start - group * inside, 0), min(start + length - group * inside, inside)
        if first < last:
            views.append(weight[group * rows : (group + 1) * rows, first:last])
    return views
