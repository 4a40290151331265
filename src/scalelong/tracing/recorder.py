"""One forward of a model, recorded: operations, calls, what follows from what. The model is left untouched."""

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .identity import Identity, Write
from .isolation import in_foreign_hook, isolated_run
from .trace import (
    KINDS,
    Argument,
    Call,
    CallSite,
    Frame,
    FunctionCall,
    Invocation,
    Leaf,
    Merge,
    Node,
    Trace,
    TreePath,
    held_tensors,
    is_model_code,
    is_own_code,
    leaves,
)

# What counts as a layer: it has learned weights, or mixes positions. Everything does that is not known to do neither,
# so that recurrent layers, Fourier transforms, scans and operations of other libraries count.

_NO_LAYERS = frozenset(
    """
    cat stack copy clone _to_copy contiguous lift_fresh lift slices alias resize_ set_ polar complex _reshape_copy
    index index_select index_put index_copy index_fill index_add gather scatter scatter_add scatter_reduce take where
    take_along_dim masked_fill masked_scatter masked_select slice_scatter select_scatter diagonal_scatter tril triu
    flip roll repeat repeat_interleave tile rot90 constant_pad_nd pad im2col col2im pixel_shuffle pixel_unshuffle
    channel_shuffle diag_embed as_strided_scatter grid_sampler_2d grid_sampler_3d affine_grid_generator
    sum mean amax amin max min argmax argmin var std var_mean std_mean prod norm linalg_vector_norm any all logsumexp
    median mode sort topk kthvalue argsort nonzero count_nonzero _softmax _log_softmax _safe_softmax softmax trace
    dropout native_dropout bernoulli normal renorm _weight_norm_interface dequantize quantize_per_tensor
    _local_scalar_dense item equal searchsorted bucketize histc bincount one_hot _unique2 unique_dim
    """.split()  # noqa: SIM905, as a list it would fill two screens
)
_NO_LAYER_PARTS = ("_norm", "upsample", "_pool", "reflection_pad", "replication_pad", "fake_quantize", "foreach")
# These take the shape of a tensor, not its values.
_SHAPE_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_")
# These write without looking at what was there.
_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"))


@dataclass(frozen=True, slots=True)
class _Operation:
    """The schema of an operation, in short."""

    name: str
    is_layer: bool
    writes: tuple[int | str, ...]
    """The arguments that it changes, by position or keyword."""
    outs: tuple[str, ...]


@cache
def _operation(func: Any) -> _Operation:
    schema = func._schema
    name = schema.name.partition("::")[2]
    written = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    writes = tuple(key for n in written for key in (n, schema.arguments[n].name))
    outs = tuple(argument.name for argument in schema.arguments if argument.is_out)
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    plain = name.rstrip("_").removesuffix("_copy")
    known = views or torch.Tag.pointwise in func.tags or plain in _NO_LAYERS or name in _NO_LAYERS
    known = known or any(part in name for part in _NO_LAYER_PARTS) or name.startswith(_SHAPE_ONLY)
    return _Operation(name, not known, writes, outs)


def counted_as(name: str) -> str:
    """Operations are numbered by name, those of other people's hooks apart: a hook may run others the next time."""
    return f"hook {name}" if in_foreign_hook() else name


def named_merge(frame: FrameType | None) -> tuple[int, int] | None:
    """The number and the axis, if it is `scalelong.merge` that runs between this frame and the text of the model."""
    while frame is not None and not is_model_code(frame.f_code):
        if frame.f_code.co_name == "merge" and is_own_code(frame.f_code):
            return frame.f_locals["i"], frame.f_locals["dim"]
        frame = frame.f_back
    return None


class CallStack:
    """Looks at the Python stack. Only the frames of the last look are held, so that no variables are kept alive."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._frames: list[FrameType] = []
        self._invocations: list[Invocation] = []

    def look(self, frame: FrameType) -> Invocation:
        """The run of the innermost function. The same run is the same object at every look."""
        frames: list[FrameType] = []
        at: FrameType | None = frame
        while at is not None:
            frames.append(at)
            at = at.f_back
        frames.reverse()
        same = 0
        for old, new in zip(self._frames, frames, strict=False):
            if old is not new:
                break
            same += 1
        del self._frames[same:], self._invocations[same:]
        for new in frames[same:]:
            parent = self._invocations[-1] if self._invocations else None
            code, owner = new.f_code, None
            if code.co_argcount and is_model_code(code):
                first = new.f_locals.get(code.co_varnames[0])
                owner = self._names.get(first) if isinstance(first, nn.Module) else None
            self._invocations.append(Invocation(code, parent, len(self._invocations), owner))
            self._frames.append(new)
        return self._invocations[-1]

    def site(self, frame: FrameType) -> CallSite | None:
        """The call site that led to torch from this frame; None if no method of a module did."""
        self.look(frame)
        frames = []
        for at, invocation in zip(reversed(self._frames), reversed(self._invocations), strict=True):
            if at.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
                frames = []  # how a subclass of Tensor carries out an operation; the model's text is further out
            elif is_model_code(at.f_code):
                frames.append(Frame(at.f_code, at.f_lasti, invocation))
                if invocation.module is not None:
                    return CallSite(tuple(frames))
        return None


class Recorder(TorchDispatchMode):
    """Records every operation while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.identity = Identity(self._assembled)
        self.python = CallStack(self.names)
        self._counts: Counter[str] = Counter()
        self._stack: list[Call] = []
        self._arguments: list[list[Tensor]] = []
        self._functions: dict[FrameType, FunctionCall] = {}
        # The weights, and what is computed from them alone.
        self._weights = WeakTensorKeyDictionary(dict.fromkeys([*model.parameters(), *model.buffers()], True))

    # Module boundaries -------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.names[module]
        call = Call(
            name=name,
            module=module,
            parent=self._stack[-1] if self._stack else None,
            start=len(self.trace.nodes),
            inputs=self.tracked((args, kwargs)),
            site=self.python.site(sys._getframe(1)),
            is_mapped=torch._C._functorch.maybe_current_level() is not None,  # pyright: ignore
        )
        self.trace.call_count[name] += 1
        self._stack.append(call)
        self._arguments.append([tensor for _, tensor in _tensors((args, kwargs))])
        self.trace.calls.append(call)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._stack[-1]
        if call.inputs and next(module.parameters(), None) is not None:
            self._note_unseen(type(module).__name__, [node for _, node in call.inputs], output)
        self._stack.pop()
        call.end = len(self.trace.nodes)
        call.outputs = self.tracked(output)
        before, now = self._arguments.pop(), [tensor for _, tensor in _tensors((args, kwargs))]
        call.pops_list = len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))

    def _note_unseen(self, name: str, inputs: list[int], output: Any) -> None:
        """A result that no operation made: the code left torch, for NumPy or a kernel of its own. It is one layer."""
        for _, tensor in leaves(output):
            is_feature = tensor.is_floating_point() or tensor.is_complex()
            if is_feature and not self.identity.has_seen(tensor) and tensor not in self._weights:
                nodes = tuple(dict.fromkeys(inputs))
                node = self._add(name, tensor, nodes, nodes, is_layer=True)
                node.is_learned = True
                self.identity.know(tensor, node.index)

    @contextmanager
    def watching_functions(self) -> Iterator[None]:
        """Custom functions for autograd may leave torch as well: look at what goes in and comes out of each."""
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = [node for _, node in self.tracked((args, kwargs))]
            output = original.__func__(cls, *args, **kwargs)
            if inputs:
                self._note_unseen(cls.__name__, inputs, output)
            return output

        torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore
        try:
            yield
        finally:
            torch.autograd.Function.apply = original  # pyright: ignore

    # Operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _operation(func)
        name = operation.name
        found = [(path, tensor) for path, tensor in leaves((args, kwargs))]
        tensors = [tensor for _, tensor in found]
        ignored = {*operation.outs, *(operation.writes if name in _OVERWRITE else ())}
        operands = tuple(None if path[1] in ignored else self.identity.node_of(tensor) for path, tensor in found)
        result = func(*args, **kwargs)
        counted = counted_as(name)
        ordinal = self._counts[counted]
        self._counts[counted] += 1
        outputs = [tensor for _, tensor in leaves(result)]
        written = [tensor for path, tensor in found if path[1] in operation.writes]
        inputs = tuple(dict.fromkeys(node for node in operands if node is not None))
        if not inputs or name.startswith(_SHAPE_ONLY):
            learned = any(tensor in self._weights for tensor in tensors)
            # What is made of tensors of unknown origin is of unknown origin; see `_note_unseen`.
            origin = learned or all(self.identity.has_seen(tensor) for tensor in tensors)
            # Memory that a kernel of its own will fill, as Triton's do.
            origin = origin and "empty" not in name
            for tensor in outputs if origin else ():
                self.identity.know(tensor, None)
                if learned:
                    self._weights[tensor] = True
            for tensor in written:
                self.identity.write(tensor, None)
            return result
        if not outputs and not written:
            return result
        made = (written or outputs)[0]
        # The arguments without tensors and lists of tensors.
        options = tuple(item for item in (*args, *kwargs.values()) if not any(True for _ in leaves(item)))
        node = self._add(name, made, inputs, operands, options, is_layer=operation.is_layer)
        node.is_learned = node.is_layer and any(tensor in self._weights for tensor in tensors)
        if written:
            for tensor in written:
                self.identity.write(tensor, node.index)
        elif len(outputs) == 1:
            self.identity.know(outputs[0], node.index)
        else:
            # Each piece of a split is a tensor of its own.
            for tensor in outputs:
                self.identity.know(tensor, self._add(f"{name} output", tensor, (node.index,), (node.index,)).index)
        joins = len(tensors) > 1 and (len(inputs) > 1 or name in KINDS)
        if joins and node.is_number and self._stack:
            site = self.python.site(sys._getframe(1))
            if site is not None:
                self._add_merge(node, ordinal, tensors, operands, args, kwargs, site)
        return result

    def _add(
        self,
        name: str,
        tensor: Tensor,
        inputs: tuple[int, ...],
        operands: tuple[int | None, ...],
        options: tuple[Any, ...] = (),
        *,
        is_layer: bool = False,
    ) -> Node:
        trace = self.trace
        index, ancestors = len(trace.nodes), 0
        for one in inputs:
            ancestors |= trace.with_ancestors(one)
            trace.users[one].append(index)
        is_number = tensor.is_floating_point() or tensor.is_complex()
        is_layer = is_layer and is_number
        call = self._stack[-1] if self._stack else None
        node = Node(index, name, tuple(tensor.shape), inputs, operands, ancestors, call, options, is_number, is_layer)
        node.scope = self.python.look(sys._getframe(2)) if is_layer else None
        trace.nodes.append(node)
        trace.layers |= is_layer << index
        trace.mixtures |= (not is_layer and (None in operands or name == "stack")) << index
        trace.products |= (name in ("mul", "mul_") and len(inputs) == 2) << index
        return node

    def _add_merge(
        self, node: Node, ordinal: int, tensors: list[Tensor], operands: Any, args: Any, kwargs: Any, site: CallSite
    ) -> None:
        kind, positions, axis = KINDS.get(node.name, "other"), tuple(range(len(tensors))), None
        if node.name.startswith("addc"):
            # x + a * b: a factor of either a or b is a factor of the product. The one that is a feature is the operand.
            alike = [n for n in (1, 2) if operands[n] is not None and tensors[n].shape == tensors[0].shape]
            positions = (0, alike[0] if alike else 1)
        elif kind in ("add", "lerp"):
            positions = (0, 1)
        elif kind == "cat":
            axis = int(args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(len(node.shape), 1)
        shapes = tuple(tuple(tensors[n].shape) for n in positions)
        widths = [0 if axis is None or len(shape) <= axis else shape[axis] for shape in shapes]
        is_broadcast = kind in ("add", "lerp") and len(set(shapes)) > 1
        merge = Merge(
            kind=kind,
            node=node.index,
            operands=tuple(operands[n] for n in positions),
            shapes=shapes,
            axis=axis,
            starts=tuple(sum(widths[:n]) for n in range(len(widths))),
            name=counted_as(node.name),
            ordinal=ordinal,
            positions=positions,
            call=self._stack[-1],
            site=site,
            named=named_merge(sys._getframe(2)),
            is_broadcast=is_broadcast,
            is_scalable=kind != "other" and not is_broadcast,
        )
        self.trace.merges.append(merge)

    def _assembled(self, tensor: Tensor, writes: list[Write], before: int | None) -> int:
        """A node for a tensor that was written in parts (`out[:, :c] = x`), or through another view of its memory."""
        written = [write.node for write in reversed(writes) if write.node is not None]
        nodes = tuple(dict.fromkeys(written if before is None else [before, *written]))
        node = self._add("alias" if len(nodes) == 1 else "slices", tensor, nodes, nodes).index
        site = self.python.site(sys._getframe(2)) if len(nodes) > 1 and self._stack else None
        if site is not None:
            shapes, starts = tuple(self.trace.nodes[one].shape for one in nodes), (0,) * len(nodes)
            call = self._stack[-1]
            self.trace.merges.append(Merge("other", node, nodes, shapes, None, starts, "slices", 0, starts, call, site))
        return node

    # Plain functions ---------------------------------------------------------------------------------------------

    def watch(self, frame: FrameType, event: str, value: Any) -> None:
        """A profiler that notes calls from the model's own functions: of each other, and of torch's (checkpoint)."""
        if event == "call" and frame.f_back is not None and is_model_code(frame.f_back.f_code):
            site = self.python.site(frame.f_back)
            if site is None or site.method is None:
                return
            words = {word: self.identity.node_of(item) for word, item in _arguments(frame) if isinstance(item, Tensor)}
            parameters = {word: node for word, node in words.items() if node is not None}
            # Callbacks for tensors that die at this moment, and what we put into the text, are no calls of the model.
            if is_own_code(frame.f_code) or (not parameters and not is_model_code(frame.f_code)):
                return
            call = FunctionCall(parameters=parameters, start=len(self.trace.nodes), site=site)
            self._functions[frame] = call
            self.trace.functions.append(call)
        elif event == "return" and frame in self._functions:
            call = self._functions.pop(frame)
            call.end, call.outputs = len(self.trace.nodes), self.tracked(value)

    def tracked(self, value: Any) -> list[Leaf]:
        nodes = ((path, self.identity.node_of(tensor)) for path, tensor in _tensors(value))
        return [(path, node) for path, node in nodes if node is not None]


def _tensors(value: Any) -> list[tuple[TreePath | None, Tensor]]:
    """The tensors in a value. Those inside objects have no path."""
    return [*leaves(value), *((None, tensor) for tensor in held_tensors(value))]


def _arguments(frame: FrameType) -> Iterator[tuple[Argument, Any]]:
    """The arguments of a function that begins to run, as they may stand in the text of the call; without `self`."""
    names, more, keywords, values = inspect.getargvalues(frame)
    bound = int(names[:1] == ["self"])
    positional = frame.f_code.co_argcount - bound
    for n, name in enumerate(names[bound:]):
        yield Argument(n if n < positional else None, name), values.get(name)
    for n, item in enumerate(values.get(more or "", ())):
        yield Argument(positional + n), item
    for name, item in values.get(keywords or "", {}).items():
        yield Argument(keyword=name), item


def record(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, functions: bool = False) -> Trace:
    """Run the model once in evaluation mode, without gradients and uncompiled. It is left as it was.

    `functions` also records the calls of plain functions, which takes longer.
    """
    with isolated_run(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trace, kept = _record(model, args, kwargs, functions, ())
        if kept:
            trace.later, _ = _record(model, args, kwargs, False, kept)
        return trace


def record_forward(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, functions: bool = False) -> Trace:
    """Record one forward of a model whose run is isolated already, in the mode in which it is."""
    return _record(model, args, kwargs, functions, ())[0]


def _record(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], functions: bool, kept: Sequence[Tensor]
) -> tuple[Trace, list[Tensor]]:
    """The record of one forward after another that left these features in the modules; and what it leaves itself."""
    recorder = Recorder(model)
    trace, identity, handles = recorder.trace, recorder.identity, []
    found = enumerate(_tensors((tuple(args), kwargs)))
    given = [(t, "input", f"object {n}" if path is None else ".".join(map(str, path[1:]))) for n, (path, t) in found]
    for tensor, kind, name in (*given, *((tensor, "kept", f"kept {n}") for n, tensor in enumerate(kept))):
        identity.know(tensor, len(trace.nodes))
        trace.nodes.append(Node(len(trace.nodes), kind, tuple(tensor.shape), options=(name,)))
    profiler = sys.getprofile()
    try:
        for module in recorder.names:
            handles.append(module.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(recorder.leave, with_kwargs=True))
        with recorder, recorder.watching_functions():
            if functions:
                sys.setprofile(recorder.watch)
            output = model(*args, **kwargs)
    finally:
        if functions:
            _restore_profiler(profiler)
        for handle in handles:
            handle.remove()
        recorder.python = CallStack({})  # its frames hold variables
    trace.outputs = {node for _, node in recorder.tracked(output)}
    # Attributes, lists, dictionaries and buffers of the modules.
    held = (value for module in recorder.names for name, value in vars(module).items() if name != "_parameters")
    left = [tensor for value in held for _, tensor in leaves(value) if identity.node_of(tensor) is not None]
    return trace, left


def _restore_profiler(profiler: Any) -> None:
    # cProfile's is no function: it has to be switched on again by its own means.
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()
