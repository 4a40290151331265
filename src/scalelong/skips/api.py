"""Scale the long skips of a model in place, look at the coefficients, and undo it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AlreadyScaledError, NoLongSkipsError, NotScaledError
from ..scaling.base import Scaling, SkipScaling
from ..scaling.none import NoScaling
from ..scaling.registry import as_scaling
from .host import SkipHost, unwrap


def scale_skips_(
    model: nn.Module,
    config: Scaling | str | dict[str, Any],
    example_inputs: Any = None,  # noqa: ARG001, a model that knows its skips needs none
) -> nn.Module:
    """Scale the long skips of the model, in place. All other weights stay as they are. Returns the model.

    A model that is scaled already raises AlreadyScaledError: `unscale_` it first.
    """
    host = _host(model)
    if is_scaled(model):
        raise AlreadyScaledError(
            f"the long skips of this {type(host).__name__} are scaled already ({host.skip_scaling.config}); "
            f"call unscale_(model) first"
        )
    _set(host, as_scaling(config).build(host.skip_sites()))
    return model


def unscale_(model: nn.Module) -> nn.Module:
    """Undo `scale_skips_`. The model computes what it did before, bit for bit. Returns the model."""
    host = _scaled_host(model)
    _set(host, NoScaling().build(host.skip_sites()))
    return model


@contextmanager
def unscaled(model: nn.Module) -> Iterator[nn.Module]:
    """The model as if it had never been scaled, within a `with` block."""
    host = _scaled_host(model)
    scaling = host.skip_scaling
    unscale_(model)
    try:
        yield model
    finally:
        _set(host, scaling)


@torch.no_grad()
def coefficients(model: nn.Module, *inputs: Any, reduce: bool = True, **keywords: Any) -> list[Any]:
    """κ_1 ... κ_N, outermost first: of a forward with these inputs, or without inputs of the most recent forward.

    Coefficients that depend on the data are averaged to one number each; `reduce=False` gives the tensors, which
    broadcast against the skips.
    """
    host = _host(model)
    if inputs or keywords:
        model(*inputs, **keywords)
    values = [host.skip_scaling.coefficient(site.index) for site in host.skip_scaling.sites]
    if not reduce:
        return values
    return [float(value.mean()) if isinstance(value, Tensor) else value for value in values]


def is_scaled(model: nn.Module) -> bool:
    return not isinstance(_host(model).skip_scaling.config, NoScaling)


def _host(model: nn.Module) -> SkipHost:
    host = unwrap(model)
    if not isinstance(host, SkipHost):
        raise NoLongSkipsError(f"{type(host).__name__} does not say where its long skips are")
    return host


def _scaled_host(model: nn.Module) -> SkipHost:
    if not is_scaled(model):
        raise NotScaledError("the long skips of this model are not scaled")
    return _host(model)


def _set(host: SkipHost, scaling: SkipScaling) -> None:
    if isinstance(host, nn.Module):
        anchor = next(host.parameters(), None)
        host.skip_scaling = scaling.to(anchor.device).train(host.training) if anchor is not None else scaling
    # A host that was compiled and run before would go on with the old scaling.
    torch.compiler.reset()
