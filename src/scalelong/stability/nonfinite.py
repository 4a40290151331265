"""Where the numbers of a training step stopped being finite: the step again, with every module watched.

`explain_nonfinite` runs the passes of the bad step and reports the first module with a non-finite output, the long skip
that is merged there, and the sizes of all skips on the way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..finding import native_plan
from ..models import tensors_in
from .advice import what_to_do
from .features import has_bare_merges, known_plan

NAMED = 5
"""Parameters listed by name."""
HUGE = 1e8
"""Outputs and gradients of networks that train stay far below."""
LARGEST = torch.finfo(torch.float32).max ** 0.5
"""A norm whose square float32 cannot hold."""


@dataclass
class NonFiniteReport:
    """What the forward and the backward pass of a bad step showed. Print it."""

    step: int
    last_good: int | None
    layer: str | None = None
    """The first module whose output was not finite."""
    largest: tuple[str, float] | None = None
    """The finite output with the largest magnitude before that."""
    merged: tuple[int, ...] = ()
    """The long skips that are merged in the block in which that module lies."""
    skip_rms: dict[int, float] = field(default_factory=dict)
    """Size of every long skip, as far as the pass came."""
    parameters: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    bad_input: bool = False
    rate: float | None = None
    """The learning rate of the step, where it is known."""
    gradient: float | None = None
    """The norm of the gradient, in float64: it may be beyond what float32 holds while every entry is finite."""
    bare: bool | None = None
    """Some merges have no norm (`advice.what_to_do`)."""
    rollbacks: int = 0
    """Rollbacks that were tried before and did not help."""

    def __str__(self) -> str:
        lines = [f"the loss or the gradient of step {self.step} is not finite; its update was not applied."]
        if self.bad_input:
            lines.append("The batch itself holds non-finite numbers.")
        if self.parameters:
            lines.append(f"Weights that are not finite: {_listing(self.parameters)}.")
        lines.append(self._where())
        if self.largest:
            lines.append(f"Largest output before: {self.largest[1]:.3g} in {self.largest[0]}.")
        if self.skip_rms:
            sizes = ", ".join(f"{index}: {rms:.3g}" for index, rms in sorted(self.skip_rms.items()))
            lines.append(f"RMS of the long skips (1 is the outermost): {sizes}.")
        if self.gradients:
            lines.append(f"Gradients that are not finite: {_listing(self.gradients)}.")
        good = "none was saved" if self.last_good is None else f"step {self.last_good}"
        lines.append(f"Last good checkpoint: {good}.")
        if self.rollbacks:
            tried = "1 rollback" if self.rollbacks == 1 else f"{self.rollbacks} rollbacks"
            lines.append(f"{tried} with lower rates did not help (rollbacks.json).")
        lines.append(self._advice())
        return "\n".join(lines)

    @property
    def ran_away(self) -> bool:
        """Whether numbers have grown far beyond those of any network that trains, though they may still be finite."""
        outputs = self.largest[1] if self.largest else 0.0
        return max(outputs, self.gradient or 0.0) > HUGE

    def _advice(self) -> str:
        advice = what_to_do(self.bare, self.rate)
        if self.rate is None:
            return advice
        remark = ", and the numbers have run away: that is the rate" if self.ran_away else ""
        return f"The learning rate was {self.rate:g}{remark}. {what_to_do(False, self.rate) if remark else advice}"

    def _where(self) -> str:
        if self.layer:
            merged = f", in the block that merges long skip {_listing(self.merged)}" if self.merged else ""
            return f"First module with a non-finite output: {self.layer}{merged}."
        if self.gradients:
            return "All outputs of the forward pass are finite; the backward pass is not."
        if self.gradient is not None and self.gradient > LARGEST:
            return f"All numbers are finite, but the norm of the gradient is {self.gradient:.1e}, beyond float32."
        if self.ran_away:
            return "A second pass over the same batch was finite, with numbers near the end of what float32 holds."
        return "A second pass over the same batch was finite: look for hardware faults or random layers."


def explain_nonfinite(
    model: nn.Module,
    backward: Callable[[], Any],
    inputs: list[Tensor],
    step: int,
    last_good: int | None,
    *,
    rate: float | None = None,
) -> NonFiniteReport:
    """Run `backward` (the passes of the bad step on this model) and watch every module."""
    found = NonFiniteReport(step, last_good, bad_input=not all(map(_finite, inputs)), rate=rate)
    found.bare = has_bare_merges(model)
    found.parameters = [name for name, value in model.named_parameters() if not _finite(value)]
    model.zero_grad(set_to_none=True)
    with _watched(model, found):
        backward()
    found.gradients = [
        name for name, value in model.named_parameters() if value.grad is not None and not _finite(value.grad)
    ]
    norms = [
        torch.linalg.vector_norm(value.grad.detach().cpu(), dtype=torch.float64)
        for value in model.parameters()
        if value.grad is not None and not hasattr(value.grad, "full_tensor")  # not where gradients are sharded (FSDP2)
    ]
    found.gradient = float(torch.linalg.vector_norm(torch.stack(norms))) if norms and not found.gradients else None
    model.zero_grad(set_to_none=True)
    return found


@contextmanager
def _watched(model: nn.Module, found: NonFiniteReport) -> Iterator[None]:
    merges, merges_itself = merge_blocks(model), native_plan(model) is not None
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(_OutputWatcher(found, name or "the whole model", merges)))
        if merges_itself and name in merges:
            handles.append(module.register_forward_pre_hook(_SkipMeter(found, merges[name][0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def merge_blocks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The modules that merge long skips, by name, with their indices i."""
    found: dict[str, tuple[int, ...]] = {}
    for skip in known_plan(model) or ():
        found[skip.consumer] = (*found.get(skip.consumer, ()), skip.index)
    return found


@dataclass
class _OutputWatcher:
    """Forward hook. Hooks of inner modules come first, so the first non-finite output is that of the innermost."""

    found: NonFiniteReport
    name: str
    merges: dict[str, tuple[int, ...]]

    def __call__(self, module: nn.Module, _: Any, output: Any) -> None:
        outputs = list(tensors_in(output))
        if self.found.layer is not None or not outputs:
            return
        title = f"{self.name} ({type(module).__name__})"
        if all(map(_finite, outputs)):
            peak = max(float(value.detach().abs().max()) for value in outputs if value.numel())
            if self.found.largest is None or peak > self.found.largest[1]:
                self.found.largest = (title, peak)
        else:
            self.found.layer = title
            inside = (indices for block, indices in self.merges.items() if f"{self.name}.".startswith(f"{block}."))
            self.found.merged = next(inside, ())


@dataclass
class _SkipMeter:
    """Forward pre-hook of a block that is called as block(main, skip, ...)."""

    found: NonFiniteReport
    index: int

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        skip = list(tensors_in(inputs))[1]
        self.found.skip_rms[self.index] = float(skip.detach().float().square().mean().sqrt())


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.detach()).all()) if value.is_floating_point() else True


def _listing(names: Sequence[object]) -> str:
    rest = len(names) - NAMED
    return ", ".join(map(str, names[:NAMED])) + (f" and {rest} more" if rest > 0 else "")
