"""Sampling that runs the inner part of a U at every k-th step only, for any network whose long skips are found.

    with cached(unet, depth=1, every=3) as cache:
        images = pipeline(...).images
    print(cache)

At a full step everything runs, and the results of the modules inside of long skip `depth` are kept. At the steps in
between only the shell runs: what lies outside of that skip. Its merge takes the main path of the last full step
(DeepCache, arXiv 2312.00858). Which modules lie inside follows from one recorded forward: those whose results reach
the output through the main path of that merge alone. They return what was kept, so that none of their layers runs.

It is right or refused, as scaling is: on the first inputs a step from the cache is compared with a forward whose merge
is given the kept main path by a dispatch mode, which shares no code with it.
"""

import inspect
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CacheError, InvalidConfigError, VerificationError
from ..tracing import Call, Merge, Trace, leaves, untouched
from .attach import attached, paused
from .find import Patterns, record_forward, select_skips
from .host import native_plan, unwrap
from .verify import changing_operand, difference, tensors_in, verifying

TIMES = ("timestep", "timesteps", "t", "time", "times", "sigma", "sigmas", "noise_level", "noise_labels")
"""What models call the argument that says how far sampling is."""

Schedule = Collection[int] | Callable[[int], bool]


def cached(
    model: nn.Module,
    *,
    depth: int = 1,
    every: int = 3,
    full: Schedule | None = None,
    time: str | None = None,
    passes: int = 1,
    include: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
) -> "Cached":
    """A context in which the model, while it samples, runs its inner part at some steps only. Nothing is left behind.

    depth: the long skip whose shell runs at every step; 1 is the outermost, and the cheapest.
    every: the inner part runs at steps 0, every, 2 every, ... With 1 the model computes what it always does.
    full: instead, the numbers of these steps, or a function that says whether a step is one of them.
    time: the argument of the model that says how far sampling is, if it has none of the usual names. Forwards with
        equal times are one step: guidance in two forwards keeps two caches.
    passes: forwards of one step, for models without such an argument.
    include, exclude: as for `find_skips`.

    A sequence of steps begins anew when the time goes back, and after `reset()`. Training and gradients are refused,
    and so is a condition or a size that changes in the middle of a sequence.
    """
    if not isinstance(depth, int) or depth < 1:
        raise InvalidConfigError(f"depth must be the number of a long skip, from 1, got {depth!r}")
    if not isinstance(every, int) or every < 1:
        raise InvalidConfigError(f"every must be a whole number of steps, at least 1, got {every!r}")
    if not isinstance(passes, int) or passes < 1:
        raise InvalidConfigError(f"passes must be a whole number, at least 1, got {passes!r}")
    is_full = _schedule(every, full)
    times = TIMES if time is None else (time,)
    return Cached(unwrap(model), depth, is_full, times, passes, (include, exclude), verify)


def _schedule(every: int, full: Schedule | None) -> Callable[[int], bool]:
    if full is None:
        return lambda step: step % every == 0
    if callable(full):
        return full
    steps = set(full)
    if 0 not in steps:
        raise InvalidConfigError(f"the first step must be a full one: full={sorted(steps)} has no 0")
    return steps.__contains__


@dataclass(frozen=True)
class Inner:
    """The part of a forward that a cache stands in for."""

    calls: frozenset[tuple[str, int]]
    """The outermost module calls in it, by name and number."""
    layers: int
    """Layers that do not run."""
    all_layers: int
    merge: Merge | None
    """That of the long skip; None for a model that merges itself."""
    operand: int
    block: str
    """The block that gets main path and skip, of a model that merges itself."""
    kind: Any


@dataclass
class _Sequence:
    """The steps of one image, or of one batch of them."""

    step: int = -1
    slot: int = 0
    forwards: int = 0
    time: float | None = None
    falling: bool | None = None
    kept: dict[int, dict[tuple[str, int], Any]] = field(default_factory=dict)
    """What the inner modules returned at the last full step, by pass."""
    given: dict[int, tuple[Any, list[tuple[str, Any]]]] = field(default_factory=dict)
    """Sizes and conditions of that step, by pass."""


class Cached:
    """See `cached`. `full_steps`, `cached_steps` and `share` tell what was saved."""

    def __init__(
        self,
        host: nn.Module,
        depth: int,
        is_full: Callable[[int], bool],
        times: tuple[str, ...],
        passes: int,
        patterns: tuple[Patterns, Patterns],
        verify: bool,
    ) -> None:
        self.host, self.depth, self.passes = host, depth, passes
        self.full_steps = self.cached_steps = 0
        self.inner: Inner | None = None
        self._is_full, self._times, self._patterns, self._verify = is_full, times, patterns, verify
        self._sequence = _Sequence()
        self._mode = "plain"
        self._counts: dict[str, int] = {}
        self._copies = False
        self._store: dict[tuple[str, int], Any] = {}
        self._stack = ExitStack()
        self._silence: ExitStack | None = None
        self._stand_ins: list[tuple[nn.Module, Any]] = []

    @property
    def share(self) -> float:
        """The share of the model's layers that a step from the cache leaves out."""
        return 0.0 if self.inner is None else self.inner.layers / self.inner.all_layers

    def __str__(self) -> str:
        if self.inner is None:
            return f"cache around long skip {self.depth}: no step yet"
        return (
            f"cache around long skip {self.depth}: {self.full_steps} full forwards and {self.cached_steps} from the "
            f"cache, each without {self.inner.layers} of {self.inner.all_layers} layers"
        )

    def reset(self) -> None:
        """The next step begins a new image."""
        self._sequence = _Sequence()

    def __enter__(self) -> "Cached":
        if "_scalelong_cache" in self.host.__dict__:
            raise CacheError(f"this {type(self.host).__name__} is in a cache already; leave that one first")
        compiled = [name or "it" for name, m in self.host.named_modules() if m._compiled_call_impl is not None]
        if compiled:
            raise CacheError(
                f"{type(self.host).__name__} is compiled ({', '.join(compiled[:3])}), and compiled code does not ask "
                f"whether a module should run: use the model as it is without torch.compile"
            )
        self.host.__dict__["_scalelong_cache"] = self
        self._stack.callback(self.host.__dict__.pop, "_scalelong_cache", None)
        before = self.host.register_forward_pre_hook(self._begin, with_kwargs=True)
        after = self.host.register_forward_hook(self._end, always_call=True)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)
        self._stack.callback(self._unplace)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._end()
        self.reset()

    # One forward

    def _begin(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._mode != "plain" or verifying():
            return  # a forward beside the one that is meant, to compare with
        if host.training or (torch.is_grad_enabled() and any(p.requires_grad for p in host.parameters())):
            raise CacheError(
                "a cache is for sampling: call model.eval() and sample under torch.no_grad(); there are no gradients "
                "through what was computed at another step"
            )
        kind = _kind((args, kwargs))
        if self.inner is None or self.inner.kind != kind:
            self._prepare(args, kwargs, kind)
        sequence = self._advance(args, kwargs, kind)
        step_is_full = self._is_full(sequence.step) or sequence.slot not in sequence.kept
        self._counts = {}
        if step_is_full:
            self.full_steps += 1
            self._mode, self._store = "full", {}
            sequence.kept[sequence.slot] = self._store
        else:
            self.cached_steps += 1
            self._mode, self._store = "cached", sequence.kept[sequence.slot]
            self._expect_less()

    def _end(self, *_: Any) -> None:
        if verifying():
            return
        if self._silence is not None:
            self._silence.close()
            self._silence = None
        self._mode = "plain"

    def _expect_less(self) -> None:
        """Long skips in the inner part are not merged at this step, and the scaling must not miss them."""
        state = attached(self.host)
        self._silence = ExitStack()
        if state is not None:
            self._silence.enter_context(state.tally.partly())

    def _advance(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any) -> _Sequence:
        """Which step and pass this forward is, of which sequence."""
        named = _named(self.host, args, kwargs)
        time = next((_number(value) for name, value in named if name in self._times), None)
        sequence = self._sequence
        if time is None:
            begins = sequence.forwards % self.passes == 0
        else:
            begins = time != sequence.time
            falls = None if sequence.time is None or not begins else time < sequence.time
            if falls is not None and sequence.falling is None:
                sequence.falling = falls
            if falls is not None and falls != sequence.falling:
                sequence = self._sequence = _Sequence()
        sequence.step += begins
        sequence.slot = 0 if begins else sequence.slot + 1
        sequence.time = time
        sequence.forwards += 1
        conditions = [(name, value) for name, value in named[1:] if name not in self._times]
        known = sequence.given.get(sequence.slot)
        if known is not None:
            changed = [] if known[0] == kind else ["the size of its inputs"]
            changed += [name for (name, a), (_, b) in zip(conditions, known[1], strict=False) if not _same(a, b)]
            if changed:
                advice = "" if time is not None else f"; if it is the time of sampling, say so: time={changed[-1]!r}"
                raise CacheError(
                    f"{', '.join(changed)} changed in the middle of sampling, and what was kept belongs to what was "
                    f"given before: call reset() where another image begins{advice}"
                )
        sequence.given[sequence.slot] = (kind, conditions)
        return sequence

    # The inner part

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any) -> None:
        self._unplace()
        self._mode = "check"
        try:
            trace = record_forward(self.host, *_copied((args, kwargs)))
        finally:
            self._mode = "plain"
        self.inner = _inner(self.host, trace, self.depth, self._patterns, kind)
        for name in {name for name, _ in self.inner.calls}:
            self._place(name)
        if self._verify:
            self._check((args, kwargs))

    def _place(self, name: str) -> None:
        module = self.host.get_submodule(name)
        self._stand_ins.append((module, module.__dict__.get("forward")))
        module.forward = _StandIn(self, name, module.forward)

    def _unplace(self) -> None:
        for module, own in reversed(self._stand_ins):
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own
        self._stand_ins = []

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What an inner module returns: its result, which is kept at a full step, or what was kept."""
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        assert self.inner is not None
        key = (name, number)
        if self._mode not in ("full", "cached") or key not in self.inner.calls or verifying():
            return forward(*args, **kwargs)
        if self._mode == "cached":
            return self._packed(self._store[key])
        result = forward(*args, **kwargs)
        self._store[key] = self._packed(result)
        return result

    def _packed(self, value: Any) -> Any:
        """Containers of its own, because callers empty and extend them; tensors too where callers write into them."""
        return pytree.tree_map(lambda leaf: leaf.clone() if self._copies and isinstance(leaf, Tensor) else leaf, value)

    # The check

    def _check(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """A step from the cache, against a forward whose merge is given the kept main path."""
        other = _other_image(call)
        assert self.inner is not None
        with paused(self.host):
            main: list[Tensor] = []
            plain = self._run(call, "plain", capture=main)
            wanted = self._run(other, "plain", replace=main)
            for self._copies in (False, True):
                self._store = {}
                full = self._run(call, "full")
                far = difference(self._run(call, "cached"), plain)
                far = difference(full, plain) if far is None else far
                far = difference(self._run(other, "cached"), wanted) if far is None else far
                # Once more: a caller may write into what it was given.
                far = difference(self._run(call, "cached"), plain) if far is None else far
                if far is None:
                    return
        raise VerificationError(
            f"a step from the cache differs by {far:.1e} from a forward that is given the main path of the last full "
            f"step at long skip {self.depth}: {type(self.host).__name__} keeps something between forwards, or draws "
            f"random numbers that do not follow torch's seed. Nothing was changed"
        )

    def _run(
        self, call: Any, mode: str, *, capture: list[Tensor] | None = None, replace: list[Tensor] | None = None
    ) -> list[Tensor]:
        args, kwargs = _copied(call)
        before = self._mode
        self._counts = {}
        with ExitStack() as stack:
            stack.enter_context(untouched(self.host))
            stack.enter_context(torch.no_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            random.seed(0)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            if capture is not None or replace is not None:
                stack.enter_context(self._at_merge(capture, replace))
            # "check" lets forwards through `_begin` that are to run as they are.
            self._mode = "check" if mode == "plain" else mode
            try:
                output = self.host.forward(*args, **kwargs)
            finally:
                self._mode = before
        return [tensor.detach().clone() for tensor in tensors_in(output)]

    @contextmanager
    def _at_merge(self, capture: list[Tensor] | None, replace: list[Tensor] | None) -> Iterator[None]:
        """Look at the main path where the merge takes it, or put another one in its place."""

        def change(tensor: Tensor) -> Tensor:
            if capture is not None:
                capture.append(tensor.detach().clone())
                return tensor
            assert replace is not None
            return replace[0].to(tensor)

        assert self.inner is not None
        if self.inner.merge is not None:
            with changing_operand(self.inner.merge, self.inner.operand, change):
                yield
            return

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return change(args[0]), *args[1:]

        handle = self.host.get_submodule(self.inner.block).register_forward_pre_hook(enter)
        try:
            yield
        finally:
            handle.remove()


class _StandIn:
    """The forward of a module in the inner part."""

    def __init__(self, cache: Cached, name: str, forward: Callable[..., Any]) -> None:
        self.cache, self.name, self.forward = cache, name, forward
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cache.call(self.name, self.forward, args, kwargs)


def _inner(host: nn.Module, trace: Trace, depth: int, patterns: tuple[Patterns, Patterns], kind: Any) -> Inner:
    """What reaches the output through the main path at merge `depth` alone, as module calls."""
    merge, operand, block = None, -1, ""
    native = native_plan(host)
    if native is not None:
        _require_depth(depth, len(native))
        block = native.skips[depth - 1].consumer
        calls = [call for call in trace.calls if call.name == block]
        if not block or len(calls) != 1:
            raise CacheError(f"which block of {type(host).__name__} takes long skip {depth} is not known")
        main = calls[0].inputs[0][1]
    else:
        selection = select_skips(trace, *patterns)
        _require_depth(depth, len(selection.chosen))
        if selection.repeats > 1:
            raise CacheError(f"{type(host).__name__} runs its U {selection.repeats} times in one forward")
        candidate = selection.chosen[depth - 1]
        merge, operand, main = candidate.merge, candidate.main, candidate.main_node
    needed = _needed(trace, main)
    inner = [call for call in trace.calls if _is_inner(call, needed, main)]
    outermost = [call for call in inner if not any(other is not call and other in inner for other in call.stack())]
    if not outermost:
        raise CacheError(f"no module of {type(host).__name__} lies inside of long skip {depth}")
    fresh = _fresh(trace, needed, main, outermost)
    if fresh is not None:
        raise CacheError(
            f"the main path that enters the merge of long skip {depth} is computed from {fresh} outside of any module, "
            f"so that it cannot be kept: put that computation into a module, or take another depth"
        )
    layers = [node.index for node in trace.nodes if node.is_layer]
    left_out = sum(any(call.contains(node) for call in outermost) for node in layers)
    numbers = frozenset((call.name, call.number) for call in outermost)
    return Inner(numbers, left_out, len(layers), merge, operand, block, kind)


def _require_depth(depth: int, count: int) -> None:
    if depth > count:
        raise CacheError(f"depth={depth}, but there are {count} long skips; 1 is the outermost")


def _needed(trace: Trace, main: int) -> set[int]:
    """The nodes that the outputs depend on if the main path at the merge is given."""
    needed: set[int] = set()
    waiting = list(trace.outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node == main else trace.nodes[node].inputs
    return needed


def _is_inner(call: Call, needed: set[int], main: int) -> bool:
    """Whether nothing in the call is needed but the main path that it returns, nor what it does to lists."""
    if call.parent is None or call.end <= call.start or call.pops_list:
        return False
    inside = [node for node in range(call.start, call.end) if node in needed]
    return not inside or (inside == [main] and any(node == main for _, node in call.outputs))


def _fresh(trace: Trace, needed: set[int], main: int, kept: list[Call]) -> str | None:
    """A node of this step that the main path would be computed from; None if all of it comes from what is kept."""
    waiting, seen = [main], set()
    while waiting:
        node = waiting.pop()
        if node in seen or any(call.contains(node) for call in kept):
            continue
        seen.add(node)
        at = trace.nodes[node]
        if (node in needed and node != main) or not at.inputs:
            return f"{at.name} {tuple(at.shape)}" + (f" in {at.call.name}" if at.call and at.call.name else "")
        waiting += at.inputs
    return None


# Inputs


def _kind(call: Any) -> Any:
    return tuple((path, tuple(t.shape), t.dtype, str(t.device)) for path, t in leaves(call))


def _named(host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments by name, the image first."""
    try:
        bound = inspect.signature(host.forward).bind(*args, **kwargs).arguments
        return list(bound.items())
    except (TypeError, ValueError):
        return [(str(n), value) for n, value in enumerate(args)] + list(kwargs.items())


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value.flatten()[0]) if value.numel() else None
    return float(value) if isinstance(value, int | float) else None


def _same(one: Any, other: Any) -> bool:
    a, b = [*tensors_in(one)], [*tensors_in(other)]
    if len(a) != len(b):
        return False
    return all(x is y or (x.shape == y.shape and torch.equal(x, y)) for x, y in zip(a, b, strict=True))


def _copied(call: Any) -> tuple[Any, Any]:
    args, kwargs = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, call)
    return args, kwargs


def _other_image(call: Any) -> Any:
    """The same call with another image: noise on the first floating-point tensor with positions."""
    done = False
    generator = torch.Generator().manual_seed(1)

    def changed(value: Any) -> Any:
        nonlocal done
        if done or not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return value
        done = True
        return value + torch.randn(value.shape, generator=generator).to(value)

    return pytree.tree_map(changed, call)
