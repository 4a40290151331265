"""Hosts: models with long skips.

    Host           any model: hooks and rewritten functions, by a plan
    NativeHost     the model scales its skips itself, as our U-ViT does

`host_of(model)` chooses, inside the wrappers of torch.compile, DDP, FSDP, weight averaging and adapters.
"""

from typing import Any

from torch import nn

from ..errors import AmbiguousSkipsError, InvalidConfigError, NotScaledError
from ..finding import SkipHost, SkipPlan, native_plan, unwrap
from ..scaling import NoScaling, SkipScaling
from .actions import Attached
from .attach import active_scaling, attach_, attached, detach_, forget_compiled
from .record import erase_record_, write_record_


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
    def is_scaled(self) -> bool:
        return self.scaling is not None and not isinstance(self.scaling.config, NoScaling)

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

    def detach(self) -> Attached:
        return detach_(self.model)


class NativeHost(Host):
    """A model that knows its skips and has a `skip_scaling`, as our U-ViT has."""

    is_native = True

    @property
    def scaling(self) -> SkipScaling:
        return self.model.skip_scaling

    def plan(self) -> SkipPlan:
        plan = native_plan(self.model)
        assert plan is not None
        return plan

    def write_record(self) -> None:
        """The state dict of the model says how it is scaled, if it is."""
        (write_record_ if self.is_scaled else erase_record_)(self.model)

    def attach(self, state: Attached) -> None:
        if state.plan.sites != self.model.skip_sites():
            raise InvalidConfigError(f"the plan belongs to a different model than this {type(self.model).__name__}")
        anchor = next(self.model.parameters(), None)
        scaling = state.scaling if anchor is None else state.scaling.to(anchor.device)
        self.model.skip_scaling = scaling.train(self.model.training)
        self.write_record()
        forget_compiled(self.model)

    def detach(self) -> Attached:
        state = Attached(self.plan(), self.scaling)
        self.attach(Attached(state.plan, NoScaling().build(state.plan.sites)))
        return state


def host_of(model: Any) -> Host:
    """The host of a model, for planning and scaling: inside wrappers, or the one part that scales itself."""
    return _as_host(unwrap(model))


def _as_host(model: Any) -> Host:
    return NativeHost(model) if isinstance(model, SkipHost) else Host(model)


def scaled_host_of(model: Any) -> Host:
    """The host that is scaled, wherever it lies inside the model; the model's own host if none is."""
    host = host_of(model)
    if host.is_scaled or not isinstance(host.model, nn.Module):
        return host
    inside = {name: part for name, module in host.model.named_modules() if (part := _as_host(module)).is_scaled}
    if len(inside) > 1:
        first = next(iter(inside))
        raise AmbiguousSkipsError(
            f"this {type(host.model).__name__} holds {len(inside)} scaled networks: {', '.join(inside)}. Pass one of "
            f"them, for example model.{first}"
        )
    return next(iter(inside.values()), host)


def require_scaled(model: Any) -> Host:
    host = scaled_host_of(model)
    if not host.is_scaled:
        raise NotScaledError(f"the long skips of this {type(host.model).__name__} are not scaled")
    return host
