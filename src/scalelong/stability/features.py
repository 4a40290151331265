"""Features of a network, read at its long skips and at the blocks that they join.

Hooks put sizes of tensors, and how alike the tokens of a block are, into a `Meter`. `measure` is one forward with
them. Of readings before a collapse, `first_to_leave` finds the block or skip that changed first.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attaching import host_of, is_scaled, operand, plan_of
from ..finding import ExampleInputs, SkipPlan, find_skips, native_plan, unwrap
from ..models import evaluating, first_tensor
from ..scaling import SkipSite
from .alarms import bare_merges

MIDDLES = ("middle", "mid_block", "middle_block", "mid", "bottleneck")
"""Names under which the block between encoder and decoder is known."""


@dataclass
class Meter:
    """Size of the tensors that passed since it was switched on: RMS and largest magnitude, kept on their device."""

    on: bool = False
    training_only: bool = False
    """True to leave out passes without gradients: validation and sampling between two steps."""
    skips: dict[int, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    alike: dict[str, Tensor] = field(default_factory=dict)
    """Similarity of the tokens of each block's output."""
    limits: dict[str, float] = field(default_factory=dict)
    """The largest number of the dtype of each block's output."""

    @property
    def reading(self) -> bool:
        return self.on and (not self.training_only or torch.is_grad_enabled())

    def clear(self) -> None:
        self.skips, self.blocks, self.alike, self.limits = {}, {}, {}, {}

    def sizes(self) -> dict[str, float]:
        """All that may leave its level before a collapse, by its name in words (`first_to_leave`)."""
        found = {f"block {name}": size[0] for name, size in self.blocks.items()}
        found |= {f"skip {index}": size[0] for index, size in self.skips.items()}
        found |= {f"tokens of {name}": apart(value) for name, value in self.alike.items()}
        numbers = torch.stack([value.float() for value in found.values()]).tolist() if found else []
        return dict(zip(found, numbers, strict=True))


def size_of(tensor: Tensor) -> Tensor:
    """(RMS, largest magnitude). Half precision is widened first: the square of 256 overflows it."""
    values = tensor.detach()
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    rms = torch.linalg.vector_norm(values, dtype=wide) / max(values.numel(), 1) ** 0.5
    return torch.stack([rms, torch.linalg.vector_norm(values, float("inf"), dtype=wide)])


IMAGES, POSITIONS = 4, 16
"""Images and positions that the similarity of tokens is read from."""
LEAST_APART = 0.05
"""Tokens that are more alike than this differ by rounding and by luck."""


def similarity_of(tensor: Tensor, channel_axis: int = 1, batch_axis: int | None = 0) -> Tensor | None:
    """The mean cosine between positions (tokens, pixels) of an image; None where there is one position only.

    The end of a collapse is a network whose positions are all alike: 1.
    """
    values, channel_axis = tensor.detach(), channel_axis % tensor.dim()
    if batch_axis is None:
        values, batch_axis, channel_axis = values[None], 0, channel_axis + 1
    values = values.movedim((batch_axis, channel_axis), (0, -1))[:IMAGES].flatten(1, -2)  # (B, L, D)
    values = values[:, :: max(1, values.shape[1] // POSITIONS)][:, :POSITIONS].float()
    count = values.shape[1]
    if count < 2:
        return None
    unit = torch.nn.functional.normalize(values, dim=-1)
    return ((unit.sum(1).square().sum(-1) - count) / (count * (count - 1))).mean()


def apart(similarity: Any) -> Any:
    """How far tokens are apart, 1 - cosine, at least LEAST_APART: that falls as tokens become alike."""
    return (
        (1 - similarity).clamp(min=LEAST_APART) if isinstance(similarity, Tensor) else max(1 - similarity, LEAST_APART)
    )


def block_names(model: nn.Module, plan: SkipPlan) -> list[str]:
    """The blocks in the order of the network: producers of skips, the middle, the blocks that merge them."""
    middle = [name for name in MIDDLES if isinstance(getattr(model, name, None), nn.Module)]
    producers = [skip.producer for skip in plan]
    consumers = [skip.consumer for skip in reversed(tuple(plan))]
    names = dict.fromkeys([*producers, *middle[:1], *consumers])
    return [name for name in names if name and _exists(model, name)]


def attach_meter(model: nn.Module, plan: SkipPlan, meter: Meter) -> list[RemovableHandle]:
    """Hooks on all skips and blocks. They only read."""
    sites = {name: skip.site for skip in plan for name in (skip.producer, skip.consumer)}
    innermost = tuple(plan)[-1].site
    handles = []
    for name in block_names(model, plan):
        hook = _block_hook(meter, name, sites.get(name, innermost))
        handles.append(model.get_submodule(name).register_forward_hook(hook))
    for skip in plan:
        place = skip.places.skip
        if place is not None and place.side == "argument" and _exists(model, place.module):
            # In front of the hooks that scale, so that the skip is seen as it was made.
            module, hook = model.get_submodule(place.module), _skip_hook(meter, skip.index, place)
            handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        elif skip.producer and _exists(model, skip.producer):
            module, first = model.get_submodule(skip.producer), place is not None and place.side == "output"
            handles.append(module.register_forward_hook(_skip_hook(meter, skip.index), prepend=first))
    return handles


def _block_hook(meter: Meter, name: str, site: SkipSite) -> Callable[..., None]:
    """`site` says along which axes the block's output has channels and images."""

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        tensor = first_tensor(output) if meter.reading else None
        if tensor is not None:
            meter.blocks[name], meter.limits[name] = size_of(tensor), torch.finfo(tensor.dtype).max
            alike = similarity_of(tensor, site.channel_axis, site.batch_axis) if tensor.dim() > 2 else None
            if alike is not None:
                meter.alike[name] = alike

    return hook


def _skip_hook(meter: Meter, index: int, place: Any = None) -> Callable[..., None]:
    """A long skip where it enters its merge, an argument, or else where it leaves its producer, an output."""

    def hook(_: nn.Module, args: Any, last: Any) -> None:
        if meter.reading:
            tensor = first_tensor(last) if place is None else operand((args, last), place)
            if tensor is not None:
                meter.skips[index] = size_of(tensor)

    return hook


def parameters_by_block(model: nn.Module, names: list[str]) -> dict[str, list[nn.Parameter]]:
    """Every trainable parameter once, with the innermost block that holds it; those of no block are the "rest"."""
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in [*names, "rest"]}
    for full, parameter in model.named_parameters():
        if parameter.requires_grad:
            holders = [name for name in names if full.startswith(f"{name}.")]
            groups[max(holders, key=len, default="rest")].append(parameter)
    return {name: group for name, group in groups.items() if group}


def _exists(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


# The features of a network on one batch: what a fixed probe batch shows while the weights change.


def plan_for(model: nn.Module, example_inputs: ExampleInputs = None) -> SkipPlan:
    """The plan by which a model is scaled, or the one that is found in it."""
    return plan_of(model) if is_scaled(model) else find_skips(model, example_inputs)


def known_plan(model: nn.Module) -> SkipPlan | None:
    """The plan, where it is known without a look at the model: it is scaled, or says itself where its skips are."""
    return plan_of(model) if is_scaled(model) else native_plan(unwrap(model))


def has_bare_merges(model: nn.Module, plan: SkipPlan | None = None) -> bool | None:
    """Some long skips are merged without a norm (`advice.what_to_do`); None where the skips are not known."""
    plan = plan or known_plan(model)
    return None if plan is None else bool(bare_merges(plan, scaling_name(model)))


def scaling_name(model: nn.Module) -> str | None:
    """The name of the method by which a model is scaled; None if it is not."""
    scaling = host_of(model).scaling
    return None if scaling is None else scaling.config.name


def on_device_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with their tensors on the device of the model's first parameter."""
    first = next(model.parameters(), None)

    def moved(value: Any) -> Any:
        return value.to(first.device) if isinstance(value, Tensor) and first is not None else value

    return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}


def measure(model: nn.Module, plan: SkipPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Meter:
    """One forward in eval mode, without gradients and without the compiler. Nothing of the model changes."""
    host = unwrap(model)
    meter = Meter(on=True)
    handles = attach_meter(host, plan, meter)
    try:
        with evaluating(host), torch.no_grad(), eager():
            host(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return meter


def eager() -> AbstractContextManager[Any]:
    """Compiled blocks run as they are written, so that hooks are called."""
    # The compiler is slow to import, and where it is not there yet nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


# What left first

LEFT = 2.0
"""A block or skip has left its level when it is larger or smaller than that by this factor."""

Readings = Sequence[tuple[int, Mapping[str, float]]]
"""(step, sizes by name), in the order of the steps."""


def first_to_leave(readings: Readings, calm: int) -> dict[str, Any] | None:
    """Against the last reading until step `calm`: the first one that changed by LEFT; of several, the one furthest."""
    before = [sizes for step, sizes in readings if step <= calm] or [sizes for _, sizes in readings[:1]]
    for step, sizes in readings:
        if step <= calm or not before:
            continue
        level = before[-1]
        changes = {name: _change(size, level.get(name, 0.0)) for name, size in sizes.items()}
        where = max(changes, key=lambda name: changes[name], default=None)
        if where is not None and changes[where] > math.log(LEFT):
            factor = sizes[where] / level[where] if level.get(where) else math.inf
            return {"where": where, "step": step, "factor": float(f"{factor:.4g}") if math.isfinite(factor) else None}
    return None


def _change(size: float, level: float) -> float:
    """|log(size / level)|; a size that is not finite has left furthest."""
    if not math.isfinite(size):
        return math.inf
    return abs(math.log(size / level)) if size > 0 and level > 0 else 0.0


def describe_left_first(left: Mapping[str, Any] | None) -> str:
    """A sentence about what `first_to_leave` found."""
    if left is None:
        return "No block and no long skip had left its size by a factor of two."
    if str(left["where"]).startswith("tokens of "):
        return f"What left first: the {left['where']}, which became alike by step {left['step']}."
    grown = "became infinite" if left["factor"] is None else f"was {left['factor']:.3g} times its size"
    return f"What left first: {left['where']}, which {grown} at step {left['step']}."
