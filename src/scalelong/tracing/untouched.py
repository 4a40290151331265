"""Run a model without leaving a trace on it: evaluation mode inside, and afterwards everything as it was.

`with foreign_hooks_marked(model)` tells the operations of other people's hooks from those of the network.

What a forward can change is written down before and put back after, also if the forward raises: training flags,
attributes, buffers and plain tensors, lists, dictionaries and objects that the modules keep at any depth, gradients,
and the random states of Python, NumPy, torch and of generators that the modules keep.
"""

import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

_DEPTH = 8
_OUR_HOOKS = ("scalelong.skips", "scalelong.tracing")
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards the model and the random states are as before, whatever happened."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    kept = _Kept()
    for values in attributes:
        kept.add(values)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
            for module, values in zip(modules, attributes, strict=True):
                _restore_attributes(module.__dict__, values)
            kept.restore()
            for parameter, gradient in gradients:
                if parameter.grad is not gradient:
                    parameter.grad = gradient


class _Kept:
    """Everything below the attributes of the modules that can be changed in place, as it is now."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []

    def add(self, value: Any, depth: int = 0) -> None:
        # Objects that were seen are held, so that their identities are unique.
        if id(value) in self._seen or depth > _DEPTH or isinstance(value, nn.Module | type):
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, _CONTAINERS):
            self._seen[id(value)] = value
            self._containers.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self.add(item, depth + 1)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self.add(item, depth + 1)
        elif hasattr(value, "__dict__") and _is_plain_object(value):
            self._seen[id(value)] = value
            self._objects.append((value.__dict__, dict(value.__dict__)))
            for item in list(value.__dict__.values()):
                self.add(item, depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        # Weights are not changed by a forward, and a copy of all of them would double the memory.
        if not isinstance(tensor, nn.Parameter) and not tensor.requires_grad and id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor
            self._tensors.append((tensor, _version(tensor), tensor.detach().clone()))

    def restore(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state)
        for now, before in self._objects:
            _restore_attributes(now, before)
        for container, content in self._containers:
            _restore_content(container, content)
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                # BatchNorm writes its statistics without a new version.
                if _version(tensor) != version or not (tensor.is_meta or torch.equal(tensor, copy)):
                    tensor.copy_(copy)


def _is_plain_object(value: Any) -> bool:
    """An object of the model's own classes. Functions, modules and libraries, ours included, are left alone."""
    module = type(value).__module__.partition(".")[0]
    libraries = ("builtins", "torch", "numpy", "types", "functools", "weakref", "_thread", "scalelong")
    return not callable(value) and module not in libraries


def _restore_content(container: Any, content: Any) -> None:
    same = len(container) == len(content)
    if isinstance(container, dict):
        pairs = zip(container.items(), content.items(), strict=False)
        same = same and all(a is c and b is d for (a, b), (c, d) in pairs)
    elif isinstance(container, list | deque):
        same = same and all(new is old for new, old in zip(container, content, strict=False))
    else:
        same = same and container == content
    if not same:
        container.clear()
        container.extend(content) if isinstance(container, list | deque) else container.update(content)


def _restore_attributes(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# Hooks of others. A monitor that measures features runs operations between those of the network. It may read a skip
# before or behind the place where it is scaled, and it may do other things in each run.

_HOOKS = threading.local()


def in_foreign_hook() -> bool:
    """Whether a marked hook is running."""
    return getattr(_HOOKS, "depth", 0) > 0


class _Marked:
    """A hook that says when it runs."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _HOOKS.depth = getattr(_HOOKS, "depth", 0) + 1
        try:
            return self.hook(*args, **kwargs)
        finally:
            _HOOKS.depth -= 1


@contextmanager
def foreign_hooks_marked(model: nn.Module) -> Iterator[None]:
    """All hooks of the model run as they do, those of `scalelong.skips` apart as `in_foreign_hook`."""
    tables: list[dict[int, Any]] = [_module._global_forward_pre_hooks, _module._global_forward_hooks]
    for module in model.modules():
        tables += [module._forward_pre_hooks, module._forward_hooks]
    marked = []
    for table in tables:
        for key, hook in table.items():
            if not type(hook).__module__.startswith(_OUR_HOOKS):
                table[key] = _Marked(hook)
                marked.append((table, key, table[key]))
    try:
        yield
    finally:
        for table, key, mark in marked:
            if table.get(key) is mark:  # a hook may have removed itself
                table[key] = mark.hook
