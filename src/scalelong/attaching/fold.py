"""Constant coefficients in the weights next to the merges: after training (`fold_`), or before it (`start_skips_`).

Both ask the same question: which layers read long skip i, and can their weights take κ_i exactly? If not, nothing
changes.

    W [main ⊕ κ skip] + b  =  [W_main | κ W_skip] [main ⊕ skip] + b

A start is more than a convenience. The bounds of section 3 (features, gradients, robustness) are expectations over
random weights: they speak of the network before its first step. A network whose weights hold κ_i is, at that step, the
same function as one whose long skips are scaled by κ_i. From then on κ_i is a weight like any other, free to grow.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..console import text_table
from ..errors import AlreadyScaledError, InvalidConfigError, NotScaledError, ScaleLongError, UnsupportedModelError
from ..finding import FOLDING, ExampleInputs, FoldTarget, LongSkip, Patterns, SkipPlan, example_call, find_skips
from ..scaling import UNSCALED, Constants, Scaling, SkipScaling, as_scaling
from .attach import acts_after_norm, has_scaling, weights_reading
from .host import Host, host_of, scaled_host_of
from .record import COMPENSATED, spelled
from .reruns import Call, obstacle_to_reruns, recalled, recomputed

logger = logging.getLogger(__name__)


# After training.


@dataclass(frozen=True)
class FoldReport:
    """Which long skips (i) are in the weights now, and which could not be folded, with the reason."""

    folded: tuple[int, ...] = ()
    kept: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"folded: {', '.join(map(str, self.folded)) or 'none'}"]
        lines += [f"kept: {index}: {reason}" for index, reason in self.kept.items()]
        return "\n".join(lines)


def fold_(model: nn.Module, example_inputs: ExampleInputs = None, *, inverse: bool = False) -> FoldReport:
    """Bake constant coefficients into the weights, in place, where that is exact. Twice is harmless.

    The function stays the same. What cannot be folded stays attached; if nothing is left, the model needs no scalelong
    to run. `inverse=True` divides the weights instead and keeps the scaling, so that scaling can be attached to a
    trained model without changing its function; `unscale_` multiplies them back.

    Fold after training. Before it the function stays the same, but not the run: to Adam an attached κ_i is also a rate
    of κ_i times the others' for the weights that read skip i (docs/theory.md).

    The function before and after is compared, on `example_inputs` or on inputs like those of `scale_skips_`: a skip
    whose folding would change it, because the weight is used elsewhere, is not folded. Layers with adapters (LoRA)
    raise UnsupportedModelError. If anything fails, all weights are as they were.
    """
    host = scaled_host_of(model)
    if not host.is_scaled:
        if inverse:
            raise NotScaledError("scale the long skips first; then fold_(model, inverse=True) compensates for it")
        return FoldReport()
    scaling, plan = _scaling_and_plan(host)
    divided = _divided(scaling)
    done = host.folded | (divided if inverse else set())
    reasons = {s.index: _obstacle(host, s, scaling, _targets(s, scaling)) for s in plan if s.index not in done}
    wanted = {index: _factors(scaling, index, inverse) for index, reason in reasons.items() if not reason}
    call = recalled(host) if example_inputs is None else example_call(host.model, example_inputs)
    changed = _fold_verified(host, wanted, call, inverse)
    kept = {index: reason for index, reason in reasons.items() if reason} | changed
    folded = wanted.keys() - changed.keys()
    if inverse:
        divided.update(folded)
    else:
        divided.difference_update(folded)
        state = host.detach()
        if kept:
            state.folded |= folded
            host.attach(state)
    return FoldReport(tuple(sorted(folded)), kept)


def undo_compensation_(host: Host) -> None:
    """Multiply back the weights that `fold_(inverse=True)` divided."""
    scaling, plan = _scaling_and_plan(host)
    divided = _divided(scaling)
    with _all_or_nothing(host, divided):
        for index in sorted(divided):
            _multiply_(host, plan[index], scaling, _factors(scaling, index, inverse=False))
    divided.clear()


def _scaling_and_plan(host: Host) -> tuple[SkipScaling, SkipPlan]:
    scaling, plan = host.scaling, host.plan()
    assert scaling is not None
    assert plan is not None
    return scaling, plan


def _divided(scaling: SkipScaling) -> set[int]:
    """The skips whose weights were divided; kept with the scaling, so that copies of the model know it."""
    return vars(scaling).setdefault(COMPENSATED, set())


def _factors(scaling: SkipScaling, index: int, inverse: bool) -> Constants:
    constants = scaling.constants(index)
    assert constants is not None
    if not inverse:
        return constants
    if 0.0 in constants:
        raise InvalidConfigError(f"long skip {index} is cut (κ = 0): no weights can compensate for that")
    return Constants(1 / constants.main, 1 / constants.skip)


def _fold_verified(host: Host, wanted: dict[int, Constants], call: Call | None, inverse: bool) -> dict[int, str]:
    """Fold, and compare with the function before. Returns the skips that were not folded, with the reason."""
    scaling, plan = _scaling_and_plan(host)
    acting = {index: factors for index, factors in wanted.items() if factors != UNSCALED}
    edits = [] if host.state is None else host.state.edits
    constant = all(edit.factor is not None for edit in edits)

    def fold(indices: Iterable[int]) -> None:
        for index in indices:
            _multiply_(host, plan[index], scaling, acting[index])

    def keeps_function(indices: Iterable[int]) -> bool:
        """Fold these skips. Their scaling must be off afterwards; or before, if the weights are divided."""
        assert call is not None
        on = {slot: edit.factor or 0.0 for slot, edit in enumerate(edits)}
        off = {slot: 1.0 if edit.skip.index in indices else on[slot] for slot, edit in enumerate(edits)}
        makers = [host.model.get_submodule(t.module) for i in indices for t in _targets(plan[i], scaling) if t.output]
        before = recomputed(host.model, call, off if inverse else on, makers)
        fold(indices)
        return before.difference(recomputed(host.model, call, on if inverse else off, makers)) is None

    with _all_or_nothing(host, acting) as restore:
        if not acting or not edits or not constant or call is None or obstacle_to_reruns(host.model, plan, call):
            fold(acting)
            return {}
        if keeps_function(list(acting)):
            return {}
        restore(acting)
        changed: dict[int, str] = {}
        for index in acting:  # one of them is at fault, perhaps more: each by itself
            if not keeps_function([index]):
                names = ", ".join(target.module for target in _targets(plan[index], scaling))
                changed[index] = (
                    f"folding changes what the model computes: the weight of {names} is used in another way"
                )
            restore([index])
        fold(acting.keys() - changed.keys())
        return changed


@contextmanager
def _all_or_nothing(host: Host, indices: Iterable[int]) -> Iterator[Any]:
    """Gives a function that puts the weights of skips back, and does so for all of them if anything fails."""
    scaling, plan = _scaling_and_plan(host)
    saved: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for index in indices:
        names = [target.module for target in _targets(plan[index], scaling)]
        _require_no_adapters(host.model, names)
        layers: list[Any] = [host.model.get_submodule(name) for name in names]
        tensors = [t for layer in layers for t in (layer.weight, layer.bias) if isinstance(t, Tensor)]
        saved[index] = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(indices: Iterable[int]) -> None:
        for index in indices:
            for tensor, before in saved[index]:
                tensor.copy_(before)

    try:
        yield restore
    except BaseException:
        restore(saved)
        raise


# Before training.


class UnfoldableSkipsError(ScaleLongError, ValueError):
    """Long skips whose coefficients cannot be multiplied into weights exactly. `reasons` has them by i."""

    def __init__(self, message: str, reasons: dict[int, str]) -> None:
        super().__init__(message)
        self.reasons = reasons


@dataclass(frozen=True)
class SkipStart:
    """What `start_skips_` did: per long skip (i) its coefficient κ_i and the layers whose weights hold it now."""

    scaling: str
    factors: dict[int, float] = field(default_factory=dict)
    layers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Empty where κ_i is 1: nothing was to be done."""
    main: dict[int, float] = field(default_factory=dict)
    """Factors of the main path, for methods that have any."""
    norms: dict[int, str] = field(default_factory=dict)
    """The norm that reads the merge, where κ_i is in the weights after it."""

    def __str__(self) -> str:
        rows = [
            {
                "i": index,
                "κ_i": f"{factor:.4g}",
                **({"main path": f"{self.main[index]:.4g}"} if self.main else {}),
                "in the weights of": ", ".join(self.layers[index]) or "-",
                **({"after": self.norms.get(index, "-")} if self.norms else {}),
            }
            for index, factor in self.factors.items()
        ]
        return f"{self.scaling} as a start, outermost first\n{text_table(rows)}"


def start_skips_(
    model: nn.Module,
    config: Scaling | str | dict[str, Any] = "cs",
    example_inputs: ExampleInputs = None,
    *,
    plan: SkipPlan | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
) -> SkipStart:
    """Multiply the coefficients of a constant scaling into the weights that read each long skip, in place.

    Call it once, after building the model and before the first step of training: a second call squares κ_i. Nothing
    is attached, nothing has to be saved, and the model has the keys that it had. At the start it computes what
    `scale_skips_(model, config)` computes; from then on κ_i is a weight like any other. The long skips are found or
    given as in `scale_skips_`.

    Where a norm reads the merge (GroupNorm in UNets, LayerNorm in HunyuanDiT and Skip-DiT), it would divide κ_i out or
    change it. There κ_i goes into the layers after the norm, as `ConstantScaling(behind_norms=True)` does when it is
    attached; the result names these norms, and the log says so. Where skips are added, κ_i goes into the layer that
    makes the skip, if nothing else reads it.

    All long skips or none: if one of them cannot be folded exactly, UnfoldableSkipsError says why and what to do
    instead, and no weight has changed.
    """
    config, host = as_scaling(config), host_of(model)
    name = type(host.model).__name__
    if scaled_host_of(model).is_scaled or (isinstance(host.model, nn.Module) and has_scaling(host.model)):
        raise AlreadyScaledError(
            f"the long skips of this {name} are scaled already, and a start would scale them twice: "
            f"unscale_(model) first, or fold_(model) to put the constants that it has into the weights"
        )
    own = host.plan() if host.is_native else None
    if plan is not None and own is not None and plan.sites != own.sites:
        raise InvalidConfigError(f"the plan is for a different model than this {name}")
    plan = find_skips(model, example_inputs, include=include, exclude=exclude) if plan is None else plan
    scaling = config.build(plan.sites)
    reasons = {skip.index: _obstacle(host, skip, scaling, _targets(skip, scaling, start=True)) for skip in plan}
    reasons = {index: reason for index, reason in reasons.items() if reason}
    if reasons:
        lines = [f"  long skip {i} ({plan[i].ends}): {reason}" for i, reason in reasons.items()]
        shown = [*lines[:4], f"  and {len(lines) - 4} more"] if len(lines) > 5 else lines
        advice = "attach the scaling with scale_skips_, or leave these skips out with exclude="
        if any(scaling.constants(i) is None for i in reasons):
            advice = (
                'a start needs constants, such as "cs"; for learned or data-dependent coefficients use scale_skips_'
            )
        raise UnfoldableSkipsError(
            f"{len(reasons)} of {len(plan)} long skips of this {name} cannot be started by their weights, so nothing "
            f"was changed:\n" + "\n".join([*shown, advice]),
            reasons,
        )
    factors = {skip.index: scaling.constants(skip.index) or UNSCALED for skip in plan}
    layers = {skip.index: _multiply_(host, skip, scaling, factors[skip.index], start=True) for skip in plan}
    after = [skip for skip in plan if layers[skip.index] and _is_after_norm(skip, scaling, start=True)]
    if after and not getattr(config, "behind_norms", False):
        logger.info("κ of long skips %s is in the weights after their norms", ", ".join(str(s.index) for s in after))
    main = {index: found.main for index, found in factors.items()}
    return SkipStart(
        spelled(config.to_dict()),
        {index: found.skip for index, found in factors.items()},
        layers,
        main if set(main.values()) != {1.0} else {},
        {skip.index: skip.readers.where for skip in after},
    )


# Which layers read a long skip, and can their weights take a constant?


def _is_after_norm(skip: LongSkip, scaling: SkipScaling, start: bool = False) -> bool:
    """Whether κ_i acts after the norm that reads the merge. A start always does, where the layers there are known."""
    return acts_after_norm(skip, scaling) or (start and bool(skip.readers.norm and skip.readers.behind_norm))


def _targets(skip: LongSkip, scaling: SkipScaling, start: bool = False) -> tuple[FoldTarget, ...]:
    if scaling.constants(skip.index) == UNSCALED:
        return ()
    return skip.readers.behind_norm if _is_after_norm(skip, scaling, start) else skip.readers.fold


def _obstacle(host: Host, skip: LongSkip, scaling: SkipScaling, targets: tuple[FoldTarget, ...]) -> str:
    """Why κ_i cannot go into the weights; empty if it can."""
    constants = scaling.constants(skip.index)
    if constants is None:
        return scaling.config.unfoldable
    if constants == UNSCALED:
        return ""
    if host.is_native:
        meta = isinstance(host.model, nn.Module) and any(p.is_meta for p in host.model.parameters())
        return f"{skip.consumer} is on the meta device and has no weights yet" if meta else ""
    if not targets:
        return skip.readers.unfoldable or "no layer takes it as it is"
    if constants.main != 1.0 and any(target.output for target in targets):
        return "its main path cannot be folded"
    _require_no_adapters(host.model, [target.module for target in targets])
    return next(filter(None, (_layer_obstacle(host.model, target) for target in targets)), "")


def _layer_obstacle(model: nn.Module, target: FoldTarget) -> str:
    """What has become of a layer since it was planned: it was replaced, or a parametrisation computes its weight."""
    name = target.module
    try:
        layer: Any = model.get_submodule(name)
    except AttributeError:
        return f"{name} is not the layer that the plan names"
    plain = next((cls for cls in FOLDING if isinstance(layer, cls)), None)
    if plain is None or type(layer).forward is not plain.forward or "forward" in vars(layer):
        return f"{name} is a {type(layer).__name__}, not the layer that the plan names"
    if getattr(type(layer), "_conv_forward", None) is not getattr(plain, "_conv_forward", None):
        return f"{name} is a {type(layer).__name__}, which changes its weight"
    weight = layer._parameters.get("weight")
    if weight is None or hasattr(layer, "parametrizations"):
        return f"the weight of {name} is computed"
    if weight.is_meta:
        return f"{name} is on the meta device and has no weights yet"
    owners = [m for m in model.modules() if any(p is weight for p in m._parameters.values())]
    return f"the weight of {name} belongs to other modules, too" if len(owners) > 1 else ""


def _require_no_adapters(model: nn.Module, names: list[str]) -> None:
    """PEFT puts a layer of its own around a layer, and keeps its weights elsewhere."""
    found = [(name, dict(model.named_modules()).get(name)) for name in names]
    adapted = [n for n, layer in found if hasattr(layer, "adapter_layer_names") or hasattr(layer, "base_layer")]
    if adapted:
        raise UnsupportedModelError(
            f"the coefficients cannot be multiplied into layers with adapters: {', '.join(adapted)}. Nothing was "
            f"changed. Merge the adapters into the weights first: model = model.merge_and_unload() (PEFT), or "
            f"unet.fuse_lora() and unet.unload_lora() (diffusers)"
        )


@torch.no_grad()
def _multiply_(
    host: Host, skip: LongSkip, scaling: SkipScaling, factors: Constants, start: bool = False
) -> tuple[str, ...]:
    """Multiply the weights that read merge i by these factors. Returns the names of their layers."""
    if factors == UNSCALED:
        return ()
    if host.is_native:
        host.model.fold_skip(skip.index, factors)
        return (skip.consumer or "the model",)
    targets = _targets(skip, scaling, start)
    for target in targets:
        layer: Any = host.model.get_submodule(target.module)
        if target.output:
            layer.weight.mul_(factors.skip)
            if layer.bias is not None:
                layer.bias.mul_(factors.skip)
            continue
        for first, length, factor in (
            (target.start, target.length, factors.skip),
            (target.main_start, target.main_length, factors.main),
        ):
            for weights in weights_reading(layer, first, length):
                weights.mul_(factor)
    return tuple(target.module for target in targets)
