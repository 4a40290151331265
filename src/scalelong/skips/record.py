"""Record one forward of a model, with every operation and every module call."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .callsite import CallSites, is_model_code
from .trace import Call, FunctionCall, Merge, Node, Path, Trace, leaves
from .untouched import untouched

LAYER = re.compile(
    r"^(_|mkldnn_|cudnn_)?conv|^_?(add|b|badd|int_|scaled_)*mm$|^addbmm$|^linear$|attention|lstm|gru|encoder_layer"
)
MERGES = {"cat": "cat", "add": "add", "add_": "add", "sub": "add", "sub_": "add", "lerp": "lerp", "lerp_": "lerp"}
# These take the shape of a tensor, not its values.
SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_")


class Recorder(TorchDispatchMode):
    """Records every operation while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace(model)
        self.names = {module: name for name, module in model.named_modules()}
        self._node_of = WeakTensorKeyDictionary()
        self._last_write: dict[int, int] = {}
        self._sites = CallSites(self.names)
        self._counts: Counter[str] = Counter()
        self._stack: list[Call] = []
        self._lists: list[list[tuple[list[Any], int]]] = []
        self._functions: dict[FrameType, FunctionCall] = {}

    # Module boundaries -------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.names[module]
        call = Call(
            name=name,
            module=module,
            parent=self._stack[-1] if self._stack else None,
            start=len(self.trace.nodes),
            inputs=self._tracked((args, kwargs)),
            site=self._sites.current(),
        )
        self.trace.call_count[name] += 1
        self._stack.append(call)
        self._lists.append([(value, len(value)) for value in _lists((args, kwargs))])
        self.trace.calls.append(call)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        call = self._stack.pop()
        call.end = len(self.trace.nodes)
        call.outputs = self._tracked(output)
        call.emptied = any(len(value) != length for value, length in self._lists.pop())
        self._sites.release()

    # Operations --------------------------------------------------------------------------------------------------

    def add_input(self, tensor: Tensor, path: Path) -> None:
        node = Node(len(self.trace.nodes), "input", tuple(tensor.shape), options=(".".join(map(str, path)),))
        self.trace.nodes.append(node)
        self._node_of[tensor] = node.index

    def node_of(self, tensor: Tensor) -> int | None:
        node = self._node_of.get(tensor)
        # A later write through another view of the same memory changed this tensor, too.
        written = self._last_write.get(_memory(tensor))
        if written is not None and (node is None or written > node):
            return written
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [tensor for _, tensor in leaves((args, kwargs))]
        operands = tuple(self.node_of(tensor) for tensor in tensors)
        result = func(*args, **kwargs)
        self._counts[name] += 1
        inputs = tuple(dict.fromkeys(node for node in operands if node is not None))
        if not inputs or name.startswith(SHAPE_ONLY):
            for _, tensor in leaves(result):
                self._node_of.pop(tensor, None)
            return result
        outputs = [tensor for _, tensor in leaves(result)]
        if not outputs:
            return result
        node = self._add(name, outputs[0], inputs, operands, _plain((args, kwargs)))
        if func._schema.is_mutable:
            self._last_write[_memory(outputs[0])] = node.index
        if len(outputs) == 1:
            self._node_of[outputs[0]] = node.index
        else:
            # Each piece of a split is a tensor of its own.
            for tensor in outputs:
                self._node_of[tensor] = self._add(f"{name} output", tensor, (node.index,), (node.index,), ()).index
        if name in MERGES and outputs[0].is_floating_point():
            self._add_merge(MERGES[name], node, tensors, operands, args, kwargs)
        return result

    def _add(self, name: str, tensor: Tensor, inputs: tuple[int, ...], operands: Any, options: Any) -> Node:
        trace = self.trace
        ancestors = 0
        for one in inputs:
            ancestors |= trace.with_ancestors(one)
        is_layer = LAYER.search(name) is not None and not name.endswith(" output")
        call = self._stack[-1] if self._stack else None
        index = len(trace.nodes)
        node = Node(index, name, tuple(tensor.shape), inputs, operands, ancestors, call, options, is_layer)
        trace.nodes.append(node)
        trace.layers |= is_layer << index
        trace.products |= (name in ("mul", "mul_") and len(inputs) == 2) << index
        for one in inputs:
            trace.users[one].append(index)
        return node

    def _add_merge(self, kind: str, node: Node, tensors: list[Tensor], operands: Any, args: Any, kwargs: Any) -> None:
        site = self._sites.current()
        if len(tensors) < 2 or site is None or not self._stack:
            return
        axis = None
        if kind == "cat":
            axis = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(node.shape)
        else:
            tensors, operands = tensors[:2], operands[:2]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        ordinal = self._counts[node.name] - 1
        self.trace.merges.append(
            Merge(kind, node.name, ordinal, node.index, operands, shapes, axis, self._stack[-1], site)
        )

    # Plain functions ---------------------------------------------------------------------------------------------

    def watch(self, frame: FrameType, event: str, value: Any) -> None:
        """A profiler that notes calls of the model's own functions."""
        if event == "call" and frame.f_back is not None and is_model_code(frame.f_code):
            site = self._sites.current(frame.f_back)
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if site is None or not is_model_code(frame.f_back.f_code) or site.method is None:
                return
            bound = bool(names) and names[0] == "self"
            values = {name: frame.f_locals.get(name) for name in names}
            tensors = {name: self.node_of(item) for name, item in values.items() if isinstance(item, Tensor)}
            parameters = {name: node for name, node in tensors.items() if node is not None}
            call = FunctionCall(parameters, names[1:] if bound else names, len(self.trace.nodes), site)
            self._functions[frame] = call
            self.trace.functions.append(call)
        elif event == "return" and frame in self._functions:
            call = self._functions.pop(frame)
            call.end, call.outputs = len(self.trace.nodes), self._tracked(value)

    def _tracked(self, value: Any) -> list[tuple[Path, int]]:
        found = ((path, self.node_of(tensor)) for path, tensor in leaves(value))
        return [(path, node) for path, node in found if node is not None]


def record(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, functions: bool = False) -> Trace:
    """Run the model once in evaluation mode, without gradients and uncompiled. It is left as it was.

    `functions` also records the calls of plain functions, which takes longer.
    """
    recorder = Recorder(model)
    handles = []
    with untouched(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            for module in recorder.names:
                handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
            for path, tensor in leaves((tuple(args), kwargs)):
                recorder.add_input(tensor, path[1:])
            with recorder:
                profiler = sys.getprofile()
                if functions:
                    sys.setprofile(recorder.watch)
                try:
                    output = model(*args, **kwargs)
                finally:
                    sys.setprofile(profiler)
        finally:
            for handle in handles:
                handle.remove()
        recorder.trace.outputs = {node for _, node in recorder._tracked(_unpacked(output))}
    return recorder.trace


def _unpacked(output: Any) -> Any:
    """Outputs that are dataclasses without being dictionaries (transformers, diffusers) count as well."""
    return vars(output) if hasattr(output, "__dict__") and not isinstance(output, dict | Tensor) else output


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrapper subclasses have none
        return -id(tensor)


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ():
        yield from _lists(item)


def _plain(value: Any) -> tuple[Any, ...]:
    """The arguments without tensors and lists of tensors."""
    args, kwargs = value
    return tuple(item for item in (*args, *kwargs.values()) if not any(True for _ in leaves(item)))
