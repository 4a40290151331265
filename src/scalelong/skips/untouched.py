"""Run a model without leaving a trace on it."""

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards the attributes, buffers and random states are as before, whatever happened."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    contents = [pair for values in attributes for pair in _contents(values)]
    tensors = [(tensor, _version(tensor), tensor.detach().clone()) for tensor in _tensors(model, attributes)]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            for module in modules:
                module.training = False
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for container, content in contents:
            _restore_content(container, content)
        for module, values in zip(modules, attributes, strict=True):
            _restore_attributes(module.__dict__, values)
        with torch.no_grad():
            for tensor, version, copy in tensors:
                if _version(tensor) != version:
                    tensor.copy_(copy)


def _contents(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Lists and dictionaries can be changed in place: a copy of what they hold."""
    plain = (list, dict, set, OrderedDict)
    return [(value, value.copy()) for value in attributes.values() if type(value) in plain]


def _restore_content(container: Any, content: Any) -> None:
    same = len(container) == len(content)
    if isinstance(container, dict):
        same = same and all(key in container and container[key] is value for key, value in content.items())
    elif isinstance(container, list):
        same = same and all(new is old for new, old in zip(container, content, strict=True))
    else:
        same = container == content
    if not same:
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


def _tensors(model: nn.Module, attributes: list[dict[str, Any]]) -> Iterator[Tensor]:
    yield from model.buffers()
    for values in attributes:
        yield from (value for value in values.values() if isinstance(value, Tensor) and not value.requires_grad)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
