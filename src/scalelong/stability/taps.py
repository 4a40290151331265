"""Where to listen in a network: at its long skips and at the blocks that they join."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..skips.attach import operand
from ..skips.plan import LongSkip, SkipPlan

MIDDLES = ("middle", "mid_block", "middle_block", "mid", "bottleneck")
"""Names under which the block between encoder and decoder is known."""


@dataclass
class Meter:
    """Size of the tensors that passed since it was switched on: RMS and largest magnitude, kept on their device."""

    on: bool = False
    training_only: bool = False
    """Whether to leave out passes without gradients: validation and sampling between two steps."""
    skips: dict[int, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    """The largest number of the dtype of each block's output."""

    @property
    def listening(self) -> bool:
        return self.on and (not self.training_only or torch.is_grad_enabled())

    def clear(self) -> None:
        self.skips, self.blocks, self.limits = {}, {}, {}


def size_of(tensor: Tensor) -> Tensor:
    """(RMS, largest magnitude). Half precision is widened first: the square of 256 overflows it."""
    values = tensor.detach()
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    rms = torch.linalg.vector_norm(values, dtype=wide) / max(values.numel(), 1) ** 0.5
    return torch.stack([rms, torch.linalg.vector_norm(values, float("inf"), dtype=wide)])


class BlockTap:
    """Forward hook of a block."""

    def __init__(self, meter: Meter, name: str) -> None:
        self.meter, self.name = meter, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self.meter.listening:
            tensor = first_tensor(output)
            if tensor is not None:
                self.meter.blocks[self.name] = size_of(tensor)
                self.meter.limits[self.name] = torch.finfo(tensor.dtype).max


class SkipTap:
    """Hook that reads a long skip where it leaves its producer or enters its merge, before it is scaled."""

    def __init__(self, meter: Meter, skip: LongSkip) -> None:
        self.meter, self.skip = meter, skip

    def of_output(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        self.read(first_tensor(output))

    def of_argument(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        place = self.skip.attachment
        if self.meter.listening and place is not None:
            self.read(operand((args, kwargs), place))

    def read(self, tensor: Tensor | None) -> None:
        if self.meter.listening and tensor is not None:
            self.meter.skips[self.skip.index] = size_of(tensor)


def first_tensor(output: Any) -> Tensor | None:
    """The floating-point tensor of an output: itself, or the first entry of a tuple, or diffusers' `sample`."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, tuple | list):
        return next((found for entry in output if (found := first_tensor(entry)) is not None), None)
    return first_tensor(getattr(output, "sample", None)) if output is not None else None


def block_names(model: nn.Module, plan: SkipPlan) -> list[str]:
    """The blocks in the order of the network: producers of skips, the middle, the blocks that merge them."""
    middle = [name for name in MIDDLES if isinstance(getattr(model, name, None), nn.Module)]
    producers = [skip.producer for skip in plan]
    consumers = [skip.consumer for skip in reversed(tuple(plan))]
    names = dict.fromkeys([*producers, *middle[:1], *consumers])
    return [name for name in names if name and _exists(model, name)]


def listen(model: nn.Module, plan: SkipPlan, meter: Meter) -> list[RemovableHandle]:
    """Hooks on all skips and blocks. They only read."""
    handles = []
    for name in block_names(model, plan):
        handles.append(model.get_submodule(name).register_forward_hook(BlockTap(meter, name)))
    for skip in plan:
        tap, place = SkipTap(meter, skip), skip.attachment
        if place is not None and place.side == "argument" and _exists(model, place.module):
            # In front of the hooks that scale, so that the skip is seen as it was made.
            module = model.get_submodule(place.module)
            handles.append(module.register_forward_pre_hook(tap.of_argument, prepend=True, with_kwargs=True))
        elif skip.producer and _exists(model, skip.producer):
            module = model.get_submodule(skip.producer)
            handles.append(
                module.register_forward_hook(tap.of_output, prepend=place is not None and place.side == "output")
            )
    return handles


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
