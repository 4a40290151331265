"""Hosts: models with long skips.

    Host           any model: hooks and rewritten functions, by a plan
    NativeHost     the model scales its skips itself, as our U-ViT does

`host_of(model)` chooses, behind the wrappers of torch.compile, DDP, FSDP, weight averaging and adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AmbiguousSkipsError, InvalidConfigError, NotScaledError
from ..finding import FoldTarget, SkipHost, SkipPlan, native_plan, unwrap
from ..scaling import UNSCALED, Constants, NoScaling, SkipScaling
from .attach import Attached, active_scaling, acts_behind_norm, attach_, attached, detach_, has_scaling, reset_compiler
from .record import describe, erase_record_, write_record_


class Host:
    """A model whose long skips are, or can be, scaled: by hooks and rewritten functions, by a plan."""

    is_native = False

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def state(self) -> Attached | None:
        return attached(self.model) if isinstance(self.model, nn.Module) else None

    @property
    def scaling(self) -> SkipScaling | None:
        return active_scaling(self.model) or self.state.scaling if self.state is not None else None

    @property
    def folded(self) -> set[int]:
        """The skips whose factors are in the weights, while others are still scaled."""
        return self.state.folded if self.state is not None else set()

    def plan(self) -> SkipPlan | None:
        """The plan by which it is scaled, or that it has by itself."""
        return self.state.plan if self.state is not None else None

    def attach(self, state: Attached) -> None:
        if self.state is not None:
            detach_(self.model)
        attach_(self.model, state)

    def detach(self) -> None:
        detach_(self.model)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model as if it had never been scaled."""
        state = detach_(self.model)
        try:
            yield
        finally:
            attach_(self.model, state)

    def unfoldable(self, index: int) -> str | None:
        """Why merge i cannot be folded: a reason, "" if it can, None if there is nothing to do."""
        state = self.state
        if state is None or index in state.folded:
            return None
        constants, skip = state.scaling.constants(index), state.plan[index]
        if constants is None:
            return state.scaling.config.unfoldable
        targets = self.fold_targets(index)
        if constants == UNSCALED:
            return ""
        if not targets:
            return skip.readers.unfoldable or "no layer takes it as it is"
        if constants.main != 1.0 and any(target.output for target in targets):
            return "its main path cannot be folded"
        return ""

    def fold_targets(self, index: int) -> tuple[FoldTarget, ...]:
        """The layers whose weights take the factors of merge i."""
        state = self.state
        assert state is not None
        skip = state.plan[index]
        return skip.readers.behind_norm if acts_behind_norm(skip, state.scaling) else skip.readers.fold

    def fold(self, index: int, factors: Constants) -> None:
        """Multiply the weights that hold merge i by these factors."""
        for target in self.fold_targets(index):
            multiply_weights_(self.model.get_submodule(target.module), target, factors)

    @property
    def inputs(self) -> Any:
        """What the inputs that the model was scaled with look like, if it is known (`reruns.recalled`)."""
        return self.state.inputs if self.state is not None else None

    def constants_by_slot(self, without: set[int]) -> dict[int, float] | None:
        """The factors of all edits, 1 for those of these skips; None if some depend on the data."""
        edits = self.state.edits if self.state is not None else []
        factors = {slot: 1.0 if e.skip.index in without else e.factor for slot, e in enumerate(edits)}
        return None if None in factors.values() else {slot: factor or 0.0 for slot, factor in factors.items()}

    def finish_folding(self, folded: set[int], kept: bool) -> None:
        """The factors of these merges are in the weights now; `kept`: others are still attached."""
        state = detach_(self.model)
        state.folded |= folded
        if kept:
            attach_(self.model, state)


class NativeHost(Host):
    """A model that knows its skips and has a `skip_scaling`, as our U-ViT has."""

    is_native = True

    model: Any

    @property
    def scaling(self) -> SkipScaling:
        return self.model.skip_scaling

    def plan(self) -> SkipPlan:
        plan = native_plan(self.model)
        assert plan is not None
        return plan

    def description(self) -> dict[str, Any]:
        """For the state dict of the model."""
        return describe(self.scaling, self.plan(), self.folded)

    def write_record(self) -> None:
        """The state dict of the model says how it is scaled, if it is."""
        if isinstance(self.scaling.config, NoScaling):
            erase_record_(self.model)
        else:
            write_record_(self.model, self)

    def attach(self, state: Attached) -> None:
        if state.plan.sites != self.model.skip_sites():
            raise InvalidConfigError(f"the plan belongs to a different model than this {type(self.model).__name__}")
        self._set(state.scaling)

    def detach(self) -> None:
        self._set(NoScaling().build(self.model.skip_sites()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        scaling = self.scaling
        self.detach()
        try:
            yield
        finally:
            self._set(scaling)

    def unfoldable(self, index: int) -> str | None:
        return self.scaling.config.unfoldable if self.scaling.constants(index) is None else ""

    def fold_targets(self, index: int) -> tuple[FoldTarget, ...]:  # noqa: ARG002
        return ()

    def fold(self, index: int, factors: Constants) -> None:
        self.model.fold_skip(index, factors)

    def constants_by_slot(self, without: set[int]) -> dict[int, float] | None:  # noqa: ARG002
        return None

    def finish_folding(self, folded: set[int], kept: bool) -> None:  # noqa: ARG002
        if not kept:
            self.detach()

    def _set(self, scaling: SkipScaling) -> None:
        anchor = next(self.model.parameters(), None)
        self.model.skip_scaling = (
            scaling.to(anchor.device).train(self.model.training) if anchor is not None else scaling
        )
        self.write_record()
        reset_compiler()


def host_of(model: Any) -> Host:
    """The host of a model, for planning and scaling: behind wrappers, or the one part that scales itself."""
    inner = unwrap(model)
    return _as_host(inner)


def scaled_host_of(model: Any) -> Host:
    """The host that is scaled, wherever it lies inside the model."""
    host = host_of(model)
    if is_scaled_host(host) or not isinstance(host.model, nn.Module):
        return host
    inside = {name: part for name, module in host.model.named_modules() if is_scaled_host(part := _as_host(module))}
    if len(inside) > 1:
        first = next(iter(inside))
        raise AmbiguousSkipsError(
            f"this {type(host.model).__name__} holds {len(inside)} scaled networks: {', '.join(inside)}. Pass one of "
            f"them, for example model.{first}"
        )
    return next(iter(inside.values()), host)


def _as_host(model: Any) -> Host:
    return NativeHost(model) if isinstance(model, SkipHost) else Host(model)


def is_scaled_host(host: Host) -> bool:
    return host.scaling is not None and not isinstance(host.scaling.config, NoScaling)


def require_scaled(model: Any) -> Host:
    host = scaled_host_of(model)
    if not is_scaled_host(host):
        raise NotScaledError(f"the long skips of this {type(host.model).__name__} are not scaled")
    return host


def has_scaled_part(host: Host) -> bool:
    """Whether a part of the model is scaled, but not the model."""
    return not host.is_native and host.scaling is None and has_scaling(host.model)


# Constants in the weights of layers.


@torch.no_grad()
def multiply_weights_(module: nn.Module, target: FoldTarget, factors: Constants) -> None:
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
