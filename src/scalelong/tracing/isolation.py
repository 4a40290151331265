"""Run a model in isolation: evaluation mode inside, and afterwards everything is as it was.

    with isolated_run(model) as snapshot:
        model(x)
        snapshot.restore()    # between two forwards that must not see each other
        model(x)

A forward can change training flags, attributes, buffers and plain tensors, lists, dictionaries and objects that the
modules keep at any depth, gradients, weights (edm2 normalises its weights in the training forward), and the random
states of Python, NumPy, torch on all devices, and of generators that the modules keep. All of this is restored, also if
the forward raises. Weights are copied at the first write to them, so that a model which writes none costs no memory.

`with foreign_hooks_marked(model)` tells the operations of other people's hooks from those of the network.
"""

import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_DEPTH = 8
_OUR_HOOKS = ("scalelong.attaching", "scalelong.tracing")
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_LIBRARIES = ("builtins", "torch", "numpy", "types", "functools", "weakref", "_thread", "scalelong")


@contextmanager
def isolated_run(*models: nn.Module) -> Iterator["StateSnapshot"]:
    """Evaluation mode inside; afterwards the models and all random states are as before, whatever happened."""
    snapshot = StateSnapshot(*models)
    try:
        for module in snapshot.modules:
            module.training = False
        with snapshot.weights:
            yield snapshot
    finally:
        snapshot.restore()


class StateSnapshot:
    """The state of models and of all random generators at one moment."""

    def __init__(self, *models: nn.Module) -> None:
        self.modules = [module for model in models for module in model.modules()]
        parameters = [parameter for model in models for parameter in model.parameters()]
        self.weights = _KeepWeights(parameters)
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._seen: dict[int, Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        """Lists, dictionaries, the attributes of modules and objects; with what is in them."""
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._generators = [(generator, generator.get_state()) for generator in default_generators()]
        for module in self.modules:
            self._add(module.__dict__, 0)

    def _add(self, value: Any, depth: int) -> None:
        """Write down what is in a value, as far as it can be changed in place."""
        if value is None or isinstance(value, nn.Module | nn.Parameter | type | str | int | float):
            return
        # Objects that were seen are held, so that their identities are unique.
        if id(value) in self._seen or depth > _DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if not value.requires_grad:
                self._tensors.append((value, _version(value), value.detach().clone()))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, _CONTAINERS):
            self._containers.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self._add(item, depth + 1)
        elif isinstance(value, tuple | frozenset):
            for item in value:
                self._add(item, depth + 1)
        elif type(value).__module__.partition(".")[0] not in _LIBRARIES and not callable(value):
            # An object of the model's own classes. Functions, modules and libraries, ours included, are left alone.
            self._add(getattr(value, "__dict__", None), depth)

    def restore(self) -> None:
        """Bring everything back to what it was."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._generators:
            generator.set_state(state)
        for now, before in self._containers:
            # By identity: the contents may not know how to compare themselves. Keys as well, in their order.
            contents = ([*c, *c.values()] if isinstance(c, dict) else [*c] for c in (now, before))
            if len(now) != len(before) or not all(map(is_, *contents)):
                now.clear()
                now.extend(before) if isinstance(now, list | deque) else now.update(before)
        with torch.no_grad():
            for tensor, version, copy in self._tensors:
                # BatchNorm writes its statistics without a new version.
                if _version(tensor) != version or not (tensor.is_meta or torch.equal(tensor, copy)):
                    tensor.copy_(copy)
        self.weights.restore()
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def seed(self) -> None:
        """The same random numbers for every run. Only generators that `restore` brings back are touched."""
        for generator, _ in self._generators:
            generator.manual_seed(0)
        random.seed(0)
        if self._numpy is not None:
            sys.modules["numpy"].random.seed(0)


def default_generators() -> list[torch.Generator]:
    """The generators of the CPU and of all devices that are in use. `torch.manual_seed` would seed the others, too."""
    found: list[torch.Generator] = [torch.default_generator]
    for name in ("cuda", "xpu"):
        device: Any = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            found += device.default_generators
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


class _KeepWeights(TorchDispatchMode):
    """Copies a parameter right before an operation writes to it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        plain = [p for p in parameters if type(p) is nn.Parameter and not p.is_meta]
        self._aliases = [(parameter, parameter.detach()) for parameter in plain]
        self._by_storage: defaultdict[int, list[Tensor]] = defaultdict(list)
        for _, alias in self._aliases:
            self._by_storage[alias.untyped_storage().data_ptr()].append(alias)
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in pytree.tree_leaves((args, kwargs)):
                if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
                    for alias in self._by_storage.get(tensor.untyped_storage().data_ptr(), ()):
                        if id(alias) not in self._copies:
                            self._copies[id(alias)] = (alias, alias.clone())
        return func(*args, **kwargs)

    def restore(self) -> None:
        with torch.no_grad():
            for alias, copy in self._copies.values():
                if not torch.equal(alias, copy):
                    alias.copy_(copy)
            for parameter, alias in self._aliases:
                if parameter.data_ptr() != alias.data_ptr():  # `parameter.data = ...`
                    parameter.data = alias


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# Hooks of others. A monitor that measures features runs operations between those of the network. It may read a skip
# before or after the place where it is scaled, and it may do other things in each run.

_HOOKS = threading.local()


def in_foreign_hook() -> bool:
    """True if a marked hook is running."""
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
    """All hooks of the model run as they do, those of `scalelong.attaching` apart as `in_foreign_hook`."""
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
