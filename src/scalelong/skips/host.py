"""Hosts: models that know their own long skips and scale them without hooks, and the wrappers around models."""

from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..scaling.base import Constants, SkipScaling, SkipSite
from .plan import Attachment, LongSkip, SkipPlan

_WRAPPERS = ("OptimizedModule", "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "AveragedModel")


@runtime_checkable
class SkipHost(Protocol):
    skip_scaling: SkipScaling

    def skip_sites(self) -> tuple[SkipSite, ...]:
        """The long skips, outermost first."""
        ...

    def fold_skip(self, index: int, factors: Constants) -> None:
        """Bake the factors of merge i into the weights behind it."""
        ...


def unwrap(model: Any) -> Any:
    """The model behind the wrappers of torch.compile, DDP, FSDP and weight averaging."""
    while type(model).__name__ in _WRAPPERS and type(model).__module__.startswith("torch."):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    if isinstance(model, nn.Module) and not isinstance(model, SkipHost):
        inside = [module for module in model.modules() if isinstance(module, SkipHost)]
        return inside[0] if len(inside) == 1 else model
    return model


def native_plan(host: nn.Module) -> SkipPlan | None:
    """The plan of a host; None for other models."""
    if not isinstance(host, SkipHost):
        return None
    sites = host.skip_sites()
    encoder, decoder = _names(host, len(sites))
    skips = tuple(
        LongSkip(
            index=site.index,
            producer=encoder[site.index - 1],
            consumer=decoder[site.index - 1],
            merge="cat" if site.main_channels is not None else "add",
            shape=(1, site.tokens, site.channels) if site.tokens else (1, site.channels),
            site=site,
            location=type(host).__name__,
            attachment=Attachment(kind="native", module=decoder[site.index - 1], axis=site.channel_axis),
            unfoldable="" if hasattr(host, "fold_skip") else "the model does not fold",
        )
        for site in sites
    )
    return SkipPlan(type(host).__name__, skips)


def _names(host: Any, count: int) -> tuple[list[str], list[str]]:
    """The names of the blocks on either side, where the host calls them encoder and decoder."""
    if all(isinstance(getattr(host, side, None), nn.ModuleList) for side in ("encoder", "decoder")):
        return [f"encoder.{i}" for i in range(count)], [f"decoder.{count - 1 - i}" for i in range(count)]
    return [""] * count, [""] * count
