"""What has to be known about single families of models."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_FREEU = ("s1", "s2", "b1", "b2")


@contextmanager
def planning_mode(model: nn.Module) -> Iterator[None]:
    """diffusers' FreeU filters the skips right before the merge: plan without it, so that the skips are seen."""
    blocks = [m for m in model.modules() if all(isinstance(getattr(m, name, None), int | float) for name in _FREEU)]
    values = [{name: getattr(block, name) for name in _FREEU} for block in blocks]
    try:
        for block in blocks:
            for name in _FREEU:
                setattr(block, name, None)
        yield
    finally:
        for block, before in zip(blocks, values, strict=True):
            for name, value in before.items():
                setattr(block, name, value)
