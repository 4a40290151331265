"""Models that scale their long skips themselves, and the wrappers that stand around a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..scaling import Constants, SkipScaling, SkipSite
from .plan import Attachment, LongSkip, Places, PlannedMerge, SkipPlan

STATE = "_scalelong"
"""The attribute of a scaled model that holds what was attached to it."""

_WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel")


@runtime_checkable
class SkipHost(Protocol):
    """What a model offers that scales its long skips itself."""

    skip_scaling: SkipScaling

    def skip_sites(self) -> tuple[SkipSite, ...]:
        """The long skips, outermost first."""
        ...

    def fold_skip(self, index: int, factors: Constants) -> None:
        """Bake the factors of merge i into the weights behind it."""
        ...


@contextmanager
def paused(host: nn.Module) -> Iterator[None]:
    """The model without its scaling, if it has any."""
    state = host.__dict__.get(STATE)
    if state is None:
        yield
    else:
        with state.paused(host):
            yield


def unwrap(model: Any) -> Any:
    """The model behind the wrappers of torch.compile, DDP, FSDP, weight averaging and adapters."""
    while True:
        if type(model).__name__ in _WRAPPERS and type(model).__module__.startswith("torch."):
            model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        elif isinstance(model, nn.Module) and callable(getattr(model, "get_base_model", None)):
            base = model.get_base_model()  # pyright: ignore[reportCallIssue]  # PEFT
            if base is model or not isinstance(base, nn.Module):
                break
            model = base
        else:
            break
    if isinstance(model, nn.Module) and not isinstance(model, SkipHost):
        inside = [module for module in model.modules() if isinstance(module, SkipHost)]
        return inside[0] if len(inside) == 1 else model
    return model


def native_plan(model: Any) -> SkipPlan | None:
    """The plan of a model that scales its skips itself; None for other models."""
    if not isinstance(model, SkipHost):
        return None
    sites = model.skip_sites()
    encoder, decoder = _block_names(model, len(sites))
    skips = tuple(
        LongSkip(
            index=site.index,
            producer=encoder[site.index - 1],
            consumer=decoder[site.index - 1],
            shape=(1, site.tokens, site.channels) if site.tokens else (1, site.channels),
            site=site,
            merge=PlannedMerge(kind="cat" if site.main_channels is not None else "add", location=type(model).__name__),
            places=Places(skip=Attachment(kind="native", module=decoder[site.index - 1], axis=site.channel_axis)),
        )
        for site in sites
    )
    return SkipPlan(type(model).__name__, skips)


def _block_names(model: Any, count: int) -> tuple[list[str], list[str]]:
    """The names of the blocks on either side, where the model calls them encoder and decoder."""
    if all(isinstance(getattr(model, side, None), nn.ModuleList) for side in ("encoder", "decoder")):
        return [f"encoder.{i}" for i in range(count)], [f"decoder.{count - 1 - i}" for i in range(count)]
    return [""] * count, [""] * count
