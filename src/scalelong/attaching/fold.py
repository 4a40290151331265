"""Bake constant coefficients into the weights next to the merges. Exact, or not done."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AdaptedLayersError, InvalidConfigError, NotScaledError
from ..finding import FOLDING, ExampleInputs, FoldTarget, example_call
from ..scaling import UNSCALED, Constants, SkipScaling
from .host import Host, is_scaled_host, scaled_host_of
from .record import COMPENSATED
from .reruns import recalled
from .verify import can_verify, function_of, is_same_function


@dataclass(frozen=True)
class FoldReport:
    """Which long skips (i) are in the weights now, and which could not be folded, with the reason."""

    folded: tuple[int, ...] = ()
    kept: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"folded: {', '.join(map(str, self.folded)) or 'none'}"]
        lines += [f"kept: {index}: {reason}" for index, reason in self.kept.items()]
        return "\n".join(lines)


def fold_(
    model: nn.Module, example_inputs: ExampleInputs = None, *, inverse: bool = False, verify: bool = True
) -> FoldReport:
    """Bake constant coefficients into the weights, in place, where that is exact. Twice is harmless.

    The function stays the same. What cannot be folded stays attached; if nothing is left, the model needs no scalelong
    to run. `inverse=True` divides the weights instead and keeps the scaling, so that scaling can be attached to a
    trained model without changing its function; `unscale_` multiplies them back.

    Fold after training. Before it the function stays the same, but not the run: the weights behind skip i then move
    with the full rate of Adam instead of κ_i times it (docs/theory.md), so that a rate which was tuned with the scaling
    attached is another one.

    The outputs before and after are compared on `example_inputs`, or on inputs like those of `scale_skips_`. A skip
    whose folding would change them is not folded, and its weights are as they were. Layers with adapters (LoRA)
    raise AdaptedLayersError. If anything fails, all weights are as they were.
    """
    host = scaled_host_of(model)
    if not is_scaled_host(host):
        if inverse:
            raise NotScaledError("scale the long skips first; then fold_(model, inverse=True) compensates for it")
        return FoldReport()
    scaling = host.scaling
    assert scaling is not None
    _require_no_adapters(host, [site.index for site in scaling.sites if host.unfoldable(site.index) == ""])
    done = _compensated(scaling)
    wanted: dict[int, Constants] = {}
    kept: dict[int, str] = {}
    for site in scaling.sites:
        reason = _obstacle(host, site.index)
        if reason is None or (inverse and site.index in done):
            continue
        if reason:
            kept[site.index] = reason
        else:
            wanted[site.index] = _factors(scaling, site.index, inverse)
    call = example_call(host.model, example_inputs) if example_inputs is not None else recalled(host.inputs)
    changed = _fold_verified(host, wanted, call if verify else None, inverse)
    kept |= changed
    folded = tuple(index for index in wanted if index not in changed)
    if inverse:
        done.update(folded)
    else:
        done.difference_update(folded)
        host.finish_folding(set(folded), kept=bool(kept))
    return FoldReport(folded, kept)


def undo_compensation_(host: Host) -> None:
    """Multiply back the weights that `fold_(inverse=True)` divided."""
    scaling = host.scaling
    assert scaling is not None
    done = _compensated(scaling)
    _require_no_adapters(host, sorted(done))
    with _all_or_nothing(host, done):
        for index in sorted(done):
            _apply(host, index, _factors(scaling, index, inverse=False))
    done.clear()


def _require_no_adapters(host: Host, indices: list[int]) -> None:
    """PEFT puts a layer of its own around a layer, and keeps its weights elsewhere."""
    acting = [i for i in indices if host.scaling is not None and host.scaling.constants(i) != UNSCALED]
    names = dict.fromkeys(target.module for index in acting for target in host.fold_targets(index))
    adapted = [name for name in names if _is_adapted(host.model, name)]
    if adapted:
        more = f" and {len(adapted) - 4} more" if len(adapted) > 4 else ""
        raise AdaptedLayersError(
            f"the coefficients cannot be multiplied into layers with adapters: {', '.join(adapted[:4])}{more}. Nothing "
            f"was changed. Merge the adapters into the weights first: model = model.merge_and_unload() (PEFT), or "
            f"unet.fuse_lora() and unet.unload_lora() (diffusers)"
        )


def _is_adapted(model: nn.Module, name: str) -> bool:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return False
    return hasattr(layer, "adapter_layer_names") or hasattr(layer, "base_layer")


def _compensated(scaling: SkipScaling) -> set[int]:
    """The skips whose weights were divided; kept beside the scaling, so that copies of the model know it."""
    return vars(scaling).setdefault(COMPENSATED, set())


def _obstacle(host: Host, index: int) -> str | None:
    """Why merge i cannot be folded: a reason, "" if it can, None if there is nothing to do."""
    reason = host.unfoldable(index)
    if reason == "" and host.scaling is not None and host.scaling.constants(index) != UNSCALED:
        for target in host.fold_targets(index):
            reason = reason or layer_obstacle(host.model, target)
    return reason


def layer_obstacle(model: nn.Module, target: FoldTarget) -> str:
    """What has become of a layer since it was planned: adapters replace layers, parametrisations compute weights."""
    try:
        layer: Any = model.get_submodule(target.module)
    except AttributeError:
        return f"{target.module} is not there any more"
    plain = next((cls for cls in FOLDING if isinstance(layer, cls)), None)
    if plain is None or type(layer).forward is not plain.forward or "forward" in vars(layer):
        return f"{target.module} is a {type(layer).__name__}"
    if getattr(type(layer), "_conv_forward", None) is not getattr(plain, "_conv_forward", None):
        return f"{target.module} is a {type(layer).__name__}, which changes its weight"
    weight = layer._parameters.get("weight")
    if weight is None or hasattr(layer, "parametrizations"):
        return f"the weight of {target.module} is computed"
    owners = [m for m in model.modules() if any(p is weight for p in m._parameters.values())]
    return f"the weight of {target.module} belongs to other modules, too" if len(owners) > 1 else ""


def _factors(scaling: SkipScaling, index: int, inverse: bool) -> Constants:
    constants = scaling.constants(index)
    assert constants is not None
    if not inverse:
        return constants
    if 0.0 in constants:
        raise InvalidConfigError(f"long skip {index} is cut (κ = 0): no weights can compensate for that")
    return Constants(1 / constants.main, 1 / constants.skip)


# Fold, compare, and restore where the function has changed.


def _fold_verified(host: Host, wanted: dict[int, Constants], call: Any, inverse: bool) -> dict[int, str]:
    """Fold, and compare with the function before. Returns the skips that were not folded, with the reason."""
    acting = [index for index, factors in wanted.items() if factors != UNSCALED]
    with _all_or_nothing(host, acting) as saved:
        if acting and host.constants_by_slot(set()) is not None and can_verify(host, call):
            return _fold_each(host, wanted, call, inverse, saved)
        for index, factors in wanted.items():
            _apply(host, index, factors)
        return {}


def _fold_each(
    host: Host, wanted: dict[int, Constants], call: Any, inverse: bool, saved: dict[int, list[tuple[Tensor, Tensor]]]
) -> dict[int, str]:
    acting = list(saved)
    if _keeps_function(host, call, {index: wanted[index] for index in acting}, inverse):
        return {}
    changed: dict[int, str] = {}
    _restore(saved, acting)
    # One of them is at fault, perhaps more: each by itself.
    for index in acting:
        if not _keeps_function(host, call, {index: wanted[index]}, inverse):
            names = ", ".join(target.module for target in host.fold_targets(index))
            changed[index] = f"folding changes what the model computes: the weight of {names} is used in another way"
        _restore(saved, [index])
    for index in acting:
        if index not in changed:
            _apply(host, index, wanted[index])
    return changed


@contextmanager
def _all_or_nothing(host: Host, indices: Iterable[int]) -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """The weights by skip, which are put back if anything fails: a model is never left half folded."""
    saved = {index: _weights(host, index) for index in indices}
    try:
        yield saved
    except BaseException:
        _restore(saved, list(saved))
        raise


def _keeps_function(host: Host, call: Any, factors: dict[int, Constants], inverse: bool) -> bool:
    """Fold these skips. Their scaling must be off afterwards; or before, if the weights are divided."""
    makers = [host.model.get_submodule(t.module) for i in factors for t in host.fold_targets(i) if t.output]
    on, off = host.constants_by_slot(set()), host.constants_by_slot(set(factors))
    before = function_of(host, call, off if inverse else on, makers)
    for index, values in factors.items():
        _apply(host, index, values)
    return is_same_function(before, function_of(host, call, on if inverse else off, makers))


def _weights(host: Host, index: int) -> list[tuple[Tensor, Tensor]]:
    layers: list[Any] = [host.model.get_submodule(target.module) for target in host.fold_targets(index)]
    tensors = [t for layer in layers for t in (layer.weight, layer.bias) if isinstance(t, Tensor)]
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


@torch.no_grad()
def _restore(saved: dict[int, list[tuple[Tensor, Tensor]]], indices: list[int]) -> None:
    for index in indices:
        for tensor, before in saved[index]:
            tensor.copy_(before)


def _apply(host: Host, index: int, factors: Constants) -> None:
    if factors != UNSCALED:
        host.fold(index, factors)
