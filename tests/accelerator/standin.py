"""An accelerator made of Python, for tests: device "standin", whose tensors compute on the CPU.

A tensor of it is an ordinary `torch.Tensor` whose storage is memory of the CPU, marked as a different device by DLPack.
Every operation is unwrapped, computed on the CPU and wrapped again. So it is slow, and strict as a real accelerator is:

- tensors of the CPU and of the device in one operation are refused (a number without axes may come from the CPU);
- a generator must be of the device that the random numbers are drawn on;
- float64 can be refused, as on Apple's GPUs (`StandIn.float64 = False`).

It counts what a program can wait for: `to_device` and `to_cpu` (copies of tensors) and `reads` (`item()`, `bool()`).

`install()` registers it once in a process, and nothing unregisters it: use it in a process of its own.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import to_dlpack  # pyright: ignore[reportPrivateImportUsage]

NAME = "standin"
CPU, EXTENSION = 1, 12
"""DLPack's numbers of devices."""


@dataclass
class StandIn:
    """The counts."""

    to_device: int = 0
    to_cpu: int = 0
    reads: int = 0
    float64: bool = True


counts = StandIn()


# Tensors


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", _DLDevice))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _marked(tensor: Tensor, kind: int) -> Tensor:
    """The same memory as a tensor of a different device."""
    if tensor._is_zerotensor():  # forward differentiation makes zeros that have no memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=NAME if kind == EXTENSION else "cpu")
    capsule = to_dlpack(tensor.detach())
    described = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    described.device.kind, described.device.index = kind, 0
    return torch._C._from_dlpack(capsule)  # pyright: ignore[reportAttributeAccessIssue]


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


# Operations

COPIES = {"aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize"}
INDEXED = ("aten::index", "aten::_index_put_impl_", "aten::_unsafe_index")
"""A real accelerator takes indices from the CPU as well: they are copied."""
ALSO = (
    *("aten::copy_", "aten::convolution", "aten::convolution_backward", "aten::convolution_overrideable"),
    *("aten::_local_scalar_dense", "aten::_fused_sdp_choice", "aten::native_group_norm_backward"),
)
"""Operations that torch would put together in a way that fits no device, or that are counted."""


def _kernel(name: str, op: Any) -> Any:
    returned = [
        next((i for i, a in enumerate(op._schema.arguments) if _same_alias(a, r)), None) for r in op._schema.returns
    ]
    indexed, random = (
        name.startswith(INDEXED),
        any(a.name == "generator" and a.kwarg_only for a in op._schema.arguments),
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        if name == "aten::copy_":
            return _copy(*args, **kwargs)
        if name == "aten::_fused_sdp_choice":
            return 0  # the formula itself
        if name == "aten::_local_scalar_dense":
            counts.reads += 1

        def inside(value: Any) -> Any:
            if isinstance(value, torch.device):
                return torch.device("cpu")
            if isinstance(value, torch.Generator):
                if not isinstance(value, _Generator):
                    raise RuntimeError(f"{name}: expected a generator of {NAME}, found one of the CPU")
                return value
            if not isinstance(value, Tensor):
                return value
            if _is_here(value):
                return _marked(value, CPU)
            if value.dim() and not indexed:
                raise RuntimeError(
                    f"{name}: expected all tensors to be on one device, found one of {tuple(value.shape)} on the CPU "
                    f"next to others on {NAME}"
                )
            counts.to_device += indexed
            return value

        given, named = pytree.tree_map(inside, (args, kwargs))
        if random and named.get("generator") is None:
            named["generator"] = _default
        result = op(*given, **named)
        if not counts.float64 and any(
            isinstance(t, Tensor) and t.dtype == torch.float64 for t in pytree.tree_leaves(result)
        ):
            raise TypeError(f"{name}: {NAME} has no float64")
        if len(returned) == 1 and returned[0] is not None:
            return args[returned[0]] if returned[0] < len(args) else kwargs[op._schema.arguments[returned[0]].name]
        return pytree.tree_map_only(Tensor, lambda tensor: _marked(tensor, EXTENSION), result)

    return run


def _same_alias(argument: Any, result: Any) -> bool:
    """True if the operation writes into this argument and returns it."""
    one, other = argument.alias_info, result.alias_info
    return (
        one is not None and other is not None and one.is_write and other.is_write and one.before_set == other.before_set
    )


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    counts.to_device += _is_here(target) and not _is_here(source) and source.dim() > 0
    counts.to_cpu += _is_here(source) and not _is_here(target)
    inside = [_marked(t, CPU) if _is_here(t) else t.detach() for t in (target, source)]
    inside[0].copy_(inside[1])
    return target


class _Generator(torch.Generator):
    """Generators of the device. Their numbers are those of the CPU."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        if torch.device(device).type != NAME:
            return _REAL_GENERATOR(device)
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device(NAME, 0)


_REAL_GENERATOR = torch.Generator
_default = _REAL_GENERATOR()
"""The device's own generator, for operations that are given none."""


class _Module:
    """The module `torch.standin`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        counts.reads += 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        _default.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return _default.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        _default.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _has(name: str, key: str) -> bool:
    return name in _NAMES and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


_NAMES = set(torch._C._dispatch_get_all_op_names())


def install() -> StandIn:
    """Register the device in this process."""
    if getattr(torch, NAME, None) is None:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        library = torch.library.Library("aten", "IMPL")
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("aten::"):
                continue
            arguments = torch._C._get_schema(name.partition(".")[0], name.partition(".")[2]).arguments
            makes = any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)
            # Those that make a result of no size and let the kernel resize it: this memory cannot be resized.
            resized = _has(name, "CompositeExplicitAutograd") and _has(name.partition(".")[0] + ".out", "CPU")
            if name in ALSO or makes or resized or _has(name, "CPU"):
                packet, _, overload = name.removeprefix("aten::").partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name.removeprefix("aten::"), _kernel(name, op), "PrivateUse1")
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast changes nothing here
        torch.Generator = _Generator  # pyright: ignore[reportAttributeAccessIssue]
        install.kept = library, everything  # type: ignore[attr-defined]
    return counts
